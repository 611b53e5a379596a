"""Memory plan: which meshes fit a training step, and what to change if none does.

torch is not imported for a model alone, or for a run with --model, if the family's memory can be
estimated. Of other families the parameters are counted on the meta device.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memguard.config import ParallelConfig, RunConfig
from memguard.errors import ConfigError, ModelError
from memguard.hf.adapter_files import find_config, is_adapter
from memguard.hf.checkpoint_files import check_config
from memguard.hf.config_fields import check_fields
from memguard.parallel.mesh_shape import AXES, MeshShape, list_meshes, resolve_mesh
from memguard.parallel.model_sizes import ESTIMATED_FAMILIES, ModelSizes
from memguard.planner.adapters import AdapterSizes, limit_sizes
from memguard.planner.cost import StepEstimate, estimate_step
from memguard.planner.disk import format_bytes
from memguard.planner.fit import (
    Fit,
    Work,
    count_parameters,
    find_adapter_fit,
    find_enough_gpus,
    find_fit,
    list_remedies,
    needs_mask,
    rank_meshes,
)
from memguard.planner.machine import THIS_MACHINE, Machine, load_machine
from memguard.planner.plan import Enough, MeshPlan, Plan, list_assumptions, make_mesh_plan
from memguard.planner.storage import ModelStorage, StoragePlan
from memguard.workflows.auto_settings import describe_work
from memguard.workflows.requests import OPTIONS, PlanRequest, read_mesh
from memguard.workflows.storage_plan import StorageInput, describe_stored, make_storage_plan

_NUM_LISTED = 20
_NUM_NEAR = 3
_ADAPTER_R = 16
_SCRATCH = "model.scratch"


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlanInput:
    """Model, machine, batch and mesh that a plan is computed for."""

    name: str
    model: ModelSizes | ModelStorage
    machine: Machine
    num_gpus: int
    work: Work
    mesh: ParallelConfig | None
    """None: the planner chooses."""
    is_run: bool
    """Whether the plan is for a run's settings instead of a model alone."""

    @property
    def may_adapt(self) -> bool:
        """Whether adapters could be trained instead of the weights."""
        is_trained_before = self.name != _SCRATCH
        return self.work.adapter is None and is_trained_before and not self.work.is_compiled

    @property
    def sizes(self) -> ModelSizes:
        """Sizes of a model whose memory can be estimated."""
        assert isinstance(self.model, ModelSizes), "other models have a storage plan"
        return self.model


def make_plan(request: PlanRequest, run: RunConfig | None) -> Plan | StoragePlan:
    """Return the meshes that fit a training step; of other families what is certain.

    Args:
        request: the checked arguments.
        run: the training run; None for a model alone.

    Raises:
        ConfigError: no such machine; or no mesh of this many GPUs, or not the requested one, is
            valid for model and batch.
        ModelError: no such configuration.
    """
    inputs = _read_inputs(request, run)
    if isinstance(inputs.model, ModelSizes):
        return _make(inputs)
    return make_storage_plan(
        StorageInput(
            name=inputs.name,
            model=inputs.model,
            machine=inputs.machine,
            num_gpus=inputs.num_gpus,
            work=inputs.work,
            stored=describe_stored(inputs.work, run),
            mesh=inputs.mesh,
        )
    )


def plan_run(config: RunConfig, *, sizes: ModelSizes, machine: Machine, num_gpus: int) -> Plan:
    """Return the plan of a run on the machine that it was started on.

    Args:
        config: the run's settings.
        sizes: sizes of its model.
        machine: the machine.
        num_gpus: number of ranks.

    Raises:
        ConfigError: no mesh of this many ranks, or not the run's, is valid for model and batch.
    """
    inputs = _PlanInput(
        name=config.model.path or _SCRATCH,
        model=sizes,
        machine=machine,
        num_gpus=num_gpus,
        work=describe_work(config, device_type="cuda" if machine.has_gpus else "cpu"),
        mesh=config.parallel,
        is_run=True,
    )
    return _make(inputs)


def _make(inputs: _PlanInput) -> Plan:
    sizes, machine, work = inputs.sizes, inputs.machine, inputs.work
    requested = None if inputs.mesh is None else _resolve(inputs, inputs.mesh)
    order = AXES if inputs.mesh is None else inputs.mesh.order
    limits = limit_sizes(sizes, work.adapter)
    meshes = list_meshes(inputs.num_gpus, limits, batch_size=work.batch_size, order=order)
    if not meshes:
        # Raises an error that names the violated rule and the numbers of ranks that are valid.
        _resolve(inputs, ParallelConfig())
    ranked, others = rank_meshes(sizes, meshes, work, machine)
    plans = [make_mesh_plan(choice.fit, choice.step) for choice in ranked[:_NUM_LISTED]]
    plans += [make_mesh_plan(fit, None) for fit in others[:_NUM_NEAR]]
    first: MeshPlan | None = None
    remedies: list[str] = []
    if requested is not None:
        fit = find_fit(sizes, requested, work, machine)
        first = make_mesh_plan(fit, _time(inputs, fit) if fit.fits else None)
        if not fit.fits:
            remedies = list_remedies(sizes, requested, work, machine)
            if not inputs.is_run:
                remedies = [_as_option(remedy) for remedy in remedies]
    enough = None
    # Processes of one CPU share its memory: more of them do not help.
    if not ranked and machine.has_gpus:
        # The answer names checkpointing and micro-batch too, so these are free.
        free = replace(work, checkpointing=None, micro_batch_size=None)
        choice = find_enough_gpus(sizes, free, machine)
        if choice is not None:
            mesh = make_mesh_plan(choice.fit, choice.step)
            enough = Enough(num_gpus=choice.fit.mesh.num_ranks, mesh=mesh)
    is_short = not ranked or (first is not None and not first.fits)
    choice = None
    if is_short and inputs.may_adapt:
        choice = find_adapter_fit(sizes, meshes, work, machine, r=_ADAPTER_R, first=requested)
    return Plan(
        model=inputs.name,
        num_parameters=count_parameters(sizes),
        machine=machine.name,
        gpu=machine.gpu,
        num_gpus=inputs.num_gpus,
        seq_len=work.seq_len,
        batch_size=work.batch_size,
        precision="bf16" if work.compute_bytes == 2 else "fp32",
        num_meshes=len(meshes),
        num_fitting=len(ranked),
        requested=first,
        meshes=tuple(plans),
        enough=enough,
        adapter_r=None if work.adapter is None else work.adapter.r,
        with_adapters=None if choice is None else make_mesh_plan(choice.fit, choice.step),
        remedies=tuple(remedies),
        assumptions=list_assumptions(machine, has_mask=needs_mask(sizes, work, machine)),
    )


def refuse_misfit(plan: Plan) -> None:
    """Raise ConfigError if the requested mesh, or every mesh, needs more memory than available."""
    if plan.requested is not None and not plan.requested.fits:
        where = f"the mesh {plan.requested.describe()}"
        raise ConfigError(
            f"{where} {_describe_lack(plan.requested, plan)}; {_describe_way_out(plan)}"
        )
    if plan.requested is None and plan.num_fitting == 0:
        nearest = plan.meshes[0]
        raise ConfigError(
            f"no mesh of {plan.num_gpus:,} × {plan.gpu} fits a step of {plan.model}: the nearest, "
            f"{nearest.describe()}, {_describe_lack(nearest, plan)}; {_describe_way_out(plan)}"
        )


def _describe_lack(mesh: MeshPlan, plan: Plan) -> str:
    return (
        f"needs {format_bytes(mesh.memory.needed)}; {format_bytes(mesh.memory.usable)} are "
        f"available for tensors on each {plan.gpu}"
    )


def _describe_way_out(plan: Plan) -> str:
    """Return alternatives that fit, the smallest change first."""
    ways = [f"set {remedy}" for remedy in plan.remedies]
    if plan.num_fitting:
        ways.append(f"use the mesh {_describe_choice(plan.meshes[0])}")
    elif plan.enough is not None:
        ways.append(
            f"use {plan.enough.num_gpus:,} GPUs as {_describe_choice(plan.enough.mesh)}, "
            f"{format_bytes(plan.enough.mesh.memory.needed)} each"
        )
    if plan.with_adapters is not None:
        ways.append(
            "train LoRA adapters instead of the weights, adapter.name=lora "
            f"adapter.r={_ADAPTER_R}, on the mesh {_describe_choice(plan.with_adapters)}"
        )
    return (
        " or ".join(ways) if ways else "use GPUs with more memory, more of them, or a smaller model"
    )


def _as_option(setting: str) -> str:
    """Return the command-line option, for a model alone, that matches a run's setting."""
    name, _, value = setting.partition("=")
    return f"{next(option for option, known in OPTIONS.items() if known == name)} {value}"


def _describe_choice(mesh: MeshPlan) -> str:
    return (
        f"{mesh.describe()} with activation_checkpointing {mesh.activation_checkpointing} and "
        f"micro_batch_size {mesh.micro_batch_size:,}"
    )


def _resolve(inputs: _PlanInput, mesh: ParallelConfig) -> MeshShape:
    sizes = limit_sizes(inputs.sizes, inputs.work.adapter)
    return resolve_mesh(mesh, inputs.num_gpus, sizes, batch_size=inputs.work.batch_size)


def _time(inputs: _PlanInput, fit: Fit) -> StepEstimate:
    return estimate_step(
        inputs.sizes, fit.mesh, fit.settings, inputs.machine, seq_len=inputs.work.seq_len
    )


# -- inputs of the plan --------------------------------------------------------------------------


def _read_inputs(request: PlanRequest, run: RunConfig | None) -> _PlanInput:
    """Return the inputs; arguments that are not given come from the run's settings, if any."""
    mesh = None if request.mesh is None else read_mesh(request.mesh, command="plan")
    checkpointing: Any = request.checkpointing
    work = Work(
        seq_len=request.seq_len or 2048,
        batch_size=request.batch,
        micro_batch_size=request.micro_batch,
        checkpointing=checkpointing,
        compute_bytes=4 if request.precision == "fp32" else 2,
        adapter=None if request.lora_r is None else AdapterSizes(r=request.lora_r),
    )
    if run is not None:
        if mesh is None:
            mesh = run.parallel
        else:
            degrees: dict[str, int] = {axis: getattr(mesh, axis) for axis in AXES}
            mesh = run.parallel.model_copy(update=degrees)
        run = run.model_copy(update={"parallel": mesh})
    model: ModelSizes | ModelStorage
    if request.model is not None:
        name = _name(request.model)
        model = _read_model_file(request.model)
    else:
        assert run is not None, "checked: there is a run or a model"
        name, model = run.model.path or _SCRATCH, read_run_model(run)
    degrees_given = [-1] if mesh is None else [getattr(mesh, axis) for axis in AXES]
    num_gpus = request.gpus
    if num_gpus is None and -1 not in degrees_given:
        num_gpus = math.prod(degrees_given)
    machine = load_machine(request.machine or THIS_MACHINE, num_processes=num_gpus or 1)
    if run is not None:
        work = describe_work(run, device_type="cuda" if machine.has_gpus else "cpu")
    return _PlanInput(
        name=name,
        model=model,
        machine=machine,
        num_gpus=num_gpus or machine.gpus_per_node,
        work=work,
        mesh=mesh,
        is_run=run is not None,
    )


def read_run_model(run: RunConfig) -> ModelSizes | ModelStorage:
    """Return the sizes of a run's model; if its memory cannot be estimated, its parameters.

    Raises:
        ModelError: no such configuration.
    """
    from memguard.workflows.setup import read_model_config  # imports torch

    config = read_model_config(run)
    # Eager attention stores the scores of all pairs of tokens, which the estimate leaves out.
    is_eager = run.model.attn_implementation == "eager"
    if not is_eager and config.get_text_config().model_type in ESTIMATED_FAMILIES:
        return ModelSizes.from_config(config)
    return _measure(config, run.model.path or _SCRATCH, is_eager=is_eager)


def _measure(config: Any, name: str, *, is_eager: bool = False) -> ModelStorage:
    from memguard.runtime import quiet_libraries

    quiet_libraries()
    from memguard.planner.meta_model import measure_storage  # imports torch

    family = config.get_text_config().model_type
    if is_eager and family in ESTIMATED_FAMILIES:
        unknown = "the planner has no formula for eager attention"
    else:
        unknown = (
            f"the planner has no formula for layers of '{family}', only for those of "
            f"{', '.join(ESTIMATED_FAMILIES)}"
        )
    return measure_storage(config, name=name, unknown=unknown)


def _read_model_file(path: Path) -> ModelSizes | ModelStorage:
    """Read the sizes from a config.json, or from the folder that contains it.

    Raises:
        ModelError: no such file, or no causal language model that transformers knows.
    """
    file = find_config(path) if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"'--model' must be a config.json or a folder with one; '{file}' cannot be read: "
            f"{error.strerror}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"'--model' must be a config.json; '{file}' is not JSON") from error
    if not isinstance(fields, dict):
        raise ModelError(f"'--model' must be a config.json; '{file}' is not a JSON object")
    if path.is_dir() and not is_adapter(path):
        check_config(path, name=str(path))
    check_fields(fields, place=f"'{file}'")
    if fields.get("model_type") in ESTIMATED_FAMILIES:
        return ModelSizes.from_json(fields)
    from memguard.hf.checkpoint import read_config_fields  # imports torch

    return _measure(read_config_fields(fields, place=f"'{file}'"), _name(path))


def _name(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    is_named = path.is_dir() or path.name == "config.json"
    return folder.resolve().name if is_named else path.stem.removesuffix("_config")
