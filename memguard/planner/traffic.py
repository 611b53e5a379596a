"""Computes the communication of one training step: every collective, by axis.

The formula is in the docstring of `memguard.parallel`. Bytes are a collective's payload, the larger
of its two buffers: what an all-reduce reduces, what an all-gather results in, what a reduce-scatter
is given. Around a ring of R ranks each of them sends

    all-reduce  2 (R-1)/R of it        all-gather, reduce-scatter  (R-1)/R of it

With adapters the base is frozen: its gradients are not sent. Those of the adapters are summed once
a step (`memguard.parallel.lora`), in fp32: each factor over the axis over which it is partial, then
all of them over z and data.

Where shards are uneven (vocabulary over x, weights over z) sizes are rank 0's, the largest.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from memguard.parallel.mesh_shape import MeshShape, ModelSizes
from memguard.planner.adapters import (
    ADAPTER_BYTES,
    AdapterSizes,
    count_elements,
    list_adapted,
)

Operation = Literal["all_reduce", "all_gather", "reduce_scatter"]
Phase = Literal["forward", "backward", "update"]
TrafficAxis = Literal["data", "z", "y", "x", "kv_replicas", "world"]
"""``kv_replicas``: those ranks along x that share a key/value head; ``world``: all ranks."""
LayerGroup = Literal["q|k|v", "o", "gate|up", "down"]
"""Linear layers of a decoder block that read the same input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """The parameters of one unit of storage on one rank: FSDP2 gathers and reduces them at once.

    A decoder block, the embedding, the head, the last norm (tied weights: the last three together).
    Each parameter has the rows and row length that it has over y and x, and is cut along its rows
    over z, the last pieces padded to the first's size.
    """

    name: str
    shapes: tuple[tuple[int, int], ...]
    """Rows and row length of each parameter, as they lie over y and x."""
    z: int

    @property
    def stored(self) -> int:
        """Elements that this rank stores, padding included."""
        return sum(-(-rows // self.z) * length for rows, length in self.shapes)

    @property
    def gathered(self) -> int:
        """Elements once gathered over z, padding included."""
        return self.stored * self.z


def block_unit(sizes: ModelSizes, mesh: MeshShape) -> Unit:
    """Return the unit that each decoder block is."""
    features = sizes.hidden_size // mesh.y
    queries = sizes.num_heads * sizes.head_dim // mesh.x
    keys = sizes.num_kv_heads * sizes.head_dim // mesh.x
    width = sizes.intermediate_size // mesh.x
    matrices = [
        (queries, features),
        (keys, features),
        (keys, features),
        (features, queries),
        (width, features),
        (width, features),
        (features, width),
    ]
    vectors = [features] * 2
    if sizes.has_qkv_bias:
        vectors += [queries, keys, keys]
    if sizes.has_output_bias:
        vectors += [features]
    if sizes.has_mlp_bias:
        vectors += [width, width, features]
    if sizes.has_head_norms:
        vectors += [sizes.head_dim] * 2
    shapes = (*matrices, *((length, 1) for length in vectors))
    return Unit(name="a block", shapes=shapes, z=mesh.z)


def other_units(sizes: ModelSizes, mesh: MeshShape) -> tuple[Unit, ...]:
    """Return the units of embedding, head and last norm."""
    features, vocab = sizes.hidden_size // mesh.y, -(-sizes.vocab_size // mesh.x)
    norm, table = (features, 1), (vocab, features)
    if sizes.is_tied:
        return (Unit(name="embedding = head, last norm", shapes=(norm, table), z=mesh.z),)
    return (
        Unit(name="embedding", shapes=(table,), z=mesh.z),
        Unit(name="head", shapes=(table,), z=mesh.z),
        Unit(name="last norm", shapes=(norm,), z=mesh.z),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective, called some number of times."""

    axis: TrafficAxis
    operation: Operation
    what: str
    """What is sent, in a few words."""
    phase: Phase
    degree: int
    """Ranks that take part."""
    num_calls: int
    num_bytes: int
    """Payload of one call (bytes)."""
    behind: tuple[LayerGroup, ...] = ()
    """The layers whose weight gradients are computed at the same time, one group a call."""

    @property
    def payload_bytes(self) -> int:
        """Payload of all calls (bytes)."""
        return self.num_calls * self.num_bytes

    @property
    def ring_bytes(self) -> float:
        """What each rank sends in all calls, where they go around a ring (bytes)."""
        rounds = 2 if self.operation == "all_reduce" else 1
        return rounds * self.payload_bytes * (self.degree - 1) / self.degree


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """Settings of a step that, with model and mesh, determine communication, memory and time."""

    num_tokens: int
    """Of one micro-batch on one rank, padding included (tokens)."""
    num_labels: int
    """Of one micro-batch on one rank, those that receive loss (tokens)."""
    num_micro_batches: int = 1
    chunk_tokens: int = 4096
    """Tokens whose logits exist at a time."""
    compute_bytes: int = 2
    """Of an element of activations and gathered weights (bytes)."""
    checkpointing: Literal["none", "full", "selective"] = "none"
    reshard_after_forward: bool = True
    sums_nll: bool = True
    """Whether the loss is a plain sum, as mitigations that only drop labels leave it."""
    has_mask: bool = True
    """Whether attention reads a mask of all pairs of tokens, as on CPUs and in fp32. Flash
    attention reads where documents end, and does not repeat keys and values."""
    is_compiled: bool = False
    """Whether torch.compile fuses element-wise work."""
    adapter: AdapterSizes | None = None
    """Adapters that are trained instead of the weights; None trains the weights."""

    @property
    def wide_bytes(self) -> int:
        """Of an element of statistics, logits and reduced gradients (bytes)."""
        return max(4, self.compute_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTraffic:
    """The collectives of one micro-batch, and of the update, part by part.

    Collectives over one rank are included. Those over data run only in the last micro-batch.
    """

    block: tuple[Collective, ...]
    """Of one decoder block, over x and y."""
    block_storage: tuple[Collective, ...]
    """Of one decoder block, over z and data."""
    ends: tuple[Collective, ...]
    """Of embedding, last norm and head, over x and y."""
    end_storage: tuple[tuple[Collective, ...], ...]
    """Of each other unit of storage, over z and data; the embedding's first."""
    update: tuple[Collective, ...]
    """Of all ranks, once a step."""


def split_collectives(sizes: ModelSizes, mesh: MeshShape, settings: StepSettings) -> StepTraffic:
    """Return the collectives of each part of a step.

    Args:
        sizes: of the model.
        mesh: one that `check_mesh` accepts.
        settings: of the step.
    """
    step = _Step(sizes, mesh, settings)
    return StepTraffic(
        block=tuple(step.block()),
        block_storage=tuple(step.block_storage()),
        ends=tuple(step.ends()),
        end_storage=tuple(tuple(unit) for unit in step.end_storage()),
        update=tuple(step.update()),
    )


def list_collectives(
    sizes: ModelSizes, mesh: MeshShape, settings: StepSettings
) -> list[Collective]:
    """Return all collectives of one optimizer step between two ranks or more.

    Args:
        sizes: of the model.
        mesh: one that `check_mesh` accepts.
        settings: of the step.
    """
    parts = split_collectives(sizes, mesh, settings)
    blocks = [_repeat(call, sizes.num_layers) for call in (*parts.block, *parts.block_storage)]
    if settings.adapter is not None:
        # The frozen embedding needs no gradient, nor does the input of the first block.
        blocks = [
            replace(call, num_calls=call.num_calls - 1) if call.what in _OF_BLOCK_INPUT else call
            for call in blocks
        ]
    micro_batch = [*blocks, *parts.ends, *(call for unit in parts.end_storage for call in unit)]
    times = settings.num_micro_batches
    # Only complete gradients go over data.
    whole = [call if call.axis == "data" else _repeat(call, times) for call in micro_batch]
    return [call for call in (*whole, *parts.update) if call.degree > 1]


def sum_by_axis(collectives: Iterable[Collective]) -> dict[TrafficAxis, tuple[int, int, float]]:
    """Return number of calls, payload (bytes) and ring traffic (bytes) of each axis."""
    totals: dict[TrafficAxis, tuple[int, int, float]] = {}
    for each in collectives:
        calls, payload, ring = totals.get(each.axis, (0, 0, 0.0))
        totals[each.axis] = (
            calls + each.num_calls,
            payload + each.payload_bytes,
            ring + each.ring_bytes,
        )
    return totals


_DOWN = "down_proj"
_INPUTS = "gradients of the inputs of q|k|v, of gate|up"
_STATISTICS = "gradients of statistics"
_OF_BLOCK_INPUT = (_INPUTS, _STATISTICS)
"""Of two calls in a block's backward, the second is for the gradient of the block's input."""


def _repeat(collective: Collective, times: int) -> Collective:
    return replace(collective, num_calls=collective.num_calls * times)


class _Step:
    """One micro-batch and the update, part by part; axes of one rank are still in it."""

    def __init__(self, sizes: ModelSizes, mesh: MeshShape, settings: StepSettings) -> None:
        self.sizes, self.mesh, self.settings = sizes, mesh, settings
        self.degrees: dict[TrafficAxis, int] = {
            "data": mesh.data,
            "z": mesh.z,
            "y": mesh.y,
            "x": mesh.x,
            "kv_replicas": max(1, mesh.x // sizes.num_kv_heads),
            "world": mesh.num_ranks,
        }
        # What this rank has of each.
        self.features = sizes.hidden_size // mesh.y
        self.queries = sizes.num_heads * sizes.head_dim // mesh.x
        self.keys = sizes.num_kv_heads * sizes.head_dim // mesh.x
        self.width = sizes.intermediate_size // mesh.x
        self.vocab = -(-sizes.vocab_size // mesh.x)

    def _call(
        self,
        phase: Phase,
        axis: TrafficAxis,
        what: str,
        num_calls: int,
        num_bytes: int,
        operation: Operation = "all_reduce",
        behind: tuple[LayerGroup, ...] = (),
    ) -> Collective:
        return Collective(
            axis=axis,
            operation=operation,
            what=what,
            phase=phase,
            degree=self.degrees[axis],
            num_calls=num_calls,
            num_bytes=num_bytes,
            behind=behind,
        )

    def block(self) -> list[Collective]:
        """Return what a decoder block sends over x and y."""
        settings, call = self.settings, self._call
        activations = settings.num_tokens * settings.compute_bytes
        features, queries = activations * self.features, activations * self.queries
        qkv, width = queries + 2 * activations * self.keys, activations * self.width
        heads = activations * self.keys * self.degrees["kv_replicas"]
        statistics = settings.num_tokens * settings.wide_bytes
        forward = [
            call("forward", "y", "statistics of norms", 2, statistics),
            call("forward", "y", "outputs of q|k|v", 1, qkv),
            call("forward", "kv_replicas", "keys, values", 2, heads, "all_gather"),
            call("forward", "x", "output of o", 1, features),
            call("forward", "y", "outputs of gate|up", 1, 2 * width),
            call("forward", "x", "output of down", 1, features),
        ]
        norms = self._row_norms()
        # Recomputation ends at the last tensor that backward needs: the input of down, or its
        # output if DoRA multiplies it.
        scales_down = any(call.what.endswith(_DOWN) for call in norms)
        forward = [*norms, *forward]
        again = [
            replace(each, phase="backward", what=f"{each.what}, again")
            for each in (forward if scales_down else forward[:-1])
            if settings.checkpointing == "full"
        ]
        backward = [
            call("backward", "x", _INPUTS, 2, features, behind=("q|k|v", "gate|up")),
            call("backward", "y", "gradient of the input of o", 1, queries, behind=("o",)),
            call("backward", "y", "gradient of the input of down", 1, width, behind=("down",)),
            call("backward", "y", _STATISTICS, 2, statistics),
            call("backward", "kv_replicas", "their gradients", 2, heads, "reduce_scatter"),
        ]
        if self.sizes.has_head_norms and settings.adapter is None:
            num_bytes = self.sizes.head_dim * settings.compute_bytes
            backward.append(call("backward", "x", "gradients of head norms", 2, num_bytes))
        return [*forward, *again, *backward]

    def _row_norms(self) -> list[Collective]:
        """Return what DoRA sends for the norms of its layers' rows."""
        adapter = self.settings.adapter
        if adapter is None or not adapter.use_dora:
            return []
        return [
            self._call(
                "forward",
                layer.in_axis,
                f"norms of the rows of {layer.name}",
                1,
                layer.outs * ADAPTER_BYTES,
            )
            for layer in list_adapted(self.sizes, self.mesh, adapter)
        ]

    def ends(self) -> list[Collective]:
        """Return what embedding, final norm and head send over x and y."""
        settings, call = self.settings, self._call
        embedded = settings.num_tokens * settings.compute_bytes * self.features
        statistics = settings.num_tokens * settings.wide_bytes
        found = [
            call("forward", "x", "embeddings", 1, embedded),
            call("forward", "y", "statistics of the last norm", 1, statistics),
            call("backward", "y", "gradient of its statistics", 1, statistics),
        ]
        full, rest = divmod(settings.num_labels, settings.chunk_tokens)
        for num_chunks, tokens in ((full, settings.chunk_tokens), (1, rest)):
            if num_chunks and tokens:
                found += self._head(num_chunks, tokens)
        return found

    def _head(self, num_chunks: int, tokens: int) -> list[Collective]:
        """Return what the head sends for some chunks of so many tokens."""
        settings, call = self.settings, self._call
        logits = tokens * settings.compute_bytes * self.vocab
        hidden = tokens * settings.compute_bytes * self.features
        statistic = tokens * settings.wide_bytes
        if settings.sums_nll:
            return [
                call("forward", "y", "logits", num_chunks, logits),
                call("forward", "x", "largest logits", num_chunks, statistic),
                call("forward", "x", "sums over the vocabulary", num_chunks, 2 * statistic),
                call("forward", "x", "gradient of the head's input", num_chunks, hidden),
            ]
        return [
            call("forward", "y", "logits", num_chunks, logits),
            call("forward", "x", "largest logits", num_chunks, statistic),
            call("forward", "x", "sums over the vocabulary", num_chunks, 4 * statistic),
            call("backward", "y", "logits, again", num_chunks, logits),
            call("backward", "x", "gradient of the head's input", num_chunks, hidden),
        ]

    def block_storage(self) -> list[Collective]:
        """Return what the weights of a decoder block send over z and data."""
        unit = block_unit(self.sizes, self.mesh)
        return self._unit(unit, is_freed=self.settings.reshard_after_forward)

    def end_storage(self) -> list[list[Collective]]:
        """Return what the weights of embedding, head and last norm send over z and data."""
        # Backward does not read the embedding, and starts with the others.
        return [self._unit(unit, is_freed=False) for unit in other_units(self.sizes, self.mesh)]

    def _unit(self, unit: Unit, *, is_freed: bool) -> list[Collective]:
        """Return what one unit of storage sends; ``is_freed``: backward gathers it again."""
        settings, call, what = self.settings, self._call, unit.name
        weights = unit.gathered * settings.compute_bytes
        found = [call("forward", "z", f"weights of {what}", 1, weights, "all_gather")]
        if is_freed:
            found.append(
                call("backward", "z", f"weights of {what}, again", 1, weights, "all_gather")
            )
        if settings.adapter is not None:
            return found
        wide = settings.wide_bytes
        return [
            *found,
            call(
                "backward", "z", f"gradients of {what}", 1, unit.gathered * wide, "reduce_scatter"
            ),
            call("backward", "data", f"gradients of {what}", 1, unit.stored * wide),
        ]

    def update(self) -> list[Collective]:
        """Return what is sent once a step: gradients of copies, sums for the host, their norm."""
        call, sizes, copied = self._call, self.sizes, list[int]()
        if self.settings.adapter is not None:
            return [*self._adapters(self.settings.adapter), *self._agreed()]
        if sizes.has_qkv_bias:
            copied += [self.queries, self.keys, self.keys]
        if sizes.has_mlp_bias:
            copied += [self.width] * 2
        if sizes.has_head_norms:
            copied += [sizes.head_dim] * 2
        # In float64.
        num_bytes = 8 * sizes.num_layers * sum(-(-length // self.mesh.z) for length in copied)
        averages = [call("update", "y", "gradients of biases and head norms", 1, num_bytes)]
        return [
            *(averages if copied else []),
            *self._agreed(),
        ]

    def _agreed(self) -> list[Collective]:
        """Return what all ranks agree on."""
        call = self._call
        return [
            # Five numbers in float64: loss, two counts, two signals.
            call("update", "world", "loss, labels of the next step, requests to stop", 1, 40),
            call("update", "world", "gradient norm", 1, self.settings.wide_bytes),
        ]

    def _adapters(self, adapter: AdapterSizes) -> list[Collective]:
        """Return what the gradients of adapters send once a step."""
        call, layers = self._call, list_adapted(self.sizes, self.mesh, adapter)
        num_layers = self.sizes.num_layers
        partial = {"y": 0, "x": 0}
        for layer in layers:
            partial[layer.out_axis] += adapter.r * layer.ins
            partial[layer.in_axis] += adapter.r * layer.outs
        what = "gradients of adapters"
        calls = [
            call("update", axis, what, 1, ADAPTER_BYTES * num_layers * partial[axis])
            for axis in ("y", "x")
        ]
        whole = ADAPTER_BYTES * count_elements(self.sizes, self.mesh, adapter)
        calls += [call("update", axis, what, 1, whole) for axis in ("z", "data")]
        if adapter.use_dora:
            # In float64; those of other layers are equal along x only.
            copied = sum(layer.outs for layer in layers if layer.in_axis == "y")
            what = "gradients of magnitudes"
            calls.append(call("update", "y", what, 1, 8 * num_layers * copied))
        return calls
