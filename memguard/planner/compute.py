"""Rough estimate of the computing time of a step on one rank, without communication.

    a matmul      max(2 M N K / (peak x the machine's matmul_share),
                      a (MN + NK + KM) / (memory bandwidth x MEMORY_SHARE)) + KERNEL_S,
                  which is the product alone, / MATMUL_SHARE
    attention     4 t Q (T+1)/2 operations in forward, 2.5 of it in backward, which computes the
                  scores again, at peak x the machine's attention_share x CURVE at rows of T tokens,
                  which is attention alone, x ATTENTION_SHARE. Without flash attention each head
                  also reads a mask of a row's T (T+1)/2 pairs
    element-wise  bytes that its kernels read and write / (memory bandwidth x ELEMENT_SHARE)
    storage       bytes that FSDP2 copies in and out of its buffers, and that the update moves

Elements that are read and written for a token in forward, twice as many in backward:

                                            compiled    separate kernels
    two norms and residuals, F features         8            14; split over y, or plain modules: 42
    rotary embedding, Q queries and K keys      2            10
    SwiGLU, width W                             3             5

Separate kernels are counted from the code: torch's norm and its weight (2 + 2), or the eight
kernels of a norm of which a rank has a part, in fp32 (18); a residual (3); q cos + rotate(q) sin
(10).

Frozen weights have no weight gradient, and blocks that backward does not reach run forward only.
Each adapter adds two matmuls in forward, two for the input gradient and two for its own. Weights in
NF4 are dequantised in every pass: read in 4.5 bits, written in the precision of the run.

MEMORY_SHARE and KERNEL_S were fitted to 375 bf16 products that XLA's developers measured on an
H100, M, N and K between 256 and 4,096 and batches of 1, 2 and 4 (XLA_TABLE): the median error is
5 %, nine of ten are within 14 %. A product is as fast as the larger of its two bounds; KERNEL_S,
which products with a side of some hundred consist of, is the ramp of a kernel at its begin and end.

The curves are of FlashAttention-2 on an H100, causal, heads of 128 features: forward from figure 5
of arXiv 2407.08608, forward and backward together from figure 7 of arXiv 2307.08691, both as
printed above the bars; backward is what remains of the second when the first is taken away, with
the papers' counts of operations (2 and 5 matmuls, of which causal rows need half). On an A100 the
curve of forward and backward together (figure 4 of arXiv 2307.08691) has the same form within 5 %,
1.8 times as high: that is ``attention_share``.

The other three shares are fitted, with cost.OVERLAP_SHARE, to 35 of 70 published runs on H100s
(scripts/bench/published.py, which has the other half and the sources): MATMUL_SHARE and
ATTENTION_SHARE are what is lost against the same kernel alone on a cool GPU. Everything else is
counted from the modules' code, at nominal peak and nominal bandwidth.

Assumed are that the shares hold for every GPU, and that nothing but matmuls overlaps with memory
traffic.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.machine import Machine
from memguard.planner.parameters import (
    NF4_BLOCK,
    NF4_BLOCK_BYTES,
    RankSizes,
    TrainedPart,
    block_unit,
    find_trained,
)
from memguard.planner.step_settings import StepOptions, StepSettings
from memguard.planner.traffic import LayerGroup

MEMORY_SHARE = 0.9
"""Share of the nominal bandwidth at which a matmul reads and writes its matrices."""

KERNEL_S = 5.6e-6
"""Time that a matmul takes however small it is (seconds)."""

XLA_TABLE = (
    "https://github.com/openxla/xla/blob/main/xla/service/gpu/model/matmul_interpolator_data.h"
)

_ROWS = (512, 1024, 2048, 4096, 8192, 16384)
# TFLOP/s, as printed.
_FORWARD = (191, 260, 298, 319, 333, 335)
_TOGETHER = (163, 221, 265, 294, 308, 328)
_FORWARD_MATMULS, _BACKWARD_MATMULS = 2, 5
BACKWARD_OPERATIONS = _BACKWARD_MATMULS / _FORWARD_MATMULS
"""Operations of attention's backward, relative to its forward."""


def count_token_flops(sizes: ModelSizes, work: StepOptions) -> tuple[int, int, int]:
    """Return the FLOP of a step's matmuls a token, a pair of tokens that attend, and a label.

    2 a weight in forward, as many for the gradient of its input in blocks that backward reaches,
    and for that of the weight if it is trained.
    """
    part = find_trained(sizes, MeshShape(), work.adapter, work.trained_modules)
    rank, r = RankSizes.of(sizes, MeshShape()), 0 if work.adapter is None else work.adapter.r
    linear = sum(outs * ins for outs, ins in rank.list_linear().values())
    token = linear * (len(part.blocks) + part.num_reached)
    for block in part.blocks:
        token += 3 * sum(r * (layer.ins + layer.outs) for layer in block.adapted)
        weights = zip(block.unit.parameters, block.unit.shapes, strict=True)
        token += sum(rows * ins for name, (rows, ins) in weights if name.endswith("_proj.weight"))
    pair = 2 * rank.queries * (len(part.blocks) + 2 * part.num_reached)
    return 2 * token, 2 * pair, 2 * rank.features * rank.vocab * (2 + part.has_head)


def time_matmul(
    rows: int, outs: int, ins: int, *, element_bytes: int, flops_per_s: float, bytes_per_s: float
) -> float:
    """Return the time of one product of [rows, ins] and [ins, outs] (seconds).

    ``flops_per_s`` is what the largest products reach, ``bytes_per_s`` nominal.
    """
    num_bytes = element_bytes * (rows * outs + outs * ins + ins * rows)
    compute_s = 2 * rows * outs * ins / flops_per_s
    return max(compute_s, num_bytes / (bytes_per_s * MEMORY_SHARE)) + KERNEL_S


def attention_curve(seq_len: int, *, is_backward: bool) -> float:
    """Return the speed of attention over rows of this length, relative to the longest ones.

    1 is the speed of forward and backward together over rows of 16,384 tokens. Between the measured
    lengths the curve is linear in their logarithm; outside it is that of the nearest.
    """
    speeds = [_backward_speed(i) if is_backward else _FORWARD[i] for i in range(len(_ROWS))]
    clamped = min(max(seq_len, _ROWS[0]), _ROWS[-1])
    upper = min(bisect_right(_ROWS, clamped), len(_ROWS) - 1)
    lower = upper - 1
    share = math.log2(clamped / _ROWS[lower]) / math.log2(_ROWS[upper] / _ROWS[lower])
    return (speeds[lower] + share * (speeds[upper] - speeds[lower])) / _TOGETHER[-1]


def _backward_speed(index: int) -> float:
    """Return the speed of backward alone (TFLOP/s): all operations' time less that of forward."""
    together_s = (_FORWARD_MATMULS + _BACKWARD_MATMULS) / _TOGETHER[index]
    return _BACKWARD_MATMULS / (together_s - _FORWARD_MATMULS / _FORWARD[index])


MATMUL_SHARE = 0.85
"""Speed of matmuls in a training step, relative to the same product alone. Fitted."""

ATTENTION_SHARE = 0.54
"""Speed of attention in a training step, relative to the same kernel alone. Fitted."""

ELEMENT_SHARE = 0.41
"""Share of the nominal bandwidth that element-wise work reaches. Fitted."""

_COMPILED_ELEMENTS = (8, 2, 3)
_SEPARATE_ELEMENTS = (14, 10, 5)
_SPLIT_NORM_ELEMENTS = 42
# Of a logit and its gradient, in `sum_nll`: casts, maximum, exponential, sum, difference.
_LOGIT_PASSES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTimes:
    """Computing time of one decoder block for one micro-batch (seconds)."""

    forward_s: float
    again_s: float
    """What checkpointing computes again in backward."""
    backward_s: float
    """Without what is computed again."""
    weight_gradients_s: dict[LayerGroup, float]
    """The part of backward that runs while the group's input gradients are reduced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeTimes:
    """Computing time of a step on one rank, part by part (seconds)."""

    block: BlockTimes
    """Of a block that is trained."""
    num_reached: int
    """Blocks that backward reaches."""
    ends_s: float
    """Head and losses of one micro-batch, forward and backward."""
    update_s: float
    """Clipping and the update, once a step."""


def estimate_compute(
    sizes: ModelSizes, mesh: MeshShape, settings: StepSettings, machine: Machine, *, seq_len: int
) -> ComputeTimes:
    """Estimate the computing time of one rank.

    A token attends to (seq_len + 1) / 2 others: causal attention over whole rows. Rows packed with
    shorter documents cost less, equally on every mesh. Heads are split over x only, so every rank
    along y computes their attention.
    """
    part = find_trained(sizes, mesh, settings.adapter, settings.trained_modules)
    rank = _Rank(sizes, mesh, settings, machine, part)
    moved = 2 * settings.weight_bytes + 3 * settings.gradient_bytes
    return ComputeTimes(
        block=rank.block(seq_len),
        num_reached=part.num_reached,
        ends_s=rank.ends(),
        update_s=rank.move(part.stored * moved + 2 * part.count_state(settings.facts, mesh)),
    )


_GROUPS: dict[str, LayerGroup] = {
    "q_proj": "q|k|v",
    "k_proj": "q|k|v",
    "v_proj": "q|k|v",
    "o_proj": "o",
    "gate_proj": "gate|up",
    "up_proj": "gate|up",
    "down_proj": "down",
}


class _Rank:
    """Sizes of one rank and speeds of its GPU."""

    def __init__(
        self,
        sizes: ModelSizes,
        mesh: MeshShape,
        settings: StepSettings,
        machine: Machine,
        part: TrainedPart,
    ) -> None:
        self.sizes, self.mesh, self.settings = sizes, mesh, settings
        self.part, self.typical = part, part.typical
        self.is_nf4 = settings.adapter is not None and settings.adapter.is_nf4
        self.machine = machine
        self.peak = machine.peak_flops(settings.compute_bytes)
        self.bytes_per_s = machine.memory_gb_per_s * 1e9
        self.rank = RankSizes.of(sizes, mesh)

    def matmuls(self, num_rows: int, shapes: Sequence[tuple[int, int]]) -> float:
        """Return the time of matmuls of rows with weights of these shapes (seconds)."""
        alone_s = sum(
            time_matmul(
                num_rows,
                outs,
                ins,
                element_bytes=self.settings.compute_bytes,
                flops_per_s=self.peak * self.machine.matmul_share,
                bytes_per_s=self.bytes_per_s,
            )
            for outs, ins in shapes
        )
        return alone_s / MATMUL_SHARE

    def attention(self, seq_len: int, *, is_backward: bool) -> float:
        """Return the time of attention of a block (seconds), without the mask it may read."""
        operations = 4 * self.settings.num_tokens * self.rank.queries * (seq_len + 1) / 2
        operations *= BACKWARD_OPERATIONS if is_backward else 1.0
        curve = attention_curve(seq_len, is_backward=is_backward)
        share = self.machine.attention_share * curve * ATTENTION_SHARE
        return operations / (self.peak * share)

    def move(self, num_bytes: float) -> float:
        """Return the time to read or write this many bytes of GPU memory (seconds)."""
        return num_bytes / self.bytes_per_s

    def block(self, seq_len: int) -> BlockTimes:
        """Return the time of one decoder block."""
        settings, tokens, a = self.settings, self.settings.num_tokens, self.settings.compute_bytes
        rank = self.rank
        groups = dict.fromkeys(_GROUPS.values(), 0.0)
        weight_gradients = self.adapters()
        adapters = dict(weight_gradients)
        for path, shape in rank.list_linear().items():
            name = path.rpartition(".")[2]
            matmul = self.matmuls(tokens, [shape])
            groups[_GROUPS[name]] += matmul
            if name in self.typical.learns and not self.typical.adapted:
                weight_gradients[_GROUPS[name]] += matmul
        attention = self.attention(seq_len, is_backward=False)
        attention_back = self.attention(seq_len, is_backward=True)
        if settings.has_mask:
            heads = rank.queries // self.sizes.head_dim
            mask = self.move(a * heads * tokens * (seq_len + 1) / 2)
            attention += mask
            attention_back += BACKWARD_OPERATIONS * mask
        other = self.move(a * tokens * self.count_elements()) / ELEMENT_SHARE
        unit = block_unit(self.sizes, self.mesh, is_nf4=self.is_nf4)
        gather = reduce = 0.0
        if self.mesh.z > 1:
            gather = self.move(2 * unit.gathered_bytes(a))
            reduce = self.move((a + settings.wide_bytes) * self.typical.unit.gathered)
        linear = sum(groups.values()) + sum(adapters.values()) + self.dequantise()
        forward = linear + attention + other
        again = {
            "none": 0.0,
            # Recomputation ends at the last tensor that backward needs, the input of down.
            "full": forward - (0.0 if adapters["down"] else groups["down"]),
            # The outputs of matmuls and attention are kept.
            "selective": other,
        }[settings.checkpointing]
        backward = linear + sum(weight_gradients.values())
        backward += attention_back + 2 * other
        return BlockTimes(
            forward_s=forward + gather,
            again_s=again,
            backward_s=backward + reduce + (gather if settings.reshard_after_forward else 0.0),
            weight_gradients_s=weight_gradients,
        )

    def count_elements(self) -> int:
        """Return the elements that element-wise work of a block moves for a token in forward."""
        norms, rotary, swiglu = _COMPILED_ELEMENTS
        if not self.settings.is_compiled:
            norms, rotary, swiglu = _SEPARATE_ELEMENTS
            # A part of the features needs a collective, plain modules are transformers' own.
            norms = _SPLIT_NORM_ELEMENTS if self.mesh.y > 1 or self.mesh.num_ranks == 1 else norms
        rank = self.rank
        return norms * rank.features + rotary * (rank.queries + rank.keys) + swiglu * rank.width

    def dequantise(self) -> float:
        """Return the time to dequantise the weights of a block once; 0 if they are not in NF4."""
        if not self.is_nf4:
            return 0.0
        num_weights = sum(outs * ins for outs, ins in self.rank.list_linear().values())
        bytes_each = NF4_BLOCK_BYTES / NF4_BLOCK + self.settings.compute_bytes
        return self.move(num_weights * bytes_each)

    def adapters(self) -> dict[LayerGroup, float]:
        """Return the time of one pass of the adapters of each group."""
        adapter, tokens = self.settings.adapter, self.settings.num_tokens
        times = dict.fromkeys(_GROUPS.values(), 0.0)
        for layer in self.typical.adapted:
            assert adapter is not None, "layers are adapted by an adapter"
            shapes = [(adapter.r, layer.ins), (layer.outs, adapter.r)]
            times[_GROUPS[layer.name]] += self.matmuls(tokens, shapes)
        return times

    def ends(self) -> float:
        """Return the time of head and losses, with their backward."""
        settings = self.settings
        # Per-label losses compute the logits again in backward.
        num_matmuls = 3 if settings.sums_nll else 4
        num_matmuls -= not self.part.has_head
        rows = min(settings.num_labels, settings.chunk_tokens)
        chunk = num_matmuls * self.matmuls(rows, [(self.rank.vocab, self.rank.features)])
        logits = settings.num_labels * self.rank.vocab
        losses = self.move(_LOGIT_PASSES * settings.wide_bytes * logits)
        return chunk * settings.num_labels / rows + losses
