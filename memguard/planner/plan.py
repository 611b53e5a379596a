"""The answer of `memguard plan`, as it is written down: meshes, what they need, what would fit."""

from typing import Literal

from memguard.parallel.mesh_shape import AXES
from memguard.planner.cost import ATTAINABLE_FRACTION, StepEstimate
from memguard.planner.fit import Checkpointing, Fit
from memguard.planner.machine import Machine
from memguard.records.record import Record


class MemoryPlan(Record):
    """Memory of the rank that needs most, at its peak (bytes)."""

    moment: str
    """When that is."""
    weights: int
    optimizer: int
    gradients: int
    activations: int
    nll_chunk: int
    buffers: int
    allowance: int
    """For what an allocator loses to fragments: an assumption."""
    needed: int
    """All of them."""
    usable: int
    """What a GPU has for tensors."""


class SpeedPlan(Record):
    """A rough time, to compare meshes by."""

    step_s: float
    compute_s: float
    exposed_communication_s: float
    hidden_communication_s: float
    tokens_per_s: float
    """Of all ranks."""


class MeshPlan(Record):
    """One mesh and the settings it runs with."""

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
    """Where it fits."""

    @property
    def headroom_bytes(self) -> int:
        """What is left over; below 0, what is missing."""
        return self.memory.usable - self.memory.needed

    def describe(self) -> str:
        """Write the mesh as users see it: ``(data=1, z=16, y=2, x=8)``."""
        return f"({', '.join(f'{axis}={getattr(self, axis)}' for axis in AXES)})"


class Enough(Record):
    """The smallest number of GPUs that would do: part of a node, or whole ones."""

    num_gpus: int
    mesh: MeshPlan


class Plan(Record):
    """Which meshes hold a step of a model on a machine."""

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
    """That the model and the batch allow."""
    num_fitting: int
    requested: MeshPlan | None
    """The mesh that was requested."""
    meshes: tuple[MeshPlan, ...]
    """Those that fit first, the fastest before others; then those that nearly fit."""
    enough: Enough | None
    """Looked for where nothing fits."""
    remedies: tuple[str, ...]
    """Settings that, changed alone, let the mesh that was asked for fit."""
    assumptions: tuple[str, ...]


def make_mesh_plan(fit: Fit, step: StepEstimate | None) -> MeshPlan:
    """Write down one mesh."""
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


def list_assumptions(machine: Machine) -> tuple[str, ...]:
    """Return what the figures rest on, a sentence each."""
    found = [
        f"{machine.reserved_gib:g} GiB a rank are taken before the first tensor",
        f"an allocator loses {machine.fragmentation:.0%} of activations, logits and buffers to "
        "fragments",
        "rows hold several documents, whose attention needs a mask",
        f"matmuls reach {ATTAINABLE_FRACTION:.0%} of the nominal peak: times are rough and rank "
        "meshes",
    ]
    if machine.assumed:
        found.append(f"{machine.name}'s {', '.join(machine.assumed)}: assumed, not published")
    return tuple(found)
