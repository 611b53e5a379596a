"""A plan on the screen: the meshes that fit, and where the memory of the first goes."""

import rich.console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memguard.parallel.mesh_shape import AXES
from memguard.planner.disk import format_bytes
from memguard.planner.plan import MeshPlan, Plan

_NUM_SHOWN = 8
_KINDS = {
    "weights": "weights, fp32",
    "optimizer": "AdamW's moments, fp32",
    "gradients": "gradients, fp32",
    "activations": "activations",
    "nll_chunk": "logits and the head's gradient",
    "buffers": "gathered weights, gradients under way",
    "allowance": "allowance for fragments",
}


def render_plan(plan: Plan, out: rich.console.Console) -> None:
    """Print a plan."""
    out.print(_headline(plan), highlight=False)
    out.print(_step(plan), style="dim", highlight=False)
    shown = list(plan.meshes[:_NUM_SHOWN])
    if plan.asked is not None:
        shown = [plan.asked, *(m for m in shown if m.describe() != plan.asked.describe())]
    out.print()
    out.print(_count(plan), highlight=False)
    out.print(Padding(_table(shown, plan), (0, 0, 0, 2), expand=False), highlight=False)
    first = plan.asked or (plan.enough.mesh if plan.enough else plan.meshes[0])
    out.print()
    out.print(_title(first, plan), highlight=False)
    out.print(f"of a rank at its peak, during {first.memory.moment}", style="dim", highlight=False)
    out.print(Padding(_kinds(first), (0, 0, 0, 2), expand=False), highlight=False)
    out.print()
    out.print("Estimates. " + "; ".join(plan.assumptions) + ".", style="dim", highlight=False)


def _headline(plan: Plan) -> Text:
    parameters = f"{plan.num_parameters / 1e9:,.1f} B"
    if plan.num_parameters < 1e9:
        parameters = f"{plan.num_parameters / 1e6:,.1f} M"
    text = Text(plan.model, style="bold")
    text.append(f"  {parameters} parameters on {plan.num_gpus:,} × {plan.gpu}", style="not bold")
    return text


def _step(plan: Plan) -> str:
    rows = (
        "one row on each rank that splits the batch"
        if plan.batch_size is None
        else f"{plan.batch_size:,} row{'' if plan.batch_size == 1 else 's'}"
    )
    return f"a step of {rows}, {plan.seq_len:,} tokens a row, {plan.precision}"


def _count(plan: Plan) -> str:
    """Say how many meshes fit, and in which order they are shown."""
    if plan.num_meshes == 1:
        return "the only mesh fits" if plan.num_fitting else "the only mesh does not fit"
    order = "the fastest" if plan.num_fitting else "the nearest to fitting"
    first = f"; yours, then {order}" if plan.asked is not None else f"; {order} first"
    number = f"{plan.num_fitting:,}" if plan.num_fitting else "none"
    verb = "fits" if plan.num_fitting < 2 else "fit"
    return f"{number} of {plan.num_meshes:,} meshes {verb}{first}"


def _title(mesh: MeshPlan, plan: Plan) -> str:
    """Name the mesh whose memory is shown kind by kind."""
    if plan.enough is not None and mesh is plan.enough.mesh:
        return f"{plan.enough.num_gpus:,} GPUs would do, as {mesh.describe()}"
    return f"memory of {mesh.describe()}"


def _table(meshes: list[MeshPlan], plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    names = [*AXES, "recompute", "micro-batch", "needs", "left"]
    if any(mesh.speed is not None for mesh in meshes):
        names.append("tokens/s")
    for name in names:
        table.add_column(name, justify="left" if name == "recompute" else "right", no_wrap=True)
    for mesh in meshes:
        left = mesh.headroom_bytes
        cells: list[str | Text] = [
            *(f"{getattr(mesh, axis):,}" for axis in AXES),
            mesh.activation_checkpointing,
            f"{mesh.micro_batch_size:,}",
            format_bytes(mesh.memory.needed),
            Text(
                format_bytes(left) if left >= 0 else f"-{format_bytes(-left)}",
                style="green" if left >= 0 else "red",
            ),
            "" if mesh.speed is None else f"{mesh.speed.tokens_per_s:,.0f}",
        ]
        table.add_row(*cells[: len(names)])
    return table


def _kinds(mesh: MeshPlan) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    for kind, name in _KINDS.items():
        num_bytes = getattr(mesh.memory, kind)
        if num_bytes:
            table.add_row(name, format_bytes(num_bytes))
    usable = format_bytes(mesh.memory.usable)
    table.add_row(Text("needed", style="bold"), format_bytes(mesh.memory.needed))
    table.add_row("a rank has", usable)
    return table
