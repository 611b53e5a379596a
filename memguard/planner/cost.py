"""Rough estimate of the time of a step on a mesh. Use it only to rank meshes.

    step      = compute + exposed          if z and data overlap fully with the computation
              = z + data + exposed         if they take longer than the computation
    exposed   = x + y (+ kv_replicas, world)
    compute   = FLOPs of one rank / (peak x ATTAINABLE_FRACTION)
    an axis   = bytes around its rings / bandwidth + calls x CALL_S + rounds x ROUND_S

The bandwidth of an axis depends on the placement of its ranks. Ranks are ordered along
``mesh.order``, the last axis fastest; i is the product of the degrees of all faster axes, G the
number of GPUs of a node:

    within a node    link             (direct links, R ranks: (R-1)/(G-1) of it)
    across nodes     network / min(G, i), at most link: this number of rings leaves each node

This is the model of AxoNN (arXiv 2502.08145) with latencies added, which dominate with thousands of
ranks around a ring. A ring over R ranks has R-1 rounds. An all-reduce is counted with 2 log2 R
rounds, because small payloads are sent along trees.

Bandwidths and peaks are nominal, and the constants below are assumptions. Links are counted as if
only one axis used them at a time, and the overlap of backward over x with its own matmuls is not
subtracted. Costs that are the same on every mesh (optimizer arithmetic, norms, loading) are left
out.
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
"""Time to start one collective, independent of its size (seconds). An assumption."""

ROUND_S = 5e-6
"""Latency of one message between two ranks (seconds). An assumption."""

_HIDDEN: tuple[TrafficAxis, ...] = ("z", "data")


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisTime:
    """Communication along one axis in a step, and its time."""

    axis: TrafficAxis
    num_calls: int
    ring_bytes: float
    """Bytes that each rank sends."""
    gb_per_s: float
    """Bandwidth that each of its rings gets (GB/s)."""
    time_s: float

    @property
    def is_hidden(self) -> bool:
        """Whether it overlaps with the computation."""
        return self.axis in _HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEstimate:
    """One optimizer step on a mesh of a machine."""

    num_tokens: int
    """Tokens of the step on all ranks."""
    num_flops: int
    """Floating-point operations of one rank."""
    compute_s: float
    axes: tuple[AxisTime, ...]
    """Axes with communication."""

    @property
    def exposed_s(self) -> float:
        """Communication that does not overlap with the computation (seconds)."""
        return sum(axis.time_s for axis in self.axes if not axis.is_hidden)

    @property
    def hidden_s(self) -> float:
        """Communication that overlaps with the computation (seconds)."""
        return sum(axis.time_s for axis in self.axes if axis.is_hidden)

    @property
    def step_s(self) -> float:
        """Time of the step (seconds)."""
        return self.exposed_s + max(self.compute_s, self.hidden_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second."""
        return self.num_tokens / self.step_s


def estimate_step(
    sizes: ModelSizes, mesh: MeshShape, settings: StepSettings, machine: Machine, *, seq_len: int
) -> StepEstimate:
    """Estimate one optimizer step.

    Args:
        sizes: sizes of the model.
        mesh: a mesh that `check_mesh` accepts.
        settings: settings of the step.
        machine: the machine, with as many nodes as the mesh needs.
        seq_len: tokens of a row, over which attention is counted (see `count_flops`).
    """
    num_flops = count_flops(sizes, mesh, settings, seq_len=seq_len)
    # fp32 has half the peak, as TF32 has on NVIDIA GPUs.
    peak = machine.peak_tflops * 1e12 * 2 / settings.compute_bytes
    collectives = list_collectives(sizes, mesh, settings)
    axes = []
    for axis, (num_calls, _, ring_bytes) in sum_by_axis(collectives).items():
        own = [collective for collective in collectives if collective.axis == axis]
        gb_per_s = compute_gb_per_s(machine, mesh, axis, degree=own[0].degree)
        num_rounds = sum(collective.num_calls * _count_rounds(collective) for collective in own)
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

    A token costs 2 operations per parameter in forward and 4 in backward, and attends to
    (seq_len + 1) / 2 others: causal attention over whole rows. Rows packed with shorter documents
    cost less, equally on every mesh. Heads are split over x only, so every rank along y computes
    their attention.

    Args:
        sizes: sizes of the model.
        mesh: a mesh that `check_mesh` accepts.
        settings: settings of the step; the head is computed for its labels only.
        seq_len: tokens of a row.
    """
    features, width = sizes.hidden_size // mesh.y, sizes.intermediate_size // mesh.x
    queries = sizes.num_heads * sizes.head_dim // mesh.x
    keys = sizes.num_kv_heads * sizes.head_dim // mesh.x
    down = 2 * settings.num_tokens * features * width
    linear = 2 * settings.num_tokens * features * 2 * (queries + keys + width) + down
    # Attention scores and their product with the values: two matmuls, half of them masked.
    attention = 2 * settings.num_tokens * (seq_len + 1) * queries
    block = 3 * (linear + attention)
    if settings.checkpointing == "full":
        # Recomputation ends at the last tensor that backward needs, the input of down. Selective
        # checkpointing keeps the outputs of matmuls and attention.
        block += linear + attention - down
    head = 2 * settings.num_labels * features * -(-sizes.vocab_size // mesh.x)
    # Per-label losses recompute the logits in backward.
    num_head = 3 if settings.sums_nll else 4
    return settings.num_micro_batches * (sizes.num_layers * block + num_head * head)


def compute_gb_per_s(machine: Machine, mesh: MeshShape, axis: TrafficAxis, *, degree: int) -> float:
    """Return the bandwidth of each ring along an axis (GB/s, one direction).

    Args:
        machine: the machine; ranks fill its nodes one after the other.
        mesh: the mesh.
        axis: an axis of the mesh, ``kv_replicas`` (neighbours along x), or ``world``.
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
    """Return the number of sequential messages in one call."""
    if collective.operation == "all_reduce":
        return 2 * math.ceil(math.log2(collective.degree))
    return collective.degree - 1
