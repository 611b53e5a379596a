"""Prints the plan of a model whose memory and time cannot be estimated."""

import rich.console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memguard.parallel.mesh_shape import AXES
from memguard.planner.disk import format_bytes
from memguard.planner.storage import StorageMesh, StoragePlan

_NUM_SHOWN = 8


def render_storage_plan(plan: StoragePlan, out: rich.console.Console) -> None:
    """Print a plan: parameters, valid meshes with what a rank stores, and what is not known."""
    text = Text(plan.model, style="bold")
    text.append(f"  {_describe_parameters(plan)} on {plan.num_gpus:,} × {plan.gpu}", "not bold")
    out.print(text)
    split = (
        "layers can be split over y and x"
        if plan.can_be_split
        else "layers are not split: data and z only"
    )
    out.print(f"{plan.family}: {split}", style="dim", highlight=False)
    shown = list(plan.meshes[:_NUM_SHOWN])
    if plan.requested is not None:
        first = plan.requested.describe()
        shown = [plan.requested, *(mesh for mesh in shown if mesh.describe() != first)]
    out.print()
    out.print(_count(plan), highlight=False)
    out.print(Padding(_table(shown), (0, 0, 0, 2), expand=False), highlight=False)
    out.print()
    # The same reason for all but the number of active parameters.
    reason = plan.not_predicted["activations"]
    out.print(
        "Not predicted: activations, buffers, traffic and tokens/s, because "
        f"{reason}. A step needs more than what is stored.",
        style="yellow",
        highlight=False,
    )


def _describe_parameters(plan: StoragePlan) -> str:
    total = f"{_format_count(plan.num_parameters)} parameters"
    active = plan.num_active_parameters
    if active is None:
        return f"{total}, number per token unknown"
    return total if active == plan.num_parameters else f"{total}, {_format_count(active)} per token"


def _format_count(number: int) -> str:
    return f"{number / 1e9:,.1f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"


def _count(plan: StoragePlan) -> str:
    meshes = f"{plan.num_meshes:,} valid mesh{'' if plan.num_meshes == 1 else 'es'}"
    yours = "; yours first" if plan.requested is not None else ""
    holds = "holds" if plan.num_possible == 1 else "hold"
    return f"{meshes}, of which {plan.num_possible:,} {holds} what a rank stores{yours}"


def _table(meshes: list[StorageMesh]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in (*AXES, "weights", "gradients", "moments", "at least", "available"):
        table.add_column(name, justify="right", no_wrap=True)
    for mesh in meshes:
        memory = mesh.memory
        least = Text(format_bytes(memory.at_least), style="" if mesh.can_fit else "red")
        table.add_row(
            *(f"{getattr(mesh, axis):,}" for axis in AXES),
            format_bytes(memory.weights),
            "" if memory.gradients is None else format_bytes(memory.gradients),
            "" if memory.optimizer is None else format_bytes(memory.optimizer),
            least,
            format_bytes(memory.usable),
        )
    return table
