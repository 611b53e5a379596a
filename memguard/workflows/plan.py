"""One plan: which meshes hold a step, and what would make one fit. No torch."""

from memguard.config import ParallelConfig
from memguard.errors import ConfigError
from memguard.parallel.mesh_shape import AXES, MeshShape, list_meshes, resolve_mesh
from memguard.planner.cost import StepEstimate, estimate_step
from memguard.planner.disk import format_bytes
from memguard.planner.fit import (
    Fit,
    count_parameters,
    find_enough_gpus,
    find_fit,
    list_remedies,
    rank_meshes,
)
from memguard.planner.machine import THIS_MACHINE
from memguard.planner.plan import Enough, MeshPlan, Plan, list_assumptions, make_mesh_plan
from memguard.workflows.requests import OPTIONS, Question

_NUM_LISTED = 20
_NUM_NEAR = 3


def make_plan(question: Question) -> Plan:
    """Answer a question.

    Raises:
        ConfigError: no mesh of so many GPUs, or not the one asked for, goes with model and batch.
    """
    sizes, machine, work = question.sizes, question.machine, question.work
    asked = None if question.mesh is None else _resolve(question, question.mesh)
    order = AXES if question.mesh is None else question.mesh.order
    meshes = list_meshes(question.num_gpus, sizes, batch_size=work.batch_size, order=order)
    if not meshes:
        # Says which rule forbids them, and which numbers of ranks have one.
        _resolve(question, ParallelConfig())
    ranked, others = rank_meshes(sizes, meshes, work, machine)
    plans = [make_mesh_plan(each.fit, each.step) for each in ranked[:_NUM_LISTED]]
    plans += [make_mesh_plan(fit, None) for fit in others[:_NUM_NEAR]]
    first: MeshPlan | None = None
    remedies: list[str] = []
    if asked is not None:
        fit = find_fit(sizes, asked, work, machine)
        first = make_mesh_plan(fit, _time(question, fit) if fit.fits else None)
        if not fit.fits:
            remedies = list_remedies(sizes, asked, work, machine)
            if not question.is_run:
                remedies = [_as_option(each) for each in remedies]
    enough = None
    if not ranked and machine.name != THIS_MACHINE:
        found = find_enough_gpus(sizes, work, machine)
        if found is not None:
            mesh = make_mesh_plan(found.fit, found.step)
            enough = Enough(num_gpus=found.fit.mesh.num_ranks, mesh=mesh)
    return Plan(
        model=question.name,
        num_parameters=count_parameters(sizes),
        machine=machine.name,
        gpu=machine.gpu,
        num_gpus=question.num_gpus,
        seq_len=work.seq_len,
        batch_size=work.batch_size,
        precision="bf16" if work.compute_bytes == 2 else "fp32",
        num_meshes=len(meshes),
        num_fitting=len(ranked),
        asked=first,
        meshes=tuple(plans),
        enough=enough,
        remedies=tuple(remedies),
        assumptions=list_assumptions(machine),
    )


def refuse_misfit(plan: Plan) -> None:
    """Raise ConfigError where the mesh asked for, or every mesh, needs more than there is."""
    if plan.asked is not None and not plan.asked.fits:
        where = f"the mesh {plan.asked.describe()}"
        raise ConfigError(f"{where} {_describe_lack(plan.asked, plan)}; {_describe_way_out(plan)}")
    if plan.asked is None and plan.num_fitting == 0:
        nearest = plan.meshes[0]
        raise ConfigError(
            f"no mesh of {plan.num_gpus:,} × {plan.gpu} holds a step of {plan.model}: the nearest, "
            f"{nearest.describe()}, {_describe_lack(nearest, plan)}; {_describe_way_out(plan)}"
        )


def _describe_lack(mesh: MeshPlan, plan: Plan) -> str:
    return (
        f"needs {format_bytes(mesh.memory.needed)} of the {format_bytes(mesh.memory.usable)} that "
        f"each {plan.gpu} has for tensors"
    )


def _describe_way_out(plan: Plan) -> str:
    """Return what works instead, the nearest first."""
    ways = [f"set {each}" for each in plan.remedies]
    if plan.num_fitting:
        ways.append(f"take the mesh {_describe_choice(plan.meshes[0])}")
    elif plan.enough is not None:
        ways.append(
            f"take {plan.enough.num_gpus:,} GPUs as {_describe_choice(plan.enough.mesh)}, "
            f"{format_bytes(plan.enough.mesh.memory.needed)} each"
        )
    return " or ".join(ways) if ways else "take more GPUs, larger ones or a smaller model"


def _as_option(setting: str) -> str:
    """Write a run's setting as a model alone is asked about."""
    name, _, value = setting.partition("=")
    return f"{next(option for option, known in OPTIONS.items() if known == name)} {value}"


def _describe_choice(mesh: MeshPlan) -> str:
    return f"{mesh.describe()} with activation_checkpointing {mesh.activation_checkpointing}"


def _resolve(question: Question, mesh: ParallelConfig) -> MeshShape:
    return resolve_mesh(
        mesh, question.num_gpus, question.sizes, batch_size=question.work.batch_size
    )


def _time(question: Question, fit: Fit) -> StepEstimate:
    return estimate_step(
        question.sizes, fit.mesh, fit.settings, question.machine, seq_len=question.work.seq_len
    )
