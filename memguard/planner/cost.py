"""Estimates the time of a step on a mesh, from its computation and its communication.

    step      = compute + exposed + OVERLAP_SHARE x hidden
    compute   = compute.py
    hidden    = the rest of the communication, which takes cores and memory bandwidth from what is
                computed at the same time
    exposed   = the part of the communication during which a rank does not compute:

    x, y      forward, what is computed again and the stored input for it: all of it. Backward:
              what a layer group's all-reduce takes longer than its weight gradients
              (parallel/linear_function.py)
    z         the first gather and the last reduction of a micro-batch, and for each block

                  forward     gather of the next block            - time of this block
                  backward    gather of the next block, reduction
                              of the previous one                 - time of this block

              where positive. The time of a block is its computation and its exposed collectives
              over x and y, less all collectives over x and y that use the same wires as z does
    data      the same, in the last micro-batch only: reductions of stored gradients
    the rest  all of it: head, embedding, norms, shared key/value heads, what all ranks agree on

    an axis   = bytes around its rings / (bandwidth x LINK_SHARE)
                + calls x CALL_S + rounds x ROUND_S

The bandwidth of an axis depends on the placement of its ranks. Ranks are ordered along
``mesh.order``, the last axis fastest; i is the product of the degrees of all faster axes, G the
number of GPUs of a node:

    within a node    link             (direct links, R ranks: (R-1)/(G-1) of it)
    across nodes     network / min(G, i), at most link: this number of rings leaves each node

This is the model of AxoNN (arXiv 2502.08145) with latencies added, which dominate with thousands of
ranks around a ring. A ring over R ranks has R-1 rounds. An all-reduce is counted with 2 log2 R
rounds, because small payloads are sent along trees.

Bandwidths and peaks are nominal. LINK_SHARE is published for NCCL, OVERLAP_SHARE is fitted with the
constants of compute.py; CALL_S and ROUND_S are assumptions. scripts/bench/published.py compares the
estimates with published training runs.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.compute import ComputeTimes, estimate_compute
from memguard.planner.machine import Machine
from memguard.planner.step_settings import StepSettings
from memguard.planner.traffic import (
    Collective,
    LayerGroup,
    Phase,
    StepTraffic,
    TrafficAxis,
)

LINK_SHARE = 0.82
"""Share of the nominal bandwidth that collectives reach: 370 of an H100's 450 GB/s, according to
NCCL's developers (https://github.com/NVIDIA/nccl-tests/issues/212)."""

OVERLAP_SHARE = 0.50
"""By how much hidden communication lengthens the computation, relative to its own time. Fitted."""

CALL_S = 20e-6
"""Time to start one collective, independent of its size (seconds). An assumption."""

ROUND_S = 5e-6
"""Latency of one message between two ranks (seconds). An assumption."""


@dataclass(kw_only=True, slots=True)
class AxisTime:
    """Communication along one axis in a step, and its time."""

    axis: TrafficAxis
    gb_per_s: float
    """Nominal bandwidth that each of its rings gets (GB/s)."""
    num_calls: int = 0
    ring_bytes: float = 0.0
    """Bytes that each rank sends."""
    time_s: float = 0.0
    exposed_s: float = 0.0
    """The part of its time during which nothing is computed (seconds)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEstimate:
    """One optimizer step on a mesh of a machine."""

    num_tokens: int
    """Tokens of the step on all ranks."""
    compute_s: float
    """Computation alone (seconds)."""
    axes: tuple[AxisTime, ...]
    """Axes with communication."""

    @property
    def exposed_s(self) -> float:
        """Communication that does not overlap with the computation (seconds)."""
        return sum(axis.exposed_s for axis in self.axes)

    @property
    def hidden_s(self) -> float:
        """Communication that overlaps with the computation (seconds)."""
        return sum(axis.time_s - axis.exposed_s for axis in self.axes)

    @property
    def slowed_s(self) -> float:
        """Time of the computation with what communication takes from it (seconds)."""
        return self.compute_s + OVERLAP_SHARE * self.hidden_s

    @property
    def step_s(self) -> float:
        """Time of the step (seconds)."""
        return self.slowed_s + self.exposed_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second."""
        return self.num_tokens / self.step_s


def estimate_step(
    sizes: ModelSizes, mesh: MeshShape, settings: StepSettings, machine: Machine, *, seq_len: int
) -> StepEstimate:
    """Estimate one optimizer step, on as many nodes of the machine as the mesh needs."""
    compute = estimate_compute(sizes, mesh, settings, machine, seq_len=seq_len)
    # Without a backward the weights are changed one way and the other, with a forward each.
    times = settings.num_micro_batches * (2 if settings.trained_modules == () else 1)
    schedule = _Schedule(machine, mesh, StepTraffic(sizes, mesh, settings), compute)
    # Gradients go over data in the last micro-batch.
    schedule.add_micro_batches(times - 1, sizes.num_layers, reduces_data=False)
    schedule.add_micro_batches(1, sizes.num_layers, reduces_data=True)
    schedule.add_update()
    block = compute.block
    micro_batch_s = sizes.num_layers * block.forward_s + compute.ends_s
    micro_batch_s += compute.num_reached * (block.again_s + block.backward_s)
    return StepEstimate(
        num_tokens=settings.num_tokens * settings.num_micro_batches * mesh.num_batch_ways,
        compute_s=times * micro_batch_s + compute.update_s,
        axes=tuple(schedule.axes.values()),
    )


@dataclass(kw_only=True, slots=True)
class _Load:
    """What one block, or an end, sends in one pass: seconds on each kind of wire."""

    exposed: float = 0.0
    """Over x and y, while nothing is computed."""
    foreground: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    """Over x and y; True: across nodes."""


class _Schedule:
    """Adds up the communication of a step, and what of it is exposed."""

    def __init__(
        self, machine: Machine, mesh: MeshShape, traffic: StepTraffic, compute: ComputeTimes
    ) -> None:
        self.machine, self.mesh, self.compute = machine, mesh, compute
        self.block = traffic.block(traffic.typical)
        self.block_storage = traffic.block_storage(traffic.typical)
        self.ends, self.end_storage = traffic.ends(), traffic.end_storage()
        self.update = traffic.update()
        self.axes: dict[TrafficAxis, AxisTime] = {}

    def add_update(self) -> None:
        """Add what all ranks agree on, once a step."""
        self._add_exposed(self.update, 1)

    def add_micro_batches(self, times: int, num_layers: int, *, reduces_data: bool) -> None:
        """Add micro-batches; ``reduces_data``: their gradients go over data."""
        if times == 0:
            return
        block, between = self.compute.block, times * (num_layers - 1)
        num_reached = self.compute.num_reached
        forward = self._add_foreground("forward", times * num_layers)
        backward = self._add_foreground("backward", times * num_reached)
        self._add_exposed(self.ends, times)
        storage = self._select([self.block_storage], reduces_data)
        embedding = self._select(self.end_storage[:1], reduces_data)
        others = self._select(self.end_storage[1:], reduces_data)
        # Forward: nothing is computed before the embedding's and the first block's weights are
        # gathered. The last block overlaps with the gathers of head and last norm.
        gathers = _of("forward", storage)
        self._add_exposed([*_of("forward", embedding), *gathers], times)
        self._add_background(gathers, block.forward_s, forward, times=between)
        self._add_background(_of("forward", others), block.forward_s, forward, times=times)
        # Backward: nothing is left to compute when the first block's and the embedding's gradients
        # are reduced. The last block overlaps with the reduction of the head's.
        backward_s = block.again_s + block.backward_s
        returns = _of("backward", storage)
        again = [call for call in returns if call.operation == "all_gather"]
        reduced = [call for call in returns if call.operation != "all_gather"]
        self._add_exposed(_of("backward", embedding), times)
        if not num_reached:
            self._add_exposed(_of("backward", others), times)
            return
        self._add_exposed(reduced, times)
        self._add_background(returns, backward_s, backward, times=times * (num_reached - 1))
        last = [*again, *_of("backward", others)]
        self._add_background(last, backward_s, backward, times=times)

    def _select(
        self, units: Iterable[Iterable[Collective]], reduces_data: bool
    ) -> list[Collective]:
        """Return the collectives of units of storage that a micro-batch runs."""
        return [call for unit in units for call in unit if reduces_data or call.axis != "data"]

    # -- one kind of communication after the other ---------------------------------------------

    def _add_exposed(self, calls: Iterable[Collective], times: int) -> None:
        """Add collectives during which nothing is computed."""
        for call in calls:
            self._add(call, times, exposed=1.0)

    def _add_foreground(self, phase: Phase, times: int) -> _Load:
        """Add a pass of a block over x and y; return what one of them takes."""
        load = _Load()
        for call in self.block:
            if call.phase != phase or call.degree == 1:
                continue
            once = self._time_s(call) / call.num_calls
            groups: Sequence[LayerGroup | None] = call.behind or (None,) * call.num_calls
            exposed = 0.0
            for group in groups:
                behind = self.compute.block.weight_gradients_s[group] if group else 0.0
                exposed += max(0.0, once - behind)
            self._add(call, times, exposed=exposed / (once * call.num_calls))
            load.exposed += exposed
            load.foreground[self._crosses(call)] += once * call.num_calls
        return load

    def _add_background(
        self, calls: Sequence[Collective], compute_s: float, load: _Load, *, times: int
    ) -> None:
        """Add collectives that run at the same time as one block, some number of times."""
        for crosses in (False, True):
            own = [call for call in calls if call.degree > 1 and self._crosses(call) == crosses]
            own_s = sum(self._time_s(call) for call in own)
            free_s = max(0.0, compute_s + load.exposed - load.foreground[crosses])
            for call in own:
                self._add(call, times, exposed=max(0.0, own_s - free_s) / own_s)

    def _add(self, call: Collective, times: int, *, exposed: float) -> None:
        """Add a collective to its axis; ``exposed`` is a share of its time."""
        if call.degree == 1 or times == 0:
            return
        if call.axis not in self.axes:
            self.axes[call.axis] = AxisTime(axis=call.axis, gb_per_s=self._gb_per_s(call))
        total = self.axes[call.axis]
        time_s = times * self._time_s(call)
        total.num_calls += times * call.num_calls
        total.ring_bytes += times * call.ring_bytes
        total.time_s += time_s
        total.exposed_s += exposed * time_s

    # -- one collective ------------------------------------------------------------------------

    def _gb_per_s(self, call: Collective) -> float:
        return compute_gb_per_s(self.machine, self.mesh, call.axis, degree=call.degree)

    def _crosses(self, call: Collective) -> bool:
        return _crosses_nodes(self.machine, self.mesh, call.axis, degree=call.degree)

    def _time_s(self, call: Collective) -> float:
        """Return the time of all its calls (seconds)."""
        transfer_s = call.ring_bytes / (self._gb_per_s(call) * 1e9 * LINK_SHARE)
        return transfer_s + call.num_calls * (CALL_S + _count_rounds(call) * ROUND_S)


def _of(phase: Phase, calls: Iterable[Collective]) -> list[Collective]:
    """Return the collectives of one phase."""
    return [call for call in calls if call.phase == phase]


def compute_gb_per_s(machine: Machine, mesh: MeshShape, axis: TrafficAxis, *, degree: int) -> float:
    """Return the bandwidth of each ring along an axis (GB/s, one direction).

    Ranks fill the nodes one after the other; ``kv_replicas`` are neighbours along x.
    """
    num_gpus = machine.gpus_per_node
    if not _crosses_nodes(machine, mesh, axis, degree=degree):
        if machine.link_topology == "direct" and num_gpus > 1:
            return machine.link_gb_per_s * (degree - 1) / (num_gpus - 1)
        return machine.link_gb_per_s
    num_rings = min(num_gpus, _count_inner(mesh, axis))
    return min(machine.link_gb_per_s, machine.network_gb_per_s / num_rings)


def _crosses_nodes(machine: Machine, mesh: MeshShape, axis: TrafficAxis, *, degree: int) -> bool:
    """Return whether rings along an axis leave their node."""
    num_gpus = machine.gpus_per_node
    is_inside = num_gpus % (_count_inner(mesh, axis) * degree) == 0
    return mesh.num_ranks > num_gpus and not is_inside


def _count_inner(mesh: MeshShape, axis: TrafficAxis) -> int:
    """Return the distance in ranks between neighbours along an axis."""
    if axis == "world":
        return 1
    own = "x" if axis == "kv_replicas" else axis
    faster = mesh.order[mesh.order.index(own) + 1 :]
    return math.prod(mesh.degree(name) for name in faster)


def _count_rounds(collective: Collective) -> int:
    """Return the number of sequential messages in one call."""
    if collective.operation == "all_reduce":
        return 2 * math.ceil(math.log2(collective.degree))
    return collective.degree - 1
