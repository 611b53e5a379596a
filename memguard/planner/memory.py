"""Estimates the memory of a rank in a training step by formulas. No torch.

Stored weights and the optimizer's state (`config.optimizers`) are always allocated. Other memory
depends on the phase of the step; the peak is the largest of these phases:

    head            activations kept by all blocks, one chunk of logits, the head's gradient
    a block's MLP   activations kept by earlier blocks, this block's recomputed, their gradients
    its norms       the same, with fp32 intermediates of a norm and gradients of its weights
    its reduction   these gradients, and their fp32 copy that FSDP2 reduces over z
    embedding       all gradients, and the unsharded gradient of the embedding
    update          all gradients

Gradients, moments and reductions are those of the weights that are trained (`parameters`), at most
of one unit where backward updates them; sums of several micro-batches are fp32. Blocks that
backward does not reach keep nothing (activations.py). With adapters the base is stored in the
precision of the run. Of a base in NF4 (`parameters`) the weight of one layer at a time is dense.

These phases are evaluated for the last block, when most activations are kept, and for the first
two, when most gradients are allocated. On a GPU gradients and gathers have pools of their own,
which count in every phase: CUDA's caching allocator reuses freed memory only for the stream on
which it was allocated, so that what it reserves is the sum of its pools, each at its own peak:

    computation   everything else
    gathers       what FSDP2 gathers, before it is copied to the weights of a unit: in forward the
                  unit before is freed only after the next has been gathered, whose own part is
                  rounded there too, where weights are stored wider than they are gathered
    reductions    stored gradients, from the first backward until the update is done; with several
                  micro-batches also what is added to those of one unit

One process has no FSDP2 and one pool; gradients of adapters are not reduced by it, and are in the
first pool.

Compared with the simulated engine by scripts/bench/plan.py, and with its pools by
scripts/bench/memory_pools.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.activations import BlockActivations
from memguard.planner.parameters import RankSizes, Unit, block_unit, find_trained, other_units
from memguard.planner.step_settings import ADAPTER_BYTES, StepSettings


def count_gathers(
    block: Unit, others: Sequence[Unit], *, num_layers: int, element_bytes: int, is_rounded: bool
) -> int:
    """Return the peak of the pool of gathers (bytes).

    ``others`` are the units of embedding, head and last norm, of tied weights one; ``is_rounded``:
    stored weights are wider than gathered ones.
    """
    if block.z == 1:
        return 0
    # In the order of forward; tied weights are the root's, like the last norm, and come first.
    if len(others) == 1:
        order = [others[0], *[block] * min(2, num_layers)]
    else:
        embedding, head, last_norm = others
        order = [last_norm, embedding, *[block] * min(2, num_layers), head]
    sizes = [unit.gathered_bytes(element_bytes) for unit in order]
    rounded = [size // block.z if is_rounded else 0 for size in sizes]
    return max(map(sum, zip([0, *sizes], sizes, rounded, strict=False)))


def count_reductions(largest: int, settings: StepSettings) -> int:
    """Return what the pool of reductions has besides all stored gradients (bytes).

    It is of one unit, at most the largest: sums to be rounded to bf16, or added to others.
    """
    is_rounded, is_added = settings.weight_bytes < 4, settings.num_micro_batches > 1
    copy = settings.weight_bytes if is_rounded and is_added else 0
    return largest * (settings.wide_bytes + copy) if is_rounded or is_added else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Memory of one rank in one phase, by kind (bytes)."""

    weights: int
    """Stored weights, not gathered ones."""
    optimizer: int
    gradients: int
    """Stored gradients of the units whose backward is done; on a GPU all, in every phase."""
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
        return self.weights + self.gradients + self.optimizer + self.transient


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Memory that one rank needs for a step."""

    moment: str
    """Phase with the peak."""
    peak: MemoryUse
    gradient_bytes: int
    """Gradients once all are stored."""
    saved_bytes: int
    """What a checkpoint has of this rank: trained weights and the optimizer's state."""


def estimate_memory(
    sizes: ModelSizes, mesh: MeshShape, settings: StepSettings, *, seq_len: int
) -> MemoryEstimate:
    """Return the memory for one step on the rank that needs most."""
    rank = _Rank(sizes, mesh, settings, seq_len)
    moments = dict(rank.moments())
    name = max(moments, key=lambda moment: moments[moment].total)
    saved = rank.num_trained * settings.weight_bytes if rank.has_backward else rank.weight_bytes
    return MemoryEstimate(
        moment=name,
        peak=moments[name],
        gradient_bytes=rank.num_gradients * settings.gradient_bytes,
        saved_bytes=saved + rank.state_bytes,
    )


class _Rank:
    """The quantities of the module's docstring, and the memory use in each phase."""

    def __init__(
        self, sizes: ModelSizes, mesh: MeshShape, settings: StepSettings, seq_len: int
    ) -> None:
        self.sizes, self.mesh, self.settings, self.seq_len = sizes, mesh, settings, seq_len
        adapter = settings.adapter
        self.is_nf4 = adapter is not None and adapter.is_nf4
        self.block = block_unit(sizes, mesh, is_nf4=self.is_nf4)
        self.gathered_block = self.block.gathered_bytes(settings.compute_bytes)
        self.others = other_units(sizes, mesh)
        self.part = find_trained(sizes, mesh, adapter, settings.trained_modules)
        self.typical, self.first = self.part.typical, self.part.first
        self.acts = BlockActivations(sizes, mesh, settings, self.typical, seq_len=seq_len)
        own = RankSizes.of(sizes, mesh)
        self.features, self.queries, self.width = own.features, own.queries, own.width
        self.table = own.vocab * own.features
        self.is_plain = mesh.num_ranks == 1
        self.is_frozen = adapter is not None
        self.num_trained, self.has_backward = self.part.stored, settings.trained_modules != ()
        self.state_bytes = self.part.count_state(settings.facts, mesh)
        units = (*self.part.others, *(block.unit for block, _ in self.part.kinds))
        self.largest = max((unit.stored for unit in units), default=0)
        by_unit = settings.facts.gradients == "unit"
        self.num_gradients = self.largest if by_unit else self.num_trained
        others = zip(self.others, self.part.others, strict=True)
        self.stored_at_end = sum(part.stored for unit, part in others if unit.name != "embedding")
        element_bytes = settings.stored_bytes
        self.weight_bytes = sizes.num_layers * self.block.stored_bytes(element_bytes)
        self.weight_bytes += sum(unit.stored_bytes(element_bytes) for unit in self.others)
        self.weight_bytes += self.num_trained * ADAPTER_BYTES if self.is_frozen else 0
        # FSDP2's streams; gradients of adapters do not go through it.
        self.has_pools = settings.has_streams and not self.is_plain
        self.stores_gradients = self.has_pools and not self.is_frozen
        self.gathers = self.reductions = 0
        if self.has_pools:
            self.gathers = count_gathers(
                self.block,
                self.others,
                num_layers=sizes.num_layers,
                element_bytes=settings.compute_bytes,
                is_rounded=settings.compute_bytes < settings.stored_bytes,
            )
        if self.stores_gradients:
            self.reductions = count_reductions(self.largest, settings)

    # -- moments -------------------------------------------------------------------------------

    def moments(self) -> Iterator[tuple[str, MemoryUse]]:
        """Yield name and memory use of each phase that may be the peak."""
        last = self.sizes.num_layers - 1
        yield "the head's losses", self.at_head()
        first = self.first
        names = ((last, "last"), (min(first + 1, last), "second"), (first, "first"))
        for number, name in names if first <= last else ():
            yield f"backward through the {name} block's MLP", self.at_mlp(number)
            yield f"backward through the {name} block's second norm", self.at_second_norm(number)
            yield f"backward through the {name} block's first norm", self.at_first_norm(number)
            if not self.is_plain and self.part.blocks[number].unit.parameters:
                yield f"reduction of the {name} block's gradients", self.at_reduction(number)
        if self.part.has_embedding:
            yield "backward of the embedding", self.at_embedding()
        yield "the update", self.at_update()

    def _use(
        self,
        *,
        gradients: int,
        activations: int = 0,
        nll_chunk: int = 0,
        buffers: int = 0,
        gathering: int = 0,
    ) -> MemoryUse:
        """Return the memory use of stored gradients (elements) and of all others (bytes).

        ``gathering`` is gathered and not yet copied, and counted where it has no pool of its own.
        """
        if self.settings.num_micro_batches > 1:
            gradients = self.num_trained
        if self.stores_gradients:
            gradients = self.num_trained
            buffers += self.reductions
        gradients = min(gradients, self.num_gradients)
        buffers += self.gathers if self.has_pools else gathering
        return MemoryUse(
            weights=self.weight_bytes,
            optimizer=self.state_bytes,
            gradients=gradients * self.settings.gradient_bytes,
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
        if self.part.has_head:
            nll_chunk += self.table * (wide + (a if narrow else 0))
        num_layers, gathering, acts = self.sizes.num_layers, 0, self.acts
        # Without a backward the peak is here or in a block's forward: at most their sum.
        kept = self._kept_before(num_layers) if self.has_backward else acts.whole()
        kept += acts.shared() + acts.norm() + acts.stream()
        if self.is_plain:
            # Autocast keeps each weight that it has cast for backward until the forward ends.
            num_cast = self.part.num_reached if self.has_backward else num_layers
            buffers = num_cast * self.gathered_block if self.acts.casts else 0
        else:
            buffers = a * self.table + self._not_freed(num_layers)
            # An untied head was gathered last, into a buffer that is still allocated.
            gathering = 0 if self.sizes.is_tied else a * self.table
        return self._use(
            gradients=0, activations=kept, nll_chunk=nll_chunk, buffers=buffers, gathering=gathering
        )

    def at_update(self) -> MemoryUse:
        """Return the update; the gradients of adapters are reduced in one tensor before it."""
        is_reduced = self.is_frozen and not self.is_plain
        buffers = self.num_trained * ADAPTER_BYTES if is_reduced else 0
        return self._use(gradients=self.num_trained, buffers=buffers)

    def at_mlp(self, number: int) -> MemoryUse:
        """Return the backward of a block's MLP, where most activation gradients exist."""
        inside = self.acts.in_backward() + self.acts.narrow(2 * self.width) + self.acts.stream()
        gradients = self._mlp_gradients(number, ("down_proj",))
        return self._in_block(number, inside=inside + self.dense(), gradients=gradients)

    def at_second_norm(self, number: int) -> MemoryUse:
        """Return the backward of the norm before the MLP, whose weights have their gradients."""
        inside = self.acts.in_backward() - self.acts.mlp() - 2 * self.acts.narrow(self.features)
        inside += 4 * self.acts.wide(self.features) + self.acts.stream()
        gradients = self._mlp_gradients(number, ("gate_proj", "up_proj", "down_proj"))
        return self._in_block(number, inside=inside, gradients=gradients)

    def at_first_norm(self, number: int) -> MemoryUse:
        """Return the end of a block's backward: all its gradients, not yet reduced."""
        inside = 5 * self.acts.wide(self.features) + 2 * self.acts.stream()
        gradients = self._gathered(self.part.blocks[number].unit)
        return self._in_block(number, inside=inside, gradients=gradients)

    def _mlp_gradients(self, number: int, layers: tuple[str, ...]) -> int:
        """Return the size of the gradients of weights of a block's MLP, where they are trained."""
        names = self.part.blocks[number].unit.parameters
        num_trained = sum(f"mlp.{layer}.weight" in names for layer in layers)
        return num_trained * self.settings.compute_bytes * self.features * self.width

    def dense(self) -> int:
        """Return the size of the largest dense weight of a base in NF4; 0 for other bases."""
        if not self.is_nf4:
            return 0
        return self.settings.compute_bytes * self.features * max(self.width, self.queries)

    def at_reduction(self, number: int) -> MemoryUse:
        """Return the reduction over z of a block's gradients."""
        trained = self.part.blocks[number].unit
        buffers = self._gathered(trained) + trained.gathered * self.settings.wide_bytes
        return self._use(
            gradients=self._gradients_after(number - 1),
            activations=self._kept_before(number) + self.acts.shared() + self.acts.stream(),
            buffers=buffers + self._not_freed(number) + self._tied_table(),
            gathering=self.gathered_block if number > 0 else 0,
        )

    def at_embedding(self) -> MemoryUse:
        """Return the embedding's backward and the reduction of its gradients."""
        settings = self.settings
        buffers = self.table * (settings.compute_bytes + settings.wide_bytes)
        return self._use(
            gradients=self.num_trained,
            activations=2 * self.acts.stream(),
            buffers=0 if self.is_plain else buffers,
        )

    def _in_block(self, number: int, *, inside: int, gradients: int) -> MemoryUse:
        """Return the memory use within the backward of block ``number``, counted from 0."""
        is_last = number == self.sizes.num_layers - 1
        reduced = 0
        if not is_last:
            reduced = self.part.blocks[number + 1].unit.gathered
        elif not self.sizes.is_tied:
            reduced = self.table if self.part.has_head else 0
        elif self.part.has_head:
            reduced = self.part.blocks[number].unit.gathered
        buffers, gathering = gradients, 0
        if not self.is_plain:
            # This block's weights, gradients of the previous one, and weights of the next.
            buffers += self.gathered_block
            buffers += reduced * self.settings.wide_bytes
            if number > 0 and self.settings.reshard_after_forward:
                gathering = self.gathered_block
            buffers += self._tied_table()
        elif self.acts.casts:
            keeps_all = self.settings.checkpointing == "none"
            num_reached = number - self.first + 1
            buffers += self.gathered_block * (num_reached if keeps_all else 1)
        return self._use(
            gradients=self._gradients_after(number),
            activations=self._kept_before(number) + self.acts.shared() + inside,
            buffers=buffers + self._not_freed(number),
            gathering=gathering,
        )

    def _tied_table(self) -> int:
        """Return tied weights and the head's part of their gradient, until the embedding's."""
        copies = 2 if self.part.has_embedding else 1
        return copies * self.settings.compute_bytes * self.table if self.sizes.is_tied else 0

    def _not_freed(self, number: int) -> int:
        """Return the gathered weights of the blocks before, where they are kept."""
        if self.is_plain or self.settings.reshard_after_forward:
            return 0
        return number * self.gathered_block

    def _gradients_after(self, number: int) -> int:
        """Return the stored gradients of all layers after block ``number`` (elements)."""
        return self.part.stored_after[number + 1] + self.stored_at_end

    def _kept_before(self, number: int) -> int:
        """Return what the blocks before this one keep, of those that backward reaches."""
        return max(0, number - self.first) * self.acts.kept()

    def _gathered(self, unit: Unit) -> int:
        return unit.gathered_bytes(self.settings.compute_bytes)
