"""How long a step takes on a mesh, roughly: to rank meshes, not to promise a time.

    step      = compute + exposed          where z and data hide behind the computation
              = z + data + exposed         where they take longer than it
    exposed   = x + y (+ kv_replicas, world)
    compute   = FLOPs of one rank / (peak x ATTAINABLE_FRACTION)
    an axis   = bytes around its rings / bandwidth + calls x CALL_S + rounds x ROUND_S

The bandwidth an axis gets depends on where its ranks are. Ranks lie along ``mesh.order``, the last
axis fastest, and i is the product of the degrees of all faster axes, G the GPUs of a node:

    within a node    link             (direct links, R ranks: (R-1)/(G-1) of it)
    across nodes     network / min(G, i), at most link: so many rings leave each node

after the model of AxoNN (arXiv 2502.08145), to which the latencies are added: with thousands of
ranks around a ring they decide. A ring over R ranks has R-1 rounds; an all-reduce whose payload is
small goes along trees, 2 log2 R rounds, and is counted so.

Bandwidths and peaks are nominal, the constants below are assumptions, links are counted as if idle
but for one axis at a time, and what backward over x hides behind its own matmuls is not taken off.
What is the same on every mesh (the optimizer's arithmetic, norms, loading) is left out.
"""

import math
from dataclasses import dataclass

from memguard.parallel.mesh_shape import MeshShape, ModelSizes
from memguard.planner.machine import Machine
from memguard.planner.traffic import (
    Collective,
    StepSettings,
    TrafficAxis,
    list_collectives,
    sum_by_axis,
)

ATTAINABLE_FRACTION = 0.5
"""Share of the nominal peak that matmuls of a training step reach. An assumption."""

CALL_S = 20e-6
"""What starting one collective costs, whatever it sends (seconds). An assumption."""

ROUND_S = 5e-6
"""What one message from rank to rank costs beside its bytes (seconds). An assumption."""

_HIDDEN: tuple[TrafficAxis, ...] = ("z", "data")


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisTime:
    """What one axis sends in a step, and how long that takes."""

    axis: TrafficAxis
    num_calls: int
    ring_bytes: float
    """What each rank sends (bytes)."""
    gb_per_s: float
    """Bandwidth that each of its rings gets (GB/s)."""
    time_s: float

    @property
    def is_hidden(self) -> bool:
        """Whether it runs beside the computation."""
        return self.axis in _HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEstimate:
    """One optimizer step on a mesh of a machine."""

    num_tokens: int
    """Of the step, on all ranks (tokens)."""
    num_flops: int
    """Of one rank."""
    compute_s: float
    axes: tuple[AxisTime, ...]
    """Those that send something."""

    @property
    def exposed_s(self) -> float:
        """Communication that the computation waits for (seconds)."""
        return sum(axis.time_s for axis in self.axes if not axis.is_hidden)

    @property
    def hidden_s(self) -> float:
        """Communication beside the computation (seconds)."""
        return sum(axis.time_s for axis in self.axes if axis.is_hidden)

    @property
    def step_s(self) -> float:
        """The step (seconds)."""
        return self.exposed_s + max(self.compute_s, self.hidden_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks in a second."""
        return self.num_tokens / self.step_s


def estimate_step(
    sizes: ModelSizes, mesh: MeshShape, settings: StepSettings, machine: Machine, *, seq_len: int
) -> StepEstimate:
    """Estimate one optimizer step.

    Args:
        sizes: of the model.
        mesh: one that `check_mesh` accepts.
        settings: of the step.
        machine: it runs on, with as many nodes as the mesh needs.
        seq_len: tokens of a row, which attention is counted over (see `count_flops`).
    """
    num_flops = count_flops(sizes, mesh, settings, seq_len=seq_len)
    # fp32 has half the peak, as TF32 has on NVIDIA GPUs.
    peak = machine.peak_tflops * 1e12 * 2 / settings.compute_bytes
    collectives = list_collectives(sizes, mesh, settings)
    axes = []
    for axis, (num_calls, _, ring_bytes) in sum_by_axis(collectives).items():
        own = [each for each in collectives if each.axis == axis]
        gb_per_s = compute_gb_per_s(machine, mesh, axis, degree=own[0].degree)
        num_rounds = sum(each.num_calls * _count_rounds(each) for each in own)
        latency_s = num_calls * CALL_S + num_rounds * ROUND_S
        axes.append(
            AxisTime(
                axis=axis,
                num_calls=num_calls,
                ring_bytes=ring_bytes,
                gb_per_s=gb_per_s,
                time_s=ring_bytes / (gb_per_s * 1e9) + latency_s,
            )
        )
    return StepEstimate(
        num_tokens=settings.num_tokens * settings.num_micro_batches * mesh.num_batch_ways,
        num_flops=num_flops,
        compute_s=num_flops / (peak * ATTAINABLE_FRACTION),
        axes=tuple(axes),
    )


def count_flops(sizes: ModelSizes, mesh: MeshShape, settings: StepSettings, *, seq_len: int) -> int:
    """Count the floating-point operations of matmuls of one rank in one step.

    A token costs 2 of them a parameter in forward and 4 in backward, and sees (seq_len + 1) / 2
    others: causal attention over whole rows. Rows packed with shorter documents cost less, on every
    mesh alike. Heads lie over x alone, so that every rank along y computes their attention.

    Args:
        sizes: of the model.
        mesh: one that `check_mesh` accepts.
        settings: of the step; the head is computed for its labels only.
        seq_len: tokens of a row.
    """
    features, width = sizes.hidden_size // mesh.y, sizes.intermediate_size // mesh.x
    queries = sizes.num_heads * sizes.head_dim // mesh.x
    keys = sizes.num_kv_heads * sizes.head_dim // mesh.x
    down = 2 * settings.num_tokens * features * width
    linear = 2 * settings.num_tokens * features * 2 * (queries + keys + width) + down
    # Scores and their product with the values: two matmuls, half of whose elements are masked.
    attention = 2 * settings.num_tokens * (seq_len + 1) * queries
    block = 3 * (linear + attention)
    if settings.checkpointing == "full":
        # Computing again ends at the last tensor that backward needs, the input of down. Selective
        # checkpointing keeps what matmuls and attention gave.
        block += linear + attention - down
    head = 2 * settings.num_labels * features * -(-sizes.vocab_size // mesh.x)
    # Losses one by one compute the logits again in backward.
    num_head = 3 if settings.sums_nll else 4
    return settings.num_micro_batches * (sizes.num_layers * block + num_head * head)


def compute_gb_per_s(machine: Machine, mesh: MeshShape, axis: TrafficAxis, *, degree: int) -> float:
    """Return the bandwidth that each ring along an axis gets (GB/s, one direction).

    Args:
        machine: whose nodes the ranks fill one after the other.
        mesh: how they lie.
        axis: of the mesh; or ``kv_replicas``, neighbours along x; or ``world``.
        degree: ranks of a ring, 2 or more.
    """
    num_inner, num_gpus = _count_inner(mesh, axis), machine.gpus_per_node
    if mesh.num_ranks <= num_gpus or num_gpus % (num_inner * degree) == 0:
        if machine.link_topology == "direct" and num_gpus > 1:
            return machine.link_gb_per_s * (degree - 1) / (num_gpus - 1)
        return machine.link_gb_per_s
    return min(machine.link_gb_per_s, machine.network_gb_per_s / min(num_gpus, num_inner))


def _count_inner(mesh: MeshShape, axis: TrafficAxis) -> int:
    """Return the distance in ranks between neighbours along an axis."""
    if axis == "world":
        return 1
    own = "x" if axis == "kv_replicas" else axis
    faster = mesh.order[mesh.order.index(own) + 1 :]
    return math.prod(mesh.degree(each) for each in faster)


def _count_rounds(collective: Collective) -> int:
    """Return how many messages follow each other in one call."""
    if collective.operation == "all_reduce":
        return 2 * math.ceil(math.log2(collective.degree))
    return collective.degree - 1
