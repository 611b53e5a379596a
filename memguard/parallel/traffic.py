"""What one training step sends: every collective, by axis, as arithmetic.

The formula is in the package's docstring. Bytes are a collective's payload, the larger of its two
buffers, whole: what an all-reduce reduces, what an all-gather results in, what a reduce-scatter is
given. Around a ring of R ranks each rank sends and receives

    all-reduce       2 (R-1)/R  of it          all-gather, reduce-scatter    (R-1)/R  of it

Where pieces are uneven (the vocabulary over x, weights over z) it is rank 0's, the largest.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from memguard.config import TrainConfig
from memguard.parallel.mesh_shape import MeshShape, ModelSizes

Operation = Literal["all_reduce", "all_gather", "reduce_scatter"]
Phase = Literal["forward", "backward", "update"]
TrafficAxis = Literal["data", "z", "y", "x", "kv_replicas", "world"]
"""``kv_replicas``: those ranks along x that share a key/value head; ``world``: all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """The same collective, some number of times."""

    axis: TrafficAxis
    degree: int
    """Ranks that take part."""
    operation: Operation
    phase: Phase
    what: str
    """What is sent, in a word or two."""
    num_bytes: int
    """Payload of one call (bytes)."""
    num_calls: int = 1

    @property
    def payload_bytes(self) -> int:
        """Payload of all calls (bytes)."""
        return self.num_calls * self.num_bytes

    @property
    def ring_bytes(self) -> Fraction:
        """Bytes that a rank sends, and receives, in all calls where they go around a ring."""
        passes = 2 if self.operation == "all_reduce" else 1
        return self.payload_bytes * Fraction(passes * (self.degree - 1), self.degree)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """What of a step, beside model and mesh, decides what is sent. Sizes are of one rank."""

    num_tokens: int
    """Tokens of a micro-batch, padding included."""
    num_labels: int
    """Labels of a micro-batch that receive loss."""
    num_micro_batches: int = 1
    chunk_tokens: int = 4096
    """Tokens whose logits exist at a time."""
    compute_bytes: int = 2
    """Of one activation or gathered weight; sums of many are kept in 4 bytes or more."""
    checkpointing: Literal["none", "full", "selective"] = "none"
    reshard_after_forward: bool = True
    sums_nll: bool = True
    """Whether the loss is a plain sum, as mitigations that only mask labels have it."""
    is_tied: bool = False
    """Whether head and embedding are one parameter."""
    has_qkv_bias: bool = False
    has_head_norms: bool = False
    """Whether queries and keys are normalised head by head."""

    @property
    def wide_bytes(self) -> int:
        """Bytes of one element of a statistic, or of a gradient that is reduced."""
        return max(4, self.compute_bytes)

    @classmethod
    def from_train(
        cls, train: TrainConfig, mesh: MeshShape, *, seq_len: int, reshard_after_forward: bool
    ) -> "StepSettings":
        """Read the settings of full rows, of whose tokens all but the first are labels."""
        num_rows = math.ceil(train.batch_size / mesh.num_batch_ways)
        micro_rows = min(train.micro_batch_size or num_rows, num_rows)
        return cls(
            num_tokens=micro_rows * seq_len,
            num_labels=micro_rows * (seq_len - 1),
            num_micro_batches=math.ceil(num_rows / micro_rows),
            chunk_tokens=train.nll_chunk_tokens,
            compute_bytes=2 if train.precision == "bf16" else 4,
            checkpointing=train.activation_checkpointing,
            reshard_after_forward=reshard_after_forward,
        )


def list_collectives(
    sizes: ModelSizes, mesh: MeshShape, settings: StepSettings
) -> list[Collective]:
    """Return every collective of one optimizer step, as rank 0 calls them.

    Args:
        sizes: of the model.
        mesh: that `check_mesh` has accepted.
        settings: of the step.
    """
    block = [*_block(sizes, mesh, settings), *_unit(mesh, settings, _block_shapes(sizes, mesh, settings))]
    once = [*_ends(sizes, mesh, settings), *_end_units(sizes, mesh, settings)]
    repeated = [*(replace(each, num_calls=each.num_calls * sizes.num_layers) for each in block), *once]
    micro_batches = [
        # Gradients cross the data axis when they are complete.
        each
        if each.axis == "data"
        else replace(each, num_calls=each.num_calls * settings.num_micro_batches)
        for each in repeated
    ]
    return [*micro_batches, *_update(mesh, settings)]


def list_block_collectives(
    sizes: ModelSizes, mesh: MeshShape, settings: StepSettings
) -> list[Collective]:
    """Return those over x and y of one decoder block in one micro-batch."""
    return list(_block(sizes, mesh, settings))


def sum_payload_bytes(collectives: Iterable[Collective]) -> dict[TrafficAxis, int]:
    """Return the payload by axis (bytes)."""
    return _sum_by_axis(collectives, lambda each: each.payload_bytes)


def sum_ring_bytes(collectives: Iterable[Collective]) -> dict[TrafficAxis, float]:
    """Return the bytes that a rank sends around rings, by axis."""
    return _sum_by_axis(collectives, lambda each: float(each.ring_bytes))
