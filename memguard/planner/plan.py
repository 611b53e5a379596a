"""The record of `memguard plan`: meshes, their memory, and settings that would fit."""

from typing import Literal

from memguard.parallel.mesh_shape import AXES
from memguard.planner.compute import MATMUL_SHARE
from memguard.planner.cost import StepEstimate
from memguard.planner.fit import Checkpointing, Fit
from memguard.planner.machine import Machine
from memguard.records.record import Record


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


class SpeedPlan(Record):
    """Rough time estimates, to rank meshes."""

    step_s: float
    compute_s: float
    exposed_communication_s: float
    hidden_communication_s: float
    tokens_per_s: float
    """Tokens of all ranks per second."""


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

    @property
    def headroom_bytes(self) -> int:
        """Memory left; negative if memory is missing."""
        return self.memory.usable - self.memory.needed

    def describe(self) -> str:
        """Write the mesh as users see it: ``(data=1, z=16, y=2, x=8)``."""
        return f"({', '.join(f'{axis}={getattr(self, axis)}' for axis in AXES)})"


class Enough(Record):
    """The smallest number of GPUs that suffices: part of a node, or whole nodes."""

    num_gpus: int
    mesh: MeshPlan


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
    num_meshes: int
    """Number of meshes that the model and the batch allow."""
    num_fitting: int
    requested: MeshPlan | None
    """The mesh that was requested."""
    meshes: tuple[MeshPlan, ...]
    """Meshes that fit, fastest first, then those closest to fitting."""
    enough: Enough | None
    """Searched only if nothing fits."""
    adapter_r: int | None = None
    """Rank of the adapters that are trained; null trains the weights."""
    with_adapters: MeshPlan | None = None
    """A mesh of these GPUs on which training LoRA adapters of rank 16 instead of the weights fits.
    Searched only if the requested mesh, or every mesh, does not fit."""
    remedies: tuple[str, ...]
    """Settings of which each, changed alone, would make the requested mesh fit."""
    assumptions: tuple[str, ...]


def make_mesh_plan(fit: Fit, step: StepEstimate | None) -> MeshPlan:
    """Build the record of one mesh."""
    memory, peak, mesh = fit.memory, fit.memory.peak, fit.mesh
    return MeshPlan(
        data=mesh.data,
        z=mesh.z,
        y=mesh.y,
        x=mesh.x,
        fits=fit.fits,
        activation_checkpointing=fit.settings.checkpointing,
        micro_batch_size=fit.micro_batch_size,
        num_micro_batches=fit.settings.num_micro_batches,
        memory=MemoryPlan(
            moment=memory.moment,
            weights=peak.weights,
            optimizer=peak.optimizer,
            gradients=peak.gradients,
            activations=peak.activations,
            nll_chunk=peak.nll_chunk,
            buffers=peak.buffers,
            allowance=fit.allowance_bytes,
            needed=fit.needed_bytes,
            usable=fit.usable_bytes,
        ),
        speed=None
        if step is None
        else SpeedPlan(
            step_s=step.step_s,
            compute_s=step.compute_s,
            exposed_communication_s=step.exposed_s,
            hidden_communication_s=step.hidden_s,
            tokens_per_s=step.tokens_per_s,
        ),
    )


def list_assumptions(machine: Machine, *, has_mask: bool) -> tuple[str, ...]:
    """Return the assumptions of the estimates, one phrase each.

    Args:
        machine: the machine.
        has_mask: whether attention reads a mask of all pairs of tokens.
    """
    assumptions = [
        f"{machine.reserved_gib:g} GiB per rank are used before the first tensor",
        f"the allocator loses {machine.fragmentation:.0%} of activations, logits and buffers to "
        "fragmentation",
        "rows contain several documents, whose attention needs a mask"
        if has_mask
        else "flash attention reads where documents end, without a mask",
        f"large matmuls reach {MATMUL_SHARE:.0%} of the peak, as in published runs on H100s: use "
        "speeds only to rank meshes",
    ]
    assumed = list(machine.assumed)
    if "memory_gb_per_s" not in {*assumed, *machine.model_fields_set}:
        assumed.append("memory_gb_per_s")
    if assumed:
        names = ", ".join(assumed)
        assumptions.append(f"{machine.name}'s {names}: assumed, not published")
    return tuple(assumptions)
