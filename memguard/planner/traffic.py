"""Computes the communication of one training step: every collective, by axis.

The formula is in the docstring of `memguard.parallel`. Bytes are a collective's payload, the larger
of its two buffers: what an all-reduce reduces, what an all-gather results in, what a reduce-scatter
is given. Around a ring of R ranks each of them sends

    all-reduce  2 (R-1)/R of it        all-gather, reduce-scatter  (R-1)/R of it

Where ranks along x store parts of a block's input (`stores_parts`), backward gathers it over x: an
all-gather of [t, F] elements, t rounded up to a multiple of the ranks, for each block and
micro-batch.

Gradients of frozen weights are not sent, and blocks that backward does not reach gather their
weights once. Weights in NF4 are gathered as they are stored (`parameters`). Gradients of adapters
are summed once a step (`memguard.parallel.lora`), in fp32: each factor over the axis over which it
is partial, then all of them over z and data.

Where shards are uneven (vocabulary over x, weights over z) sizes are rank 0's, the largest.
"""

from dataclasses import dataclass, replace
from typing import Literal

from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.parameters import RankSizes, Unit, block_unit, find_trained, other_units
from memguard.planner.step_settings import (
    ADAPTER_BYTES,
    AdapterSizes,
    StepSettings,
    count_part,
    stores_parts,
)

Operation = Literal["all_reduce", "all_gather", "reduce_scatter"]
Phase = Literal["forward", "backward", "update"]
TrafficAxis = Literal["data", "z", "y", "x", "kv_replicas", "world"]
"""``kv_replicas``: those ranks along x that share a key/value head; ``world``: all ranks."""
LayerGroup = Literal["q|k|v", "o", "gate|up", "down"]
"""Linear layers of a decoder block that read the same input."""


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


_DOWN = "down_proj"
_INPUTS = "gradients of the inputs of q|k|v, of gate|up"
_STATISTICS = "gradients of statistics"
_COPIED = (
    *("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    *("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    *("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
)
"""Parameters of which all ranks along y have a copy and compute the gradient."""


class StepTraffic:
    """The collectives of one micro-batch, and of the update, part by part.

    Collectives over one rank are included. Those over data run only in the last micro-batch.
    """

    def __init__(self, sizes: ModelSizes, mesh: MeshShape, settings: StepSettings) -> None:
        self.sizes, self.mesh, self.settings = sizes, mesh, settings
        self.part = find_trained(sizes, mesh, settings.adapter, settings.trained_modules)
        self.first = self.part.first
        typical = self.part.typical
        self.typical = next(i for i, block in enumerate(self.part.blocks) if block is typical)
        self.degrees: dict[TrafficAxis, int] = {
            "data": mesh.data,
            "z": mesh.z,
            "y": mesh.y,
            "x": mesh.x,
            "kv_replicas": max(1, mesh.x // sizes.num_kv_heads),
            "world": mesh.num_ranks,
        }
        # What this rank has of each.
        rank = RankSizes.of(sizes, mesh)
        self.features, self.queries, self.keys = rank.features, rank.queries, rank.keys
        self.width, self.vocab = rank.width, rank.vocab

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

    def block(self, number: int, *, is_whole: bool = True) -> list[Collective]:
        """Return what a decoder block sends over x and y.

        ``is_whole`` counts the backward of a block behind which there are others; else that of this
        block, which may be the last that backward reaches.
        """
        settings, call, trained = self.settings, self._call, self.part.blocks[number]
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
        norms = [
            call(
                "forward",
                layer.in_axis,
                f"norms of the rows of {layer.name}",
                1,
                layer.outs * ADAPTER_BYTES,
            )
            for layer in trained.adapted
            if settings.adapter is not None and settings.adapter.use_dora
        ]
        # Recomputation ends at the last tensor that backward needs: the input of down, or its
        # output if DoRA multiplies it.
        scales_down = any(call.what.endswith(_DOWN) for call in norms)
        forward = [*norms, *forward]
        if not is_whole and number < self.first:
            return forward
        again = [
            replace(each, phase="backward", what=f"{each.what}, again")
            for each in (forward if scales_down else forward[:-1])
            if settings.checkpointing == "full"
        ]
        if stores_parts(self.mesh, settings):
            gathered = self.mesh.x * count_part(self.mesh, settings)
            num_bytes = gathered * settings.compute_bytes * self.features
            # Before it is computed again: nothing can be computed at the same time.
            again.append(
                call("backward", "x", "input, stored in parts", 1, num_bytes, "all_gather")
            )
        # Of two calls the second is for the gradient of the block's input, which the last block
        # that backward reaches does not need, unless the embedding is trained.
        inner = 1 if not is_whole and number == self.first and not self.part.has_embedding else 2
        groups: tuple[LayerGroup, ...] = ("q|k|v", "gate|up")
        backward = [
            call("backward", "x", _INPUTS, inner, features, behind=groups[-inner:]),
            call("backward", "y", "gradient of the input of o", 1, queries, behind=("o",)),
            call("backward", "y", "gradient of the input of down", 1, width, behind=("down",)),
            call("backward", "y", _STATISTICS, inner, statistics),
            call("backward", "kv_replicas", "their gradients", 2, heads, "reduce_scatter"),
        ]
        norms_trained = sum(name in _COPIED[-2:] for name in trained.unit.parameters)
        if norms_trained:
            num_bytes = self.sizes.head_dim * settings.compute_bytes
            what = "gradients of head norms"
            backward.append(call("backward", "x", what, norms_trained, num_bytes))
        return [*forward, *again, *backward]

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
        num_sums = 2 if settings.sums_nll else 4
        phase: Phase = "forward" if settings.sums_nll else "backward"
        again = call("backward", "y", "logits, again", num_chunks, logits)
        return [
            call("forward", "y", "logits", num_chunks, logits),
            call("forward", "x", "largest logits", num_chunks, statistic),
            call("forward", "x", "sums over the vocabulary", num_chunks, num_sums * statistic),
            *([] if settings.sums_nll else [again]),
            call(phase, "x", "gradient of the head's input", num_chunks, hidden),
        ]

    def block_storage(self, number: int) -> list[Collective]:
        """Return what the weights of a decoder block send over z and data."""
        adapter = self.settings.adapter
        is_nf4 = adapter is not None and adapter.is_nf4
        unit = block_unit(self.sizes, self.mesh, is_nf4=is_nf4)
        # Backward prefetches the weights of the block before, also of one that it does not reach.
        is_freed = self.settings.reshard_after_forward and number >= self.first - 1
        return self._unit(unit, self.part.blocks[number].unit, is_freed=is_freed)

    def end_storage(self) -> list[list[Collective]]:
        """Return what the weights of embedding, head and last norm send over z and data."""
        # Backward does not read the embedding, and starts with the others.
        units = zip(other_units(self.sizes, self.mesh), self.part.others, strict=True)
        return [self._unit(unit, trained, is_freed=False) for unit, trained in units]

    def _unit(self, unit: Unit, trained: Unit, *, is_freed: bool) -> list[Collective]:
        """Return what one unit of storage sends; ``is_freed``: backward gathers it again."""
        settings, call, what = self.settings, self._call, unit.name
        weights = unit.gathered_bytes(settings.compute_bytes)
        found = [call("forward", "z", f"weights of {what}", 1, weights, "all_gather")]
        if is_freed:
            found.append(
                call("backward", "z", f"weights of {what}, again", 1, weights, "all_gather")
            )
        if not trained.parameters:
            return found
        reduced, own = (count * settings.wide_bytes for count in (trained.gathered, trained.stored))
        return [
            *found,
            call("backward", "z", f"gradients of {what}", 1, reduced, "reduce_scatter"),
            call("backward", "data", f"gradients of {what}", 1, own),
        ]

    def update(self) -> list[Collective]:
        """Return what is sent once a step: gradients of copies, sums for the host, their norm."""
        if self.settings.adapter is not None:
            return [*self._adapters(self.settings.adapter), *self._agreed()]
        copied = sum(
            count * block.unit.only(lambda name: name in _COPIED).stored
            for block, count in self.part.kinds
        )
        # In float64.
        averages = self._call("update", "y", "gradients of biases and head norms", 1, 8 * copied)
        return [*([averages] if copied else []), *self._agreed()]

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
        call = self._call
        layers = [(layer, count) for block, count in self.part.kinds for layer in block.adapted]
        partial = {"y": 0, "x": 0}
        for layer, count in layers:
            partial[layer.out_axis] += count * adapter.r * layer.ins
            partial[layer.in_axis] += count * adapter.r * layer.outs
        what = "gradients of adapters"
        calls = [
            call("update", axis, what, 1, ADAPTER_BYTES * partial[axis]) for axis in ("y", "x")
        ]
        whole = ADAPTER_BYTES * self.part.stored
        calls += [call("update", axis, what, 1, whole) for axis in ("z", "data")]
        if adapter.use_dora:
            # In float64; those of other layers are equal along x only.
            copied = sum(count * layer.outs for layer, count in layers if layer.in_axis == "y")
            what = "gradients of magnitudes"
            calls.append(call("update", "y", what, 1, 8 * copied))
        return calls
