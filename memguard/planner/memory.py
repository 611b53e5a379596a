"""Estimates the memory of a rank in a training step by formulas. No torch.

Stored weights and AdamW's two moments (both fp32) are always allocated. Other memory depends on the
phase of the step; the peak is the largest of these phases:

    head            activations kept by all blocks, one chunk of logits, the head's gradient
    a block's MLP   activations kept by earlier blocks, this block's recomputed, their gradients
    its norms       the same, with fp32 intermediates of a norm and gradients of its weights
    its reduction   these gradients, and their fp32 copy that FSDP2 reduces over z
    embedding       all gradients, and the unsharded gradient of the embedding
    update          all gradients

With adapters the base is frozen: it is stored in the precision of the run and has no gradients, so
that neither reductions nor the embedding are phases, and no norm keeps normalised values. An
adapter of rank R keeps tR of each layer, its factors in the precision of the run, with dropout one
byte per feature, and with DoRA the layer's output. o and down keep their input only with an
adapter.

These phases are evaluated for the last block, when most activations are kept, and for the first
two, when most gradients are allocated. Sizes are those of `memguard.parallel`: t tokens of a
micro-batch, F features, Q queries, R keys as attention reads them, W FFN width of this rank; a
bytes per element of activations (bf16: 2).

    kept by a block     none       2 norms tF(4+2a), attention at(3Q+2R), MLP 4atW
                        full       atF
                        selective  atF, outputs of matmuls, of all-reduces, of attention
    attention's mask    tT(1+a) for rows of T tokens that contain several documents. None with
                        flash attention (GPUs, bf16), where R is not repeated either

Compared with the simulated engine by scripts/bench/plan.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from memguard.parallel.mesh_shape import MeshShape, ModelSizes
from memguard.planner.adapters import ADAPTER_BYTES, count_elements, list_adapted
from memguard.planner.traffic import StepSettings, Unit, block_unit, other_units

_STORED_BYTES = 4
_MOMENTS_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Memory of one rank in one phase, by kind (bytes)."""

    weights: int
    """Stored weights, not gathered ones."""
    optimizer: int
    gradients: int
    """Stored gradients of the units whose backward is done."""
    activations: int
    """Activations that blocks keep or recompute, their gradients, and the attention mask."""
    nll_chunk: int
    """Logits of a chunk, and gradients that the head accumulates."""
    buffers: int
    """Gathered or cast weights, gradients not yet reduced, and transfers in progress."""

    @property
    def transient(self) -> int:
        """Memory that is allocated and freed within a step (bytes)."""
        return self.activations + self.nll_chunk + self.buffers

    @property
    def total(self) -> int:
        """Sum of all kinds (bytes)."""
        return sum(getattr(self, kind.name) for kind in fields(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Memory that one rank needs for a step."""

    moment: str
    """Phase with the peak."""
    peak: MemoryUse
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


def estimate_memory(
    sizes: ModelSizes, mesh: MeshShape, settings: StepSettings, *, seq_len: int
) -> MemoryEstimate:
    """Return the memory for one step on the rank that needs most.

    Args:
        sizes: sizes of the model.
        mesh: a mesh that `check_mesh` accepts.
        settings: settings of the step.
        seq_len: length of a row (tokens).
    """
    rank = _Rank(sizes, mesh, settings, seq_len)
    moments = dict(rank.moments())
    name = max(moments, key=lambda moment: moments[moment].total)
    return MemoryEstimate(
        moment=name,
        peak=moments[name],
        weight_bytes=rank.weight_bytes,
        gradient_bytes=rank.num_trained * _STORED_BYTES,
        optimizer_bytes=rank.num_trained * _MOMENTS_BYTES,
    )


class _Rank:
    """The quantities of the module's docstring, and the memory use in each phase."""

    def __init__(
        self, sizes: ModelSizes, mesh: MeshShape, settings: StepSettings, seq_len: int
    ) -> None:
        self.sizes, self.mesh, self.settings, self.seq_len = sizes, mesh, settings, seq_len
        self.block = block_unit(sizes, mesh)
        self.others = other_units(sizes, mesh)
        self.features = sizes.hidden_size // mesh.y
        self.heads = sizes.num_heads // mesh.x
        self.queries = self.heads * sizes.head_dim
        self.raw_keys = sizes.num_kv_heads * sizes.head_dim // mesh.x
        kv_heads = max(1, sizes.num_kv_heads // mesh.x)
        self.keys = kv_heads * sizes.head_dim
        # Attention with a mask repeats keys and values, one for each query head.
        is_repeated = settings.has_mask and self.heads > kv_heads
        self.repeated = self.queries if is_repeated else self.keys
        self.width = sizes.intermediate_size // mesh.x
        # One process runs plain modules: the residual stream is fp32, and autocast casts matmuls.
        # A frozen base is stored in the precision of the run instead.
        self.is_plain = mesh.num_ranks == 1
        self.is_frozen = settings.adapter is not None
        is_narrow = settings.compute_bytes < settings.wide_bytes
        self.casts = self.is_plain and is_narrow and not self.is_frozen
        self.adapted = list_adapted(sizes, mesh, settings.adapter)
        self.table = -(-sizes.vocab_size // mesh.x) * self.features
        self.num_stored = self.block.stored * sizes.num_layers + sum(u.stored for u in self.others)
        self.num_trained, self.weight_bytes = self.num_stored, self.num_stored * _STORED_BYTES
        if self.is_frozen:
            self.num_trained = count_elements(sizes, mesh, settings.adapter)
            self.weight_bytes = self.num_stored * settings.compute_bytes
            self.weight_bytes += self.num_trained * ADAPTER_BYTES

    # -- activations ---------------------------------------------------------------------------

    def _act(self, num_features: int) -> int:
        """Return the bytes of activations with this number of features."""
        return self.settings.compute_bytes * self.settings.num_tokens * num_features

    def _wide(self, num_features: int) -> int:
        return self.settings.wide_bytes * self.settings.num_tokens * num_features

    def stream(self) -> int:
        """Return the size of the residual stream."""
        if self.is_plain and not self.is_frozen:
            return self._wide(self.features)
        return self._act(self.features)

    def norm(self) -> int:
        """Return what a norm keeps: fp32 input, normalised values, and the input of a matmul."""
        if self.casts:
            return 2 * self._wide(self.features)
        # Normalised values are kept for the gradient of the norm's weight.
        return self._wide(self.features) + self._act((1 if self.is_frozen else 2) * self.features)

    def whole(self) -> int:
        """Return the size of all tensors that a block's backward reads."""
        # q, k, v, gate and up each cast their input.
        casts = self._act(5 * self.features) if self.casts else 0
        return 2 * self.norm() + casts + self.attention() + self.mlp() + self.adapters()

    def adapters(self) -> int:
        """Return what the adapters of a block keep, without the inputs of their layers."""
        adapter, settings = self.settings.adapter, self.settings
        if adapter is None:
            return 0
        kept = self._act(adapter.r * len(self.adapted))
        for layer in self.adapted:
            if settings.compute_bytes < ADAPTER_BYTES:
                kept += settings.compute_bytes * adapter.r * (layer.ins + layer.outs)
            kept += settings.num_tokens * layer.ins if adapter.has_dropout else 0
            kept += self._act(layer.outs) if adapter.use_dora else 0
        return kept

    def attention(self) -> int:
        """Return what attention keeps: queries, repeated keys and values, its output twice."""
        output = 1 if self.is_frozen and not self._is_adapted("o_proj") else 2
        kept = self._act((1 + output) * self.queries + 2 * self.repeated) + self._wide(self.heads)
        if self.sizes.has_head_norms:
            normed = self.queries + self.keys
            kept += self._wide(normed)
            if not self.is_frozen:
                kept += self._wide(normed) if self.casts else self._act(normed)
        return kept

    def _is_adapted(self, name: str) -> bool:
        return any(layer.name == name for layer in self.adapted)

    def mlp(self) -> int:
        """Return what the MLP keeps: gate, its activation, up, their product."""
        keeps_product = not self.is_frozen or self._is_adapted("down_proj")
        return self._act((4 if keeps_product else 3) * self.width)

    def kept(self) -> int:
        """Return what one block keeps until its backward."""
        if self.settings.checkpointing == "none":
            return self.whole()
        if self.settings.checkpointing == "full":
            return self.stream()
        return self.stream() + self.outputs()

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
        return self._act(single + summed) + self._wide(self.heads)

    def in_backward(self) -> int:
        """Return the activations of a block in its backward, after recomputation if any."""
        # Kept outputs replace recomputed ones.
        keeps_all = self.settings.checkpointing == "none"
        return self.whole() if keeps_all else self.whole() + self.stream()

    def shared(self) -> int:
        """Return the tensors that all blocks share: attention mask and bias, rotary angles."""
        settings = self.settings
        mask = settings.num_tokens * self.seq_len * (1 + settings.compute_bytes)
        angles = self._act(2 * self.sizes.head_dim)
        return mask + angles if settings.has_mask else angles

    # -- moments -------------------------------------------------------------------------------

    def moments(self) -> Iterator[tuple[str, MemoryUse]]:
        """Yield name and memory use of each phase that may be the peak."""
        last = self.sizes.num_layers - 1
        yield "the head's losses", self.at_head()
        for number, name in ((last, "last"), (min(1, last), "second"), (0, "first")):
            yield f"backward through the {name} block's MLP", self.at_mlp(number)
            yield f"backward through the {name} block's second norm", self.at_second_norm(number)
            yield f"backward through the {name} block's first norm", self.at_first_norm(number)
            if not self.is_plain and not self.is_frozen:
                yield f"reduction of the {name} block's gradients", self.at_reduction(number)
        if not self.is_frozen:
            yield "backward of the embedding", self.at_embedding()
        yield "the update", self.at_update()

    def _use(
        self, *, gradients: int, activations: int = 0, nll_chunk: int = 0, buffers: int = 0
    ) -> MemoryUse:
        """Return the memory use; ``gradients`` in stored elements, the rest in bytes."""
        if self.settings.num_micro_batches > 1:
            gradients = self.num_trained
        return MemoryUse(
            weights=self.weight_bytes,
            optimizer=self.num_trained * _MOMENTS_BYTES,
            gradients=gradients * _STORED_BYTES,
            activations=activations,
            nll_chunk=nll_chunk,
            buffers=buffers,
        )

    def at_head(self) -> MemoryUse:
        """Return the end of forward, where `sum_nll` also takes the head's gradients."""
        settings, a = self.settings, self.settings.compute_bytes
        wide = settings.wide_bytes
        chunk = min(settings.chunk_tokens, settings.num_labels)
        logits = chunk * -(-self.sizes.vocab_size // self.mesh.x)
        narrow = a < wide
        labelled = settings.num_labels * self.features * a
        nll_chunk = 2 * labelled + chunk * self.features * a
        # Logits in fp32 and their gradient; the head's gradient in fp32 and one chunk's part.
        nll_chunk += logits * (a + wide if narrow else a)
        if not self.is_frozen:
            nll_chunk += self.table * (wide + (a if narrow else 0))
        num_layers = self.sizes.num_layers
        kept = num_layers * self.kept() + self.shared() + self.norm() + self.stream()
        if self.is_plain:
            # Autocast keeps each weight it has cast until the forward ends.
            buffers = num_layers * self._gathered(self.block) if self.casts else 0
        else:
            # An untied head was gathered last, into a buffer that is still allocated.
            copies = 1 if self.sizes.is_tied else 2
            buffers = copies * a * self.table + self._not_freed(num_layers)
        return self._use(gradients=0, activations=kept, nll_chunk=nll_chunk, buffers=buffers)

    def at_update(self) -> MemoryUse:
        """Return the update; the gradients of adapters are reduced in one tensor before it."""
        is_reduced = self.is_frozen and not self.is_plain
        buffers = self.num_trained * _STORED_BYTES if is_reduced else 0
        return self._use(gradients=self.num_trained, buffers=buffers)

    def at_mlp(self, number: int) -> MemoryUse:
        """Return the backward of a block's MLP, where most activation gradients exist."""
        inside = self.in_backward() + self._act(2 * self.width) + self.stream()
        weights = self.settings.compute_bytes * self.features * self.width
        return self._in_block(number, inside=inside, gradients=weights)

    def at_second_norm(self, number: int) -> MemoryUse:
        """Return the backward of the norm before the MLP, whose weights have their gradients."""
        inside = self.in_backward() - self.mlp() - 2 * self._act(self.features)
        inside += 4 * self._wide(self.features) + self.stream()
        weights = 3 * self.settings.compute_bytes * self.features * self.width
        return self._in_block(number, inside=inside, gradients=weights)

    def at_first_norm(self, number: int) -> MemoryUse:
        """Return the end of a block's backward: all its gradients, not yet reduced."""
        inside = 5 * self._wide(self.features) + 2 * self.stream()
        return self._in_block(number, inside=inside, gradients=self._gathered(self.block))

    def at_reduction(self, number: int) -> MemoryUse:
        """Return the reduction over z of a block's gradients."""
        buffers = self._gathered(self.block) + self.block.gathered * self.settings.wide_bytes
        if number > 0:
            buffers += self._gathered(self.block)
        return self._use(
            gradients=self._gradients_after(number - 1),
            activations=number * self.kept() + self.shared() + self.stream(),
            buffers=buffers + self._not_freed(number) + self._tied_table(),
        )

    def at_embedding(self) -> MemoryUse:
        """Return the embedding's backward and the reduction of its gradients."""
        settings = self.settings
        buffers = self.table * (settings.compute_bytes + settings.wide_bytes)
        return self._use(
            gradients=self.num_stored,
            activations=2 * self.stream(),
            buffers=0 if self.is_plain else buffers,
        )

    def _in_block(self, number: int, *, inside: int, gradients: int) -> MemoryUse:
        """Return the memory use within the backward of block ``number``, counted from 0."""
        is_last = number == self.sizes.num_layers - 1
        reduced = self.table if is_last and not self.sizes.is_tied else self.block.gathered
        buffers = 0 if self.is_frozen else gradients
        if not self.is_plain:
            # This block's weights, gradients of the previous one, and weights of the next.
            buffers += self._gathered(self.block)
            buffers += 0 if self.is_frozen else reduced * self.settings.wide_bytes
            if number > 0 and self.settings.reshard_after_forward:
                buffers += self._gathered(self.block)
            buffers += self._tied_table()
        elif self.casts:
            keeps_all = self.settings.checkpointing == "none"
            buffers += self._gathered(self.block) * (number + 1 if keeps_all else 1)
        return self._use(
            gradients=self._gradients_after(number),
            activations=number * self.kept() + self.shared() + inside,
            buffers=buffers + self._not_freed(number),
        )

    def _tied_table(self) -> int:
        """Return tied weights and the head's part of their gradient, until the embedding's."""
        copies = 1 if self.is_frozen else 2
        return copies * self.settings.compute_bytes * self.table if self.sizes.is_tied else 0

    def _not_freed(self, number: int) -> int:
        """Return the gathered weights of the blocks before, where they are kept."""
        if self.is_plain or self.settings.reshard_after_forward:
            return 0
        return number * self._gathered(self.block)

    def _gradients_after(self, number: int) -> int:
        """Return the stored gradients of all layers after block ``number`` (elements)."""
        num_behind = self.sizes.num_layers - 1 - number
        if self.is_frozen:
            return num_behind * self.num_trained // self.sizes.num_layers
        behind = num_behind * self.block.stored
        return behind + sum(unit.stored for unit in self.others if unit.name != "embedding")

    def _gathered(self, unit: Unit) -> int:
        return unit.gathered * self.settings.compute_bytes
