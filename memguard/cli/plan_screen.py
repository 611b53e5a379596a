"""Prints the result of `memguard plan`: the meshes, and the memory of the first by kind.

Of a model whose memory and time cannot be estimated: what a rank stores at least.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import rich.console
from rich.table import Table
from rich.text import Text

from memguard.cli.options import Sentence, print_indented
from memguard.config import RunConfig
from memguard.pages import formatting as fmt
from memguard.parallel.mesh_shape import AXES
from memguard.planner.dry_run import format_bytes
from memguard.planner.machine import Machine
from memguard.planner.plan import LeastMemory, MeshPlan, Plan, describe_choice
from memguard.runtime import format_duration
from memguard.workflows.plan import Planned, PlanRequest
from memguard.workflows.plan import plan as make_plan
from memguard.workflows.training.checks import CheckedRun

_NUM_SHOWN = 8


def render_plan(plan: Plan, out: rich.console.Console, machine: Machine) -> None:
    """Print a plan for a machine; speeds that are only assumed order the meshes unseen."""
    text = Text(plan.model, style="bold")
    number = plan.num_parameters
    count = f"{number / 1e9:,.1f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"
    text.append(f"  {count} parameters on {plan.num_gpus:,} × {plan.gpu}", style="not bold")
    out.print(text, highlight=False)
    out.print(_step(plan), style="dim", highlight=False)
    if plan.least is not None:
        _print_least(plan.least, plan.num_meshes, out)
        return
    shown = _list_shown(plan.meshes, plan.requested)
    out.print()
    if plan.num_meshes > 1:
        out.print(_count(plan), highlight=False)
    print_indented(out, _table(shown, has_speeds="peak_tflops" not in machine.assumed))
    if plan.with_change is not None:
        out.print(f"\n{plan.change} would suffice, as {describe_choice(plan.with_change)}")
    first = plan.requested or (plan.enough.mesh if plan.enough else plan.meshes[0])
    out.print()
    out.print(_title(first, plan), highlight=False)
    out.print(f"peak of a rank, during {first.memory.moment}", style="dim", highlight=False)
    print_indented(out, _kinds(first, plan, "GPU" if machine.has_gpus else "process"))
    out.print()
    out.print(Sentence("Estimates. " + "; ".join(plan.assumptions) + ".", "dim"))


def _print_least(least: LeastMemory, num_meshes: int, out: rich.console.Console) -> None:
    """Print what is known of a model whose step is not predicted."""
    text = (
        f"Not predicted: memory and tokens/s of a step, and which of {num_meshes:,} valid "
        f"mesh{'' if num_meshes == 1 else 'es'} it fits, because {least.not_predicted}."
    )
    known = least.describe()
    out.print()
    out.print(Sentence(text, "yellow"))
    out.print(Sentence(f"{known[:1].upper()}{known[1:]}.", "yellow"))


def _list_shown(meshes: Sequence[MeshPlan], requested: MeshPlan | None) -> list[MeshPlan]:
    """Return the requested mesh, then the first of the others."""
    shown = list(meshes[:_NUM_SHOWN])
    if requested is None:
        return shown
    return [requested, *(mesh for mesh in shown if mesh.describe() != requested.describe())]


def _step(plan: Plan) -> str:
    rows = (
        "one row on each rank that splits the batch"
        if plan.batch_size is None
        else f"{plan.batch_size:,} row{'' if plan.batch_size == 1 else 's'}"
    )
    trained = "" if plan.adapter_r is None else f", LoRA adapters of rank {plan.adapter_r:,}"
    return f"a step of {rows}, {plan.seq_len:,} tokens per row, {plan.precision}{trained}"


def _count(plan: Plan) -> str:
    """Return the number of meshes that fit and the order in which they are shown."""
    order = "the fastest" if plan.num_fitting else "the closest to fitting"
    first = f"; yours, then {order}" if plan.requested is not None else f"; {order} first"
    number = f"{plan.num_fitting:,}" if plan.num_fitting else "none"
    verb = "fits" if (plan.num_fitting or 0) < 2 else "fit"
    return f"{number} of {plan.num_meshes:,} meshes {verb}{first}"


def _title(mesh: MeshPlan, plan: Plan) -> str:
    """Return the title of the memory table."""
    if plan.enough is not None and mesh is plan.enough.mesh:
        return f"{plan.enough.describe()} would suffice, as {mesh.describe()}"
    return f"memory of {mesh.describe()}"


def _table(meshes: list[MeshPlan], *, has_speeds: bool) -> Table:
    names = ["recompute", "micro-batch", "needs", "left"]
    if has_speeds and any(mesh.speed is not None for mesh in meshes):
        names.append("tokens/s")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in (*AXES, *names):
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
        table.add_row(*cells[: len(table.columns)])
    return table


def _kinds(mesh: MeshPlan, plan: Plan, owner: str) -> Table:
    adapters = "" if plan.adapter_r is None else "; adapters, fp32"
    is_one = mesh.num_micro_batches == 1 and plan.weights == "bf16" and not adapters
    kinds = {
        "weights": f"weights, {plan.weights}{adapters}",
        "optimizer": f"AdamW's moments, {'8-bit' if plan.optimizer == 'adamw_8bit' else 'fp32'}",
        "gradients": f"gradients, {'bf16, one micro-batch a step' if is_one else 'fp32'}",
        "activations": "activations",
        "nll_chunk": "logits and the head's gradient",
        "buffers": "gathered weights, gradients in transfer",
        "allowance": "allowance for fragmentation",
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    for kind, name in kinds.items():
        num_bytes = getattr(mesh.memory, kind)
        if num_bytes:
            table.add_row(name, format_bytes(num_bytes))
    usable = format_bytes(mesh.memory.usable)
    table.add_row(Text("needed", style="bold"), format_bytes(mesh.memory.needed))
    table.add_row(f"available per {owner}", usable)
    table.add_row("copy for checkpoints, in the machine's memory", format_bytes(mesh.memory.host))
    return table


# -- the command ---------------------------------------------------------------------------------


def print_plan(request: PlanRequest, *, run: CheckedRun | None, as_json: bool) -> None:
    """Compute and print a plan, then raise an error if nothing fits."""
    out = rich.console.Console(file=sys.stdout, highlight=False)
    planned = make_plan(request)
    printed: dict[str, Any] = {}
    training_s = None
    if not as_json:
        render_plan(planned.plan, out, planned.machine)
    if run is not None:
        # Imported here, because the plan of a model alone does not need torch.
        from memguard.cli.dry_run_screen import render_dry_run
        from memguard.runtime import Console
        from memguard.workflows.training.dry_run import dry_run

        result = dry_run(run, Console())
        printed["dry_run"] = result.record.model_dump(mode="json")
        training_s = estimate_training(planned, result.record.length.num_steps)
        printed["training_s"] = training_s
        if not as_json:
            out.print()
            render_dry_run(result, out)
    if as_json:
        printed = planned.plan.model_dump(mode="json") | printed
        sys.stdout.write(json.dumps(printed, indent=2) + "\n")
    elif request.is_run and request.run.audit.enabled:
        out.print()
        out.print(describe_audit(request.run), highlight=False)
    sys.stdout.flush()  # The table must appear before the error.
    planned.plan.refuse_misfit()
    if not as_json:
        _print_fit(planned, training_s, out)


def describe_audit(run: RunConfig) -> str:
    """Return a line: the models that a run's audit measures, and how long they may generate."""
    settings = run.audit
    has_base = settings.base and run.model.path is not None
    num_models = 1 + has_base + (settings.reference is not None)
    models = "the model" if num_models == 1 else f"{num_models} models"
    tasks = ", ".join(task.task for task in settings.utility)
    also = f", with the tasks {fmt.clean_text(tasks)}" if tasks else ""
    most = settings.max_generation_minutes
    limit = "without a limit" if most is None else f"for at most {most:g} minutes"
    return (
        f"the audit scores each document with {models} and generates text where it may be "
        f"extracted{also}; where weights are gathered for each token it generates {limit}"
    )


def estimate_training(planned: Planned, num_steps: int) -> float | None:
    """Return the planned time of all steps of a run, on the mesh that its command names (seconds).

    None if the mesh does not fit, or if the speed of the machine or of the family is not known.
    """
    plan = planned.plan
    if plan.least is not None or "peak_tflops" in planned.machine.assumed:
        return None
    speed = (plan.requested or plan.meshes[0]).speed
    return None if speed is None else num_steps * speed.step_s


def _print_fit(planned: Planned, training_s: float | None, out: rich.console.Console) -> None:
    """Print that a plan fits, in how much memory and time, and the command that trains."""
    plan, machine = planned.plan, planned.machine
    if plan.least is not None:
        text = "It may fit: memory and time are not predicted"
    else:
        mesh = plan.requested or plan.meshes[0]
        needed, usable = format_bytes(mesh.memory.needed), format_bytes(mesh.memory.usable)
        if needed.split()[1] == usable.split()[1]:
            needed = needed.split()[0]
        text = f"It fits: {needed} of {usable} per {'GPU' if machine.has_gpus else 'process'}"
        text += f" as {mesh.describe()}" if plan.num_meshes > 1 else ""
        if training_s is not None:
            text += f", about {format_duration(training_s)} without loading, saving and the audit"
        elif plan.command and "peak_tflops" in machine.assumed:
            whose = f"'{machine.gpu}'" if machine.has_gpus else "a CPU"
            text += f"; the time is not predicted, because the speed of {whose} is not known"
    out.print()
    out.print(Sentence(text, "bold" if plan.least is None else "yellow"))
    if plan.command is not None:
        num_nodes = -(-plan.num_gpus // machine.gpus_per_node)
        where = "" if num_nodes == 1 else f", on each of {num_nodes:,} nodes"
        out.print(f"to train{where}:", highlight=False)
        # In one piece, so that it can be copied.
        out.print(f"  {plan.command}", highlight=False, markup=False, soft_wrap=True)
