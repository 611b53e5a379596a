"""`memguard plan`: the meshes on which a step fits, and settings that would make one fit. No torch.

The records are those of `memguard plan --json`. Of families whose memory and time have no formula a
plan has only what a rank stores at least:

    elements of a rank = sum over parameters of numel / (y if split over y) / (x if over x) / z
    bytes              = those of a weight, of its gradient unless backward frees it, and of its
                         state (`config.optimizers`); of a frozen weight only those of its dtype

This is the mean over ranks, so that the fullest rank stores at least as much. A run is refused only
if that alone exceeds the memory of a GPU; activations and buffers, which come on top, are unknown.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

from memguard.errors import ConfigError
from memguard.parallel.mesh_shape import AXES, MeshShape
from memguard.parallel.model_sizes import ModelSizes, Sizes
from memguard.planner.assumptions import list_assumptions
from memguard.planner.dry_run import format_bytes
from memguard.planner.fit import (
    BETTER_MACHINE,
    Fit,
    PlanInputs,
    count_parameters,
    describe_faster,
    find_changed_fit,
    find_enough_gpus,
    find_fit,
    list_remedies,
    needs_mask,
    rank_meshes,
)
from memguard.planner.step_settings import AdapterSizes, Checkpointing, Work, limit_sizes
from memguard.records.record import Record

_NUM_LISTED = 20
"""Meshes in the record of a plan."""
_NUM_NEAR = 3
_ADAPTER_R = 16
_NF4_BYTES = 0.5
"""Of a weight, without the scales."""


# -- records ---------------------------------------------------------------------------------------


class MemoryPlan(Record):
    """Memory of the rank that needs most, at its peak (bytes)."""

    moment: str
    """Phase of the step with the peak."""
    weights: int
    optimizer: int
    gradients: int
    activations: int
    nll_chunk: int
    buffers: int
    allowance: int
    """Memory that the allocator may lose to fragmentation; an assumption."""
    needed: int
    """Sum of all kinds."""
    usable: int
    """Memory of a GPU that is available for tensors."""
    host: int
    """The machine's memory for the copy of the state that is saved while training goes on."""


class SpeedPlan(Record):
    """Estimated times (`accuracy`)."""

    step_s: float
    compute_s: float
    """Computation, with what communication at the same time takes from it."""
    exposed_communication_s: float
    hidden_communication_s: float
    tokens_per_s: float
    """Tokens of all ranks per second."""


class LeastMemory(Record):
    """Memory that a rank needs at least, of a model whose step is not predicted (bytes)."""

    family: str
    not_predicted: str
    """Why memory and speed of a step, and the meshes on which it fits, are not predicted."""
    mesh: dict[str, int]
    """Degrees of the requested mesh, or of the one that stores least."""
    other_mesh: dict[str, int] | None
    """A mesh that may hold it where the requested one cannot."""
    stored: str
    """What is counted."""
    at_least: int
    """Of the rank that stores most; activations and buffers come on top."""
    usable: int
    """Memory of a GPU that is available for tensors."""

    def describe(self) -> str:
        """Return a sentence of what is known."""
        return (
            f"a rank stores at least {format_bytes(self.at_least)} of {self.stored} on "
            f"{_write_mesh(self.mesh)}, {format_bytes(self.usable)} are available, and a step "
            "needs more"
        )

    def find_misfit(self, gpu: str) -> str | None:
        """Return why this alone exceeds the memory of a GPU of this name; None if it does not."""
        if self.at_least <= self.usable:
            return None
        ways = [] if self.other_mesh is None else [f"use the mesh {_write_mesh(self.other_mesh)}"]
        if "moments" in self.stored:
            ways.append("train LoRA adapters instead of the weights, adapter.name=lora")
        return (
            f"the mesh {_write_mesh(self.mesh)} needs at least {format_bytes(self.at_least)} for "
            f"{self.stored}; "
            f"{format_bytes(self.usable)} are available for tensors on each {gpu}; "
            f"{' or '.join(ways) or BETTER_MACHINE}"
        )


class MeshPlan(Record):
    """One mesh and its settings."""

    data: int
    z: int
    y: int
    x: int
    fits: bool
    activation_checkpointing: Checkpointing
    micro_batch_size: int
    """Rows of a forward pass on one rank."""
    num_micro_batches: int
    memory: MemoryPlan
    speed: SpeedPlan | None
    """null if it does not fit."""

    def describe(self) -> str:
        """Write the mesh as users see it: ``(data=1, z=16, y=2, x=8)``."""
        return _write_mesh({axis: getattr(self, axis) for axis in AXES})

    @property
    def headroom_bytes(self) -> int:
        """Memory left; negative if memory is missing."""
        return self.memory.usable - self.memory.needed


class Enough(Record):
    """The smallest number of GPUs that suffices: part of a node, or whole nodes."""

    num_gpus: int
    mesh: MeshPlan

    def describe(self) -> str:
        """Write the number: ``2 GPUs``."""
        return f"{self.num_gpus:,} GPU{'' if self.num_gpus == 1 else 's'}"


class Plan(Record):
    """The meshes on which a step of a model fits on a machine."""

    kind: Literal["plan"] = "plan"
    version: Literal[1] = 1
    model: str
    num_parameters: int
    machine: str
    gpu: str
    num_gpus: int
    seq_len: int
    batch_size: int | None
    """null: one row on each rank that splits the batch."""
    precision: Literal["fp32", "bf16"]
    weights: Literal["fp32", "bf16", "NF4"]
    """Form in which weights are stored; of a run that trains adapters, the others."""
    optimizer: str = "adamw"
    num_meshes: int
    """Number of meshes that the model and the batch allow."""
    num_fitting: int | None
    """null: not predicted."""
    command: str | None = None
    """Trains the run on the requested mesh, or on the first if that does not fit; null if none
    fits, or without a run's CONFIG."""
    least: LeastMemory | None = None
    """What a rank stores at least, if the step is not predicted; then no mesh is listed."""
    requested: MeshPlan | None = None
    """The mesh that was requested."""
    meshes: tuple[MeshPlan, ...] = ()
    """Meshes that fit, fastest first, then those closest to fitting."""
    enough: Enough | None = None
    """Searched only if nothing fits."""
    adapter_r: int | None = None
    """Rank of the adapters that are trained; null trains the weights."""
    change: str | None = None
    """The smallest change of optimizer and weights, as on the command line, with which it fits."""
    with_change: MeshPlan | None = None
    with_adapters: MeshPlan | None = None
    """A mesh of these GPUs on which training LoRA adapters of rank 16 instead of the weights fits.
    Searched only if the requested mesh, or every mesh, does not fit."""
    remedies: tuple[str, ...] = ()
    """Settings of which each, changed alone, would make the requested mesh fit."""
    assumptions: tuple[str, ...] = ()

    def refuse_misfit(self) -> None:
        """Raise ConfigError if the requested mesh, or every mesh, needs more than is available."""
        problem = None if self.least is None else self.least.find_misfit(self.gpu)
        mesh, where = self.requested, ""
        if mesh is not None and not mesh.fits:
            where = f"the mesh {mesh.describe()}"
        elif mesh is None and self.num_fitting == 0:
            mesh = self.meshes[0]
            where = (
                f"the best mesh of {self.num_gpus:,} × {self.gpu} for a step of {self.model}, "
                f"{mesh.describe()},"
            )
        if mesh is not None and where:
            problem = (
                f"{where} needs {format_bytes(mesh.memory.needed)}; "
                f"{format_bytes(mesh.memory.usable)} are available for tensors on each {self.gpu}; "
                f"{self._describe_way_out()}"
            )
        if problem is not None:
            raise ConfigError(f"it does not fit: {problem}")

    def _describe_way_out(self) -> str:
        """Return alternatives that fit, the smallest change first."""
        ways = [f"set {remedy}" for remedy in self.remedies]
        if self.with_change is not None:
            ways.append(f"set {self.change} on the mesh {describe_choice(self.with_change)}")
        if self.num_fitting:
            ways.append(f"use the mesh {describe_choice(self.meshes[0])}")
        elif self.enough is not None:
            ways.append(
                f"use {self.enough.describe()} as {describe_choice(self.enough.mesh)}, "
                f"{format_bytes(self.enough.mesh.memory.needed)} each"
            )
        if self.with_adapters is not None:
            ways.append(
                "train LoRA adapters instead of the weights, adapter.name=lora "
                f"adapter.r={_ADAPTER_R}, on the mesh {describe_choice(self.with_adapters)}"
            )
        return f"nearest: {' or '.join(ways)}" if ways else BETTER_MACHINE


def describe_choice(mesh: MeshPlan) -> str:
    """Write a mesh and what `auto` is on it."""
    return (
        f"{mesh.describe()} with activation_checkpointing {mesh.activation_checkpointing} and "
        f"micro_batch_size {mesh.micro_batch_size:,}"
    )


# -- the plan --------------------------------------------------------------------------------------


def make_plan(model: "ModelSizes | ModelStorage", inputs: PlanInputs) -> Plan:
    """Return the meshes on which a training step fits, and what would help if none does.

    ``model`` has its sizes; or its parameters, if its step has no formula.

    Raises:
        ConfigError: no mesh of this many ranks, or not the requested one, is valid for model and
            batch.
    """
    if isinstance(model, ModelStorage):
        return _plan_least(model, inputs)
    sizes, machine, work = model, inputs.machine, inputs.work
    requested, meshes = inputs.list_meshes(limit_sizes(sizes, work))
    ranked, others = rank_meshes(sizes, meshes, work, machine)
    first = None if requested is None else find_fit(sizes, requested, work, machine)
    remedies: list[str] = []
    if first is not None and not first.fits:
        remedies = list_remedies(sizes, first.mesh, work, machine)
    enough = None
    # Processes of one CPU share its memory: more of them do not help.
    if not ranked and machine.has_gpus:
        # The answer names checkpointing and micro-batch too, so these are free.
        free = replace(work, checkpointing=None, micro_batch_size=None)
        choice = find_enough_gpus(sizes, free, machine)
        if choice is not None:
            enough = Enough(num_gpus=choice.mesh.num_ranks, mesh=make_mesh_plan(choice))
    is_short = not ranked or (first is not None and not first.fits)
    find = partial(find_changed_fit, sizes, machine=machine, first=requested)
    choice, change, with_change = None, None, None
    if is_short and inputs.may_adapt:
        choice = find(meshes, replace(work, adapter=AdapterSizes(r=_ADAPTER_R)))
    is_enough = enough is not None and enough.num_gpus <= inputs.num_gpus
    for settings, name, width in work.alternatives if is_short and not is_enough else ():
        if other := find(meshes, replace(work, optimizer=name, weight_bytes=width)):
            change, with_change = settings, make_mesh_plan(other)
            break
    taken = ranked[:1] if first is None else [first]
    faster = [describe_faster(sizes, fit, work, machine) for fit in taken]
    return Plan(
        **inputs.describe(),
        num_parameters=count_parameters(sizes),
        num_meshes=len(meshes),
        num_fitting=len(ranked),
        requested=None if first is None else make_mesh_plan(first),
        meshes=tuple(map(make_mesh_plan, [*ranked[:_NUM_LISTED], *others[:_NUM_NEAR]])),
        enough=enough,
        with_adapters=None if choice is None else make_mesh_plan(choice),
        change=change,
        with_change=with_change,
        remedies=tuple(remedies),
        assumptions=(
            *list_assumptions(
                machine,
                has_mask=needs_mask(sizes, work, machine),
                seq_len=work.seq_len,
                may_be_compiled=work.may_be_compiled,
                compiles_adapters=work.is_compiled and work.adapter is not None,
            ),
            *filter(None, faster),
        ),
    )


def make_mesh_plan(fit: Fit) -> MeshPlan:
    """Build the record of one mesh."""
    step = fit.step
    return MeshPlan(
        **{axis: fit.mesh.degree(axis) for axis in AXES},
        fits=fit.fits,
        activation_checkpointing=fit.settings.checkpointing,
        micro_batch_size=fit.micro_batch_size,
        num_micro_batches=fit.settings.num_micro_batches,
        memory=MemoryPlan(
            moment=fit.memory.moment,
            **asdict(fit.memory.peak),
            allowance=fit.allowance_bytes,
            needed=fit.needed_bytes,
            usable=fit.usable_bytes,
            host=fit.memory.saved_bytes,
        ),
        speed=None
        if step is None
        else SpeedPlan(
            step_s=step.step_s,
            compute_s=step.slowed_s,
            exposed_communication_s=step.exposed_s,
            hidden_communication_s=step.hidden_s,
            tokens_per_s=step.tokens_per_s,
        ),
    )


# -- without a formula for the step ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStorage:
    """The parameters of a model, by the axes that split them."""

    family: str
    """Its ``model_type``."""
    sizes: Sizes
    """What determines its valid meshes."""
    num_parameters: int
    """Tied parameters are counted once."""
    elements: tuple[tuple[bool, bool, int], ...]
    """(split over y, split over x, number of elements)."""
    unknown: str
    """Why memory and time cannot be estimated."""

    def count_stored(self, mesh: MeshShape) -> int:
        """Return the elements that the fullest rank stores at least."""
        total = sum(
            count / (mesh.y if over_y else 1) / (mesh.x if over_x else 1)
            for over_y, over_x, count in self.elements
        )
        return int(total / mesh.z)

    def count_bytes(self, mesh: MeshShape, work: Work) -> int:
        """Return the bytes that the fullest rank stores at least."""
        count = self.count_stored(mesh)
        if _trains_all(work):
            gradient = work.weight_bytes if work.facts.gradients == "all" else 0
            return int((work.weight_bytes + gradient + work.facts.state_bytes) * count)
        if work.adapter is None:
            return work.weight_bytes * count
        return int((_NF4_BYTES if work.adapter.is_nf4 else work.compute_bytes) * count)


def _plan_least(model: ModelStorage, inputs: PlanInputs) -> Plan:
    """Return what a rank stores at least."""
    work = inputs.work
    requested, meshes = inputs.list_meshes(limit_sizes(model.sizes, work))
    usable = inputs.machine.usable_bytes
    smallest = min(meshes, key=lambda each: model.count_bytes(each, work))
    mesh = requested or smallest
    has_other = model.count_bytes(smallest, work) <= usable < model.count_bytes(mesh, work)
    least = LeastMemory(
        family=model.family,
        not_predicted=model.unknown,
        mesh={axis: mesh.degree(axis) for axis in AXES},
        other_mesh={axis: smallest.degree(axis) for axis in AXES} if has_other else None,
        stored="weights, gradients and moments" if _trains_all(work) else "weights",
        at_least=model.count_bytes(mesh, work),
        usable=usable,
    )
    return Plan(
        **inputs.describe(),
        num_parameters=model.num_parameters,
        num_meshes=len(meshes),
        num_fitting=None,
        least=least,
    )


def _write_mesh(mesh: dict[str, int]) -> str:
    return f"({', '.join(f'{axis}={degree}' for axis, degree in mesh.items())})"


def _trains_all(work: Work) -> bool:
    """Return whether every weight has a gradient and moments."""
    return work.adapter is None and work.trained_modules is None
