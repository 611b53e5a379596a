"""Rough estimate of the computing time of a step on one rank, without communication.

    a matmul      2 M N K / (peak x MATMUL_SHARE)  +  a (MN + NK + KM) / memory bandwidth
    attention     4 t Q (T+1)/2 operations in forward / (peak x ATTENTION_SHARE); 2.5 of it in
                  backward, which also computes the scores again. Without flash attention each
                  head also reads a mask of the T (T+1)/2 pairs of a row
    element-wise  bytes read and written once / memory bandwidth, x EAGER_PASSES without compile
    storage       bytes that FSDP2 copies in and out of its buffers, and that AdamW reads and writes

The first line is the efficiency curve: a matmul with M, N and K in the thousands reaches nearly
MATMUL_SHARE of the peak, one with a side of a few hundred (small micro-batches, degrees of x and y
that leave little of a weight) is limited by memory and reaches less.

With adapters the weights are frozen: a matmul has no weight gradient. Each adapter adds two matmuls
in forward, two for the input gradient and two for its own.

Origin of the constants (tables and sources: scripts/bench/published.py):

    MATMUL_SHARE      fitted to the published 8B run on 8 H100 with torch.compile
    EAGER_PASSES      fitted to the same run without torch.compile
    ATTENTION_SHARE   published for FlashAttention-2 on H100 (arXiv 2407.08608)
    everything else   counted from the modules' code, at nominal peak and nominal bandwidth

Assumed are that one share holds for every GPU, that nothing but matmuls overlaps with memory
traffic, and that element-wise work reaches the nominal bandwidth. MATMUL_SHARE includes what
collectives that run at the same time take from the matmuls. The GPUs of the fitted runs were
limited to 500 W: at 700 W an H100 is faster than estimated. A100s reach a larger share of their
lower peak: the published runs on A100s are estimated a quarter too slow. A norm that is one kernel
(y = 1) is counted as slow as the separate kernels of the fitted run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from memguard.parallel.mesh_shape import MeshShape, ModelSizes
from memguard.planner.adapters import count_elements, list_adapted
from memguard.planner.machine import Machine
from memguard.planner.traffic import LayerGroup, StepSettings, block_unit, other_units

MATMUL_SHARE = 0.50
"""Share of the nominal peak that a large matmul of a training step reaches. Fitted."""

EAGER_PASSES = 3.6
"""Memory traffic of element-wise work as separate kernels, relative to compiled ones. Fitted."""

ATTENTION_SHARE = 0.35
"""Share of the nominal peak that attention reaches. Published for FlashAttention-2 on H100."""

# A kernel of attention's backward computes five matmuls, forward two.
_ATTENTION_BACKWARD = 2.5
# Of a logit and its gradient, in `sum_nll`: casts, maximum, exponential, sum, difference.
_LOGIT_PASSES = 8
# Of a stored parameter: AdamW reads weight, gradient and two moments and writes three of them;
# clipping reads and writes the gradient. All fp32.
_UPDATE_BYTES = 4 * 9


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

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.again_s + self.backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeTimes:
    """Computing time of a step on one rank, part by part (seconds)."""

    block: BlockTimes
    ends_s: float
    """Head and losses of one micro-batch, forward and backward."""
    update_s: float
    """Clipping and AdamW, once a step."""


def estimate_compute(
    sizes: ModelSizes, mesh: MeshShape, settings: StepSettings, machine: Machine, *, seq_len: int
) -> ComputeTimes:
    """Estimate the computing time of one rank.

    Args:
        sizes: sizes of the model.
        mesh: a mesh that `check_mesh` accepts.
        settings: settings of the step.
        machine: the machine.
        seq_len: tokens of a row, over which attention is counted (see `count_flops`).
    """
    rank = _Rank(sizes, mesh, settings, machine)
    blocks = sizes.num_layers * block_unit(sizes, mesh).stored
    stored = blocks + sum(unit.stored for unit in other_units(sizes, mesh))
    if settings.adapter is not None:
        stored = count_elements(sizes, mesh, settings.adapter)
    return ComputeTimes(
        block=rank.block(seq_len), ends_s=rank.ends(), update_s=rank.move(stored * _UPDATE_BYTES)
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
        self, sizes: ModelSizes, mesh: MeshShape, settings: StepSettings, machine: Machine
    ) -> None:
        self.sizes, self.mesh, self.settings = sizes, mesh, settings
        self.peak = machine.peak_flops(settings.compute_bytes)
        self.bytes_per_s = machine.memory_gb_per_s * 1e9
        self.features = sizes.hidden_size // mesh.y
        self.queries = sizes.num_heads * sizes.head_dim // mesh.x
        self.keys = sizes.num_kv_heads * sizes.head_dim // mesh.x
        self.width = sizes.intermediate_size // mesh.x
        self.vocab = -(-sizes.vocab_size // mesh.x)

    def matmuls(self, num_rows: int, shapes: Sequence[tuple[int, int]]) -> float:
        """Return the time of matmuls of rows with weights of these shapes (seconds)."""
        seconds, a = 0.0, self.settings.compute_bytes
        for outs, ins in shapes:
            seconds += 2 * num_rows * outs * ins / (self.peak * MATMUL_SHARE)
            seconds += self.move(a * (num_rows * outs + outs * ins + ins * num_rows))
        return seconds

    def move(self, num_bytes: float) -> float:
        """Return the time to read or write this many bytes of GPU memory (seconds)."""
        return num_bytes / self.bytes_per_s

    def block(self, seq_len: int) -> BlockTimes:
        """Return the time of one decoder block."""
        settings, tokens, a = self.settings, self.settings.num_tokens, self.settings.compute_bytes
        shapes: dict[LayerGroup, list[tuple[int, int]]] = {
            "q|k|v": [(size, self.features) for size in (self.queries, self.keys, self.keys)],
            "o": [(self.features, self.queries)],
            "gate|up": [(self.width, self.features)] * 2,
            "down": [(self.features, self.width)],
        }
        groups = {group: self.matmuls(tokens, many) for group, many in shapes.items()}
        adapters = self.adapters()
        operations = 4 * tokens * self.queries * (seq_len + 1) / 2
        attention = operations / (self.peak * ATTENTION_SHARE)
        if settings.has_mask:
            heads = self.queries // self.sizes.head_dim
            attention += self.move(a * heads * tokens * (seq_len + 1) / 2)
        # Two norms with the residual added: two tensors read, two written. Rotary embedding of
        # queries and keys: one read, one written. SwiGLU: two read, one written.
        elements = 8 * self.features + 2 * (self.queries + self.keys) + 3 * self.width
        passes = 1.0 if settings.is_compiled else EAGER_PASSES
        other = self.move(passes * a * tokens * elements)
        unit, is_sharded = block_unit(self.sizes, self.mesh), self.mesh.z > 1
        gather = self.move(2 * a * unit.gathered) if is_sharded else 0.0
        is_frozen = settings.adapter is not None
        reduce = 0.0
        if is_sharded and not is_frozen:
            reduce = self.move((a + settings.wide_bytes) * unit.gathered)
        linear = sum(groups.values()) + sum(adapters.values())
        forward = linear + attention + other
        again = {
            "none": 0.0,
            # Recomputation ends at the last tensor that backward needs, the input of down.
            "full": forward - (0.0 if adapters["down"] else groups["down"]),
            # The outputs of matmuls and attention are kept.
            "selective": other,
        }[settings.checkpointing]
        weight_gradients = adapters if is_frozen else groups
        backward = linear + sum(weight_gradients.values())
        backward += _ATTENTION_BACKWARD * attention + 2 * other
        return BlockTimes(
            forward_s=forward + gather,
            again_s=again,
            backward_s=backward + reduce + (gather if settings.reshard_after_forward else 0.0),
            weight_gradients_s=weight_gradients,
        )

    def adapters(self) -> dict[LayerGroup, float]:
        """Return the time of one pass of the adapters of each group."""
        adapter, tokens = self.settings.adapter, self.settings.num_tokens
        times: dict[LayerGroup, float] = dict.fromkeys(("q|k|v", "o", "gate|up", "down"), 0.0)
        for layer in list_adapted(self.sizes, self.mesh, adapter):
            assert adapter is not None, "layers are adapted by an adapter"
            shapes = [(adapter.r, layer.ins), (layer.outs, adapter.r)]
            times[_GROUPS[layer.name]] += self.matmuls(tokens, shapes)
        return times

    def ends(self) -> float:
        """Return the time of head and losses, with their backward."""
        settings = self.settings
        # Per-label losses compute the logits again in backward.
        num_matmuls = 3 if settings.sums_nll else 4
        num_matmuls -= settings.adapter is not None
        rows = min(settings.num_labels, settings.chunk_tokens)
        chunk = num_matmuls * self.matmuls(rows, [(self.vocab, self.features)])
        logits = settings.num_labels * self.vocab
        losses = self.move(_LOGIT_PASSES * settings.wide_bytes * logits)
        return chunk * settings.num_labels / rows + losses


def count_flops(sizes: ModelSizes, mesh: MeshShape, settings: StepSettings, *, seq_len: int) -> int:
    """Count the floating-point operations of matmuls of one rank in one step.

    A token costs 2 operations per parameter in forward and 4 in backward, 2 for a frozen one, and
    attends to (seq_len + 1) / 2 others: causal attention over whole rows. Flash attention and
    attention in pieces skip masked pairs. Rows packed with shorter documents cost less, equally on
    every mesh. Heads are split over x only, so every rank along y computes their attention.

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
    adapter, layers = settings.adapter, list_adapted(sizes, mesh, settings.adapter)
    rank = 0 if adapter is None else adapter.r
    adapters = sum(2 * settings.num_tokens * rank * (layer.ins + layer.outs) for layer in layers)
    block = (3 if adapter is None else 2) * linear + 3 * (attention + adapters)
    if settings.checkpointing == "full":
        # Recomputation ends at the last tensor that backward needs, the input of down, or what the
        # adapter of down computes. Selective checkpointing keeps the outputs of matmuls and
        # attention, but adds what adapters compute to them again.
        block += linear + attention + adapters
        block -= 0 if any(layer.name == "down_proj" for layer in layers) else down
    if settings.checkpointing == "selective":
        block += sum(2 * settings.num_tokens * rank * layer.outs for layer in layers)
    total = sizes.num_layers * block
    if adapter is not None:
        # The frozen embedding needs no gradient, nor does the input of the first block.
        num_adapted = sum(_GROUPS[layer.name] == "q|k|v" for layer in layers)
        total -= 2 * settings.num_tokens * features * (queries + 2 * keys + rank * num_adapted)
    head = 2 * settings.num_labels * features * -(-sizes.vocab_size // mesh.x)
    # Per-label losses recompute the logits in backward.
    num_head = (3 if settings.sums_nll else 4) - (adapter is not None)
    return settings.num_micro_batches * (total + num_head * head)
