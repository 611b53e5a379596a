"""One plan: which meshes hold a step, and what would make one fit.

No torch for a model alone, nor for a run with --model.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard.config import ParallelConfig, RunConfig
from memguard.errors import ConfigError, ModelError
from memguard.hf.checkpoint_files import check_config
from memguard.hf.config_fields import check_fields
from memguard.parallel.mesh_shape import (
    AXES,
    COMPARED_FAMILIES,
    MeshShape,
    ModelSizes,
    list_meshes,
    resolve_mesh,
)
from memguard.planner.cost import StepEstimate, estimate_step
from memguard.planner.disk import format_bytes
from memguard.planner.fit import (
    Fit,
    Work,
    count_parameters,
    find_enough_gpus,
    find_fit,
    list_remedies,
    rank_meshes,
)
from memguard.planner.machine import THIS_MACHINE, Machine, load_machine
from memguard.planner.plan import Enough, MeshPlan, Plan, list_assumptions, make_mesh_plan
from memguard.workflows.requests import OPTIONS, PlanRequest, read_mesh

_NUM_LISTED = 20
_NUM_NEAR = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """What a plan is made for."""

    name: str
    sizes: ModelSizes
    machine: Machine
    num_gpus: int
    work: Work
    mesh: ParallelConfig | None
    """None leaves it to the planner."""
    is_run: bool
    """Whether the plan is for a run's settings, not for a model alone."""


class MemoryUnknown(ModelError):
    """The planner does not know what the run's model takes; a dry run is possible all the same."""


def make_plan(request: PlanRequest, run: RunConfig | None) -> Plan:
    """Say which meshes hold a training step.

    Args:
        request: the arguments; checked.
        run: the training run; None for a model alone.

    Raises:
        ConfigError: no such machine; no mesh of so many GPUs, or not the one in the request, goes
            with model and batch.
        MemoryUnknown: the run's model is of a family whose memory is not known.
        ModelError: no such configuration.
    """
    question = _ask(request, run)
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
        requested=first,
        meshes=tuple(plans),
        enough=enough,
        remedies=tuple(remedies),
        assumptions=list_assumptions(machine),
    )


def refuse_misfit(plan: Plan) -> None:
    """Raise ConfigError where the mesh asked for, or every mesh, needs more than there is."""
    if plan.requested is not None and not plan.requested.fits:
        where = f"the mesh {plan.requested.describe()}"
        raise ConfigError(
            f"{where} {_describe_lack(plan.requested, plan)}; {_describe_way_out(plan)}"
        )
    if plan.requested is None and plan.num_fitting == 0:
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


def _resolve(question: _Question, mesh: ParallelConfig) -> MeshShape:
    return resolve_mesh(
        mesh, question.num_gpus, question.sizes, batch_size=question.work.batch_size
    )


def _time(question: _Question, fit: Fit) -> StepEstimate:
    return estimate_step(
        question.sizes, fit.mesh, fit.settings, question.machine, seq_len=question.work.seq_len
    )


# -- what the plan is made for -------------------------------------------------------------------


def _ask(request: PlanRequest, run: RunConfig | None) -> _Question:
    """Fill in what the arguments leave open, from the run's settings where there is a run."""
    mesh = None if request.mesh is None else read_mesh(request.mesh, command="plan")
    checkpointing: Any = request.checkpointing
    work = Work(
        seq_len=request.seq_len or 2048,
        batch_size=request.batch,
        micro_batch_size=request.micro_batch,
        checkpointing=checkpointing,
        compute_bytes=4 if request.precision == "fp32" else 2,
    )
    if run is not None:
        if mesh is None:
            mesh = run.parallel
        else:
            degrees: dict[str, int] = {axis: getattr(mesh, axis) for axis in AXES}
            mesh = run.parallel.model_copy(update=degrees)
        work = Work(
            seq_len=run.data.seq_len,
            batch_size=run.train.batch_size,
            micro_batch_size=run.train.micro_batch_size or run.train.batch_size,
            checkpointing=run.train.activation_checkpointing,
            compute_bytes=2 if run.train.precision == "bf16" else 4,
            chunk_tokens=run.train.nll_chunk_tokens,
            reshard_after_forward=mesh.reshard_after_forward,
        )
    if request.model is not None:
        name, sizes = _name(request.model), _read_model_file(request.model)
    else:
        assert run is not None, "checked: there is a run or a model"
        name, sizes = run.model.path or "model.scratch", _read_run_model(run)
    degrees_given = [-1] if mesh is None else [getattr(mesh, axis) for axis in AXES]
    num_gpus = request.gpus
    if num_gpus is None and -1 not in degrees_given:
        num_gpus = math.prod(degrees_given)
    machine = load_machine(request.machine or THIS_MACHINE, num_processes=num_gpus or 1)
    return _Question(
        name=name,
        sizes=sizes,
        machine=machine,
        num_gpus=num_gpus or machine.gpus_per_node,
        work=work,
        mesh=mesh,
        is_run=run is not None,
    )


def _read_run_model(run: RunConfig) -> ModelSizes:
    # Eager attention keeps scores of all pairs of tokens.
    if run.model.attn_implementation != "eager":
        from memguard.workflows.setup import read_model_config  # imports torch

        config = read_model_config(run)
        if config.get_text_config().model_type in COMPARED_FAMILIES:
            return ModelSizes.from_config(config)
    raise MemoryUnknown(
        f"memory is known for {', '.join(COMPARED_FAMILIES)} only, without eager attention"
    )


def _read_model_file(path: Path) -> ModelSizes:
    """Read the sizes from a config.json, or from the folder that it is in.

    Raises:
        ModelError: no such file, or a family whose memory is not known.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"'--model' must be a config.json or a folder that has one; '{file}' cannot be read: "
            f"{error.strerror}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"'--model' must be a config.json; '{file}' is not JSON") from error
    if not isinstance(fields, dict):
        raise ModelError(f"'--model' must be a config.json; '{file}' holds no settings")
    if path.is_dir():
        check_config(path, name=str(path))
    check_fields(fields, place=f"'{file}'")
    return ModelSizes.from_json(fields)


def _name(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    is_named = path.is_dir() or path.name == "config.json"
    return folder.resolve().name if is_named else path.stem.removesuffix("_config")
