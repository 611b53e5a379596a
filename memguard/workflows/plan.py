"""`memguard plan`: which meshes fit a training step, and what to change if none does.

torch is not imported for a model alone, or for a run with --model, if the family's memory can be
estimated. Of other families the parameters are counted on the meta device.
"""

import json
import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from memguard.config import Document, RunConfig
from memguard.errors import ConfigError, ModelError
from memguard.hf.adapter_files import find_config, is_adapter
from memguard.hf.checkpoint_files import check_config
from memguard.hf.config_fields import check_fields
from memguard.parallel.mesh_shape import AXES
from memguard.parallel.model_sizes import ESTIMATED_FAMILIES, ModelSizes
from memguard.planner.fit import SCRATCH, PlanInputs
from memguard.planner.machine import THIS_MACHINE, Machine, load_machine
from memguard.planner.plan import ModelStorage, Plan, make_plan
from memguard.planner.step_settings import describe_work
from memguard.workflows.common.checks import read_mesh
from memguard.workflows.training.memory import measure_model, read_run_model

MODEL_ALONE = Document(
    path="memguard plan",
    values={
        "name": "plan",
        "model": {"path": "model"},
        "data": {"train": ["documents"], "seq_len": 2048},
    },
    places={},
)
"""Settings of a run that stands for a model alone in `memguard plan`; users may change them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """The arguments of `memguard plan`."""

    run: RunConfig
    """Settings of the run; for a model alone `MODEL_ALONE` with those that were given."""
    is_run: bool
    """Whether the plan is for a run instead of a model alone."""
    model: Path | None
    gpus: int | None
    machine: str | None
    mesh: str | None
    """Degrees of axes as given, `z=2,x=2`."""
    arguments: tuple[str, ...] | None = None
    """The run's CONFIG and settings as given on the command line; None: not from there."""

    def check(self) -> None:
        """Reject arguments that cannot be used together."""
        if self.is_run:
            return
        given = self.run.train.model_fields_set
        if self.model is None:
            raise ConfigError(
                "give the CONFIG of a run before its settings, or --model CONFIG_JSON for a model "
                "alone"
            )
        if "micro_batch_size" in given and "batch_size" not in given:
            raise ConfigError(
                "'train.micro_batch_size' needs 'train.batch_size', whose rows it divides"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan and what it was made from."""

    plan: Plan
    machine: Machine
    """With as many nodes as the plan's GPUs need."""


def plan(request: PlanRequest) -> Planned:
    """Plan the meshes that fit a training step; of other families what a step needs at least."""
    run = request.run
    mesh = run.parallel
    # The planner chooses the mesh of a model alone.
    has_mesh = request.is_run or not run.parallel.model_fields_set.isdisjoint(AXES)
    if request.mesh is not None:
        given, has_mesh = read_mesh(request.mesh, command="plan"), True
        mesh = mesh.model_copy(update={axis: getattr(given, axis) for axis in AXES})
        run = run.model_copy(update={"parallel": mesh})
    model: ModelSizes | ModelStorage
    if request.model is not None:
        name, model = _name(request.model), _read_model_file(request.model)
    else:
        name, model = run.model.path or SCRATCH, read_run_model(run)
    degrees = [getattr(mesh, axis) for axis in AXES] if has_mesh else [-1]
    num_gpus = request.gpus
    if num_gpus is None and -1 not in degrees:
        num_gpus = math.prod(degrees)
    machine = load_machine(request.machine or THIS_MACHINE, num_processes=num_gpus or 1)
    # A model alone is planned as on GPUs.
    is_for_gpus = machine.has_gpus or not request.is_run
    work = describe_work(run, device_type="cuda" if is_for_gpus else "cpu")
    if not request.is_run and "batch_size" not in run.train.model_fields_set:
        work = replace(work, batch_size=None)
    inputs = PlanInputs(
        name=name,
        machine=machine,
        num_gpus=num_gpus or machine.gpus_per_node,
        work=work,
        mesh=mesh if has_mesh else None,
    )
    made = make_plan(model, inputs)
    made = made.model_copy(update={"command": _make_train_command(request, made, machine)})
    return Planned(plan=made, machine=machine)


def _make_train_command(request: PlanRequest, plan: Plan, machine: Machine) -> str | None:
    """Return the command that trains the run; of several nodes that of each."""
    mesh = _choose_degrees(plan)
    if request.arguments is None or mesh is None:
        return None
    words = list(request.arguments)
    is_run_mesh = plan.least is not None or (plan.requested is not None and plan.requested.fits)
    if request.mesh is not None or not is_run_mesh:
        words += [f"parallel.{axis}={degree}" for axis, degree in mesh.items()]
    num_nodes = -(-plan.num_gpus // machine.gpus_per_node)
    if num_nodes > 1:
        start = f"torchrun --nnodes={num_nodes} --nproc-per-node={machine.gpus_per_node}"
        start += " --rdzv-backend=c10d --rdzv-endpoint=FIRST_NODE:29500 -m memguard train"
        return f"{start} {shlex.join(words)}"
    if plan.num_gpus > 1 or machine.has_gpus:
        words += ["--nproc", str(plan.num_gpus)]
    return f"memguard train {shlex.join(words)}"


def _choose_degrees(plan: Plan) -> dict[str, int] | None:
    """Return the degrees of the requested mesh, or else of the first; None if neither fits."""
    if plan.least is not None:
        return plan.least.mesh if plan.least.at_least <= plan.least.usable else None
    for mesh in (plan.requested, *plan.meshes):
        if mesh is not None and mesh.fits:
            return {axis: getattr(mesh, axis) for axis in AXES}
    return None


def _read_model_file(path: Path) -> ModelSizes | ModelStorage:
    """Read the sizes from a config.json, or from the folder that contains it."""
    file = find_config(path) if path.is_dir() else path
    try:
        fields = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(
            f"'--model' must be a config.json or a folder with one; '{file}' cannot be read: "
            f"{error.strerror}"
        ) from error
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ModelError(f"'--model' must be a config.json; '{file}' is not a JSON object")
    if path.is_dir() and not is_adapter(path):
        check_config(path, name=str(path))
    check_fields(fields, place=f"'{file}'")
    if fields.get("model_type") in ESTIMATED_FAMILIES:
        return ModelSizes.from_json(fields)
    from memguard.hf.checkpoint import read_config_fields  # imports torch

    return measure_model(read_config_fields(fields, place=f"'{file}'"), _name(path))


def _name(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    is_named = path.is_dir() or path.name == "config.json"
    return folder.resolve().name if is_named else path.stem.removesuffix("_config")
