"""Activations of one decoder block on one rank. No torch.

Sizes are those of `memguard.parallel`: t tokens of a micro-batch, F features, Q queries, R keys as
attention reads them, W FFN width of this rank; a bytes per element of activations (bf16: 2).

    kept by a block     none       2 norms tF(4+2a), attention at(3Q+2R), MLP 4atW
                        full       its input, atF; over x ranks atF/x (`stores_parts`)
                        selective  its input, outputs of matmuls, of all-reduces, of attention
    attention's mask    tT(1+a) for rows of T tokens that contain several documents. None with
                        flash attention (GPUs, bf16), where R is not repeated either
    adapters            tR of each layer, its factors in the precision of the run; with dropout one
                        byte per feature, and with DoRA the layer's output

A frozen norm keeps no normalised values; o and down keep their input only if they are trained or
have an adapter. Ranks along x have the same input of a block: where each stores a part of its
tokens, the parts have equal numbers of tokens, and backward gathers them before the block is
recomputed.
"""

from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.parameters import RankSizes, TrainedBlock
from memguard.planner.step_settings import ADAPTER_BYTES, StepSettings, count_part, stores_parts


class BlockActivations:
    """Bytes of the activations of a block with most to train."""

    def __init__(
        self,
        sizes: ModelSizes,
        mesh: MeshShape,
        settings: StepSettings,
        typical: TrainedBlock,
        *,
        seq_len: int,
    ) -> None:
        """Compute the sizes of one rank; ``typical``: what the block trains."""
        self.sizes, self.mesh, self.settings, self.seq_len = sizes, mesh, settings, seq_len
        self.typical, self.adapted = typical, typical.adapted
        own = RankSizes.of(sizes, mesh)
        self.features, self.queries, self.raw_keys = own.features, own.queries, own.keys
        self.width = own.width
        self.heads = sizes.num_heads // mesh.x
        kv_heads = max(1, sizes.num_kv_heads // mesh.x)
        self.keys = kv_heads * sizes.head_dim
        # Attention with a mask repeats keys and values, one for each query head.
        is_repeated = settings.has_mask and self.heads > kv_heads
        self.repeated = self.queries if is_repeated else self.keys
        # One process runs plain modules: the residual stream has the type of stored weights, and
        # autocast casts those of matmuls. The base of adapters has the precision of the run.
        self.casts = mesh.num_ranks == 1 and settings.compute_bytes < settings.stored_bytes

    def narrow(self, num_features: int) -> int:
        """Return the bytes of activations with this number of features."""
        return self.settings.compute_bytes * self.settings.num_tokens * num_features

    def wide(self, num_features: int) -> int:
        """Return the bytes of statistics or wide activations with this number of features."""
        return self.settings.wide_bytes * self.settings.num_tokens * num_features

    def stream(self) -> int:
        """Return the size of the residual stream."""
        return self.wide(self.features) if self.casts else self.narrow(self.features)

    def norm(self) -> int:
        """Return what a norm keeps: fp32 input, normalised values, and the input of a matmul."""
        if self.casts:
            return 2 * self.wide(self.features)
        # Normalised values are kept for the gradient of the norm's weight.
        keeps_values = "input_layernorm" in self.typical.learns
        return self.wide(self.features) + self.narrow((2 if keeps_values else 1) * self.features)

    def whole(self) -> int:
        """Return the size of all tensors that a block's backward reads."""
        # q, k, v, gate and up each cast their input, which is kept for the weight's gradient.
        names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        num_casts = sum(name in self.typical.learns for name in names)
        casts = self.narrow(num_casts * self.features) if self.casts else 0
        return 2 * self.norm() + casts + self.attention() + self.mlp() + self.adapters()

    def adapters(self) -> int:
        """Return what the adapters of a block keep, without the inputs of their layers."""
        adapter, settings = self.settings.adapter, self.settings
        if adapter is None:
            return 0
        kept = self.narrow(adapter.r * len(self.adapted))
        for layer in self.adapted:
            if settings.compute_bytes < ADAPTER_BYTES:
                kept += settings.compute_bytes * adapter.r * (layer.ins + layer.outs)
            kept += settings.num_tokens * layer.ins if adapter.has_dropout else 0
            kept += self.narrow(layer.outs) if adapter.use_dora else 0
        return kept

    def attention(self) -> int:
        """Return what attention keeps: queries, repeated keys and values, its output twice."""
        output = 2 if "o_proj" in self.typical.learns else 1
        kept = self.narrow((1 + output) * self.queries + 2 * self.repeated) + self.wide(self.heads)
        if self.sizes.has_head_norms:
            normed = self.queries + self.keys
            kept += self.wide(normed)
            if "q_norm" in self.typical.learns:
                kept += self.wide(normed) if self.casts else self.narrow(normed)
        return kept

    def mlp(self) -> int:
        """Return what the MLP keeps: gate, its activation, up, their product."""
        return self.narrow((4 if "down_proj" in self.typical.learns else 3) * self.width)

    def input(self) -> int:
        """Return what a block that is recomputed stores of its input."""
        if not stores_parts(self.mesh, self.settings):
            return self.stream()
        part = count_part(self.mesh, self.settings)
        return self.settings.compute_bytes * part * self.features

    def kept(self) -> int:
        """Return what one block keeps until its backward."""
        if self.settings.checkpointing == "none":
            return self.whole()
        if self.settings.checkpointing == "full":
            return self.input()
        return self.input() + self.outputs()

    def outputs(self) -> int:
        """Return the outputs that selective recomputation keeps."""
        projected, wide = self.queries + 2 * self.raw_keys, 2 * self.width
        summed = 0
        if self.mesh.y > 1:
            summed += projected + wide
        if self.mesh.x > 1:
            summed += 2 * self.features
        if self.keys > self.raw_keys:
            summed += 2 * self.keys
        single = projected + wide + 2 * self.features + self.queries
        if self.settings.adapter is not None:
            single += self.settings.adapter.r * len(self.adapted)
        return self.narrow(single + summed) + self.wide(self.heads)

    def in_backward(self) -> int:
        """Return the activations of a block in its backward, after recomputation if any."""
        if self.settings.checkpointing == "none":
            return self.whole()
        # Kept outputs replace recomputed ones.
        if not stores_parts(self.mesh, self.settings):
            return self.whole() + self.input()
        # The input is gathered, beside the own part of it.
        return self.whole() + (1 + self.mesh.x) * self.input()

    def shared(self) -> int:
        """Return the tensors that all blocks share: attention mask and bias, rotary angles."""
        settings = self.settings
        mask = settings.num_tokens * self.seq_len * (1 + settings.compute_bytes)
        angles = self.narrow(2 * self.sizes.head_dim)
        return mask + angles if settings.has_mask else angles
