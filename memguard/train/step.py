"""One optimizer step, the same on one process and on every mesh.

    rows     a step's rows, split over the data x z ranks; x and y ranks share the same rows
    loss     sum over micro-batches of  reduce(terms) / labels left in the WHOLE step
    update   gradients of all rows, clipped, AdamW on the local tensors

FSDP2 averages gradients over the ranks that split the batch. Each rank's loss is therefore
multiplied by the number of these ranks, so that the average equals the sum.

A mixture of experts whose configuration has `output_router_logits` adds to the loss of the step

    coefficient x mean over micro-batches of their load-balancing loss (`model.router_loss`)

as transformers does for one micro-batch, which here has the rows of all data x z ranks.

Once a step the host waits for numbers of all ranks: sums of losses, with which the caller may send
its own, such as the counts of labels of the next step. This step's must be known before its
backward; a caller that has not sent them in the step before pays another collective.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memguard.config import OptimConfig, TrainConfig
from memguard.data.loader import Batch, Loader
from memguard.errors import Diverged
from memguard.mitigation import Mitigations
from memguard.model.causal_lm import CausalLM
from memguard.optim import build_optimizer
from memguard.optim.in_backward import Lomo
from memguard.optim.mezo import Mezo
from memguard.parallel.attention_pieces import Packing
from memguard.parallel.collectives import all_reduce
from memguard.parallel.local_parameters import (
    average_copies,
    clear_gradients,
    clip_gradients,
    find_local_parameters,
    sum_in_fp32,
    sum_partial_gradients,
    take_gradients,
)
from memguard.parallel.lora import list_masks
from memguard.parallel.mesh import world_axis
from memguard.parallel.mesh_shape import MeshShape
from memguard.records import IGNORE_LABEL
from memguard.runtime import Runtime
from memguard.seeds import derive_seed
from memguard.train.dp_sgd import RowClipping
from memguard.train.embedding_noise import added_to_embeddings, draw_noise


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Result of one step, over all rows."""

    loss: float | None
    """Mean loss over the labels that received loss (nats), as weighted by the mitigations; None if
    no labels were left."""
    grad_norm: float | None = None
    """Gradient norm before clipping."""
    num_supervised: int
    """Labels before mitigations."""
    num_kept: int
    """Labels that received loss."""
    penalised_share: float | None = None
    """Share of an n-gram penalty's windows beyond its margin; None without an n-gram penalty."""
    router_loss: float | None = None
    """Mean load-balancing loss of the micro-batches, without its coefficient, which `loss` does not
    contain; None if the model does not train with it."""
    slope: float | None = None
    """MeZO's derivative of the loss along its direction; None: another optimizer."""
    shared: tuple[float, ...] = ()
    """Sums of the caller's numbers over the ranks that split the batch."""


def build_own_batch(
    loader: Loader, step: int, lm: CausalLM, reference_nll: NDArray[np.float32] | None = None
) -> Batch:
    """Build this rank's rows of a step, from 0."""
    mine, num_rows = list_own_samples(loader, step, lm)
    return loader.batch(mine, num_rows=num_rows, reference_nll=reference_nll)


def list_own_samples(loader: Loader, step: int, lm: CausalLM) -> tuple[range, int]:
    """Return the samples of this rank's rows of a step, and how many rows each rank has."""
    samples = loader.samples(step)
    num_rows = -(-len(samples) // lm.num_batch_ways)
    return samples[lm.batch_rank * num_rows :][:num_rows], num_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class _Labels:
    """Some rows and their N labels that receive loss."""

    input_ids_BT: Tensor
    position_ids_BT: Tensor
    packing: Packing
    index_N: Tensor
    """Index of the token before each label, in the flattened rows."""
    ids_N: Tensor
    piece_N: Tensor
    """Index of the piece that contains the label, numbered from 0 in the order of labels."""
    reference_nll_N: Tensor | None
    forget_N: Tensor | None
    is_token_M: NDArray[np.bool_]
    """Whether each position of the flattened rows is a token, not padding."""

    def hidden_states(self, lm: CausalLM, *, router_logits: list[Tensor] | None = None) -> Tensor:
        """Return the hidden states that predict the labels; only these reach the head's matmul."""
        hidden_BTD = lm.hidden_states(
            self.input_ids_BT,
            self.position_ids_BT,
            packing=self.packing,
            router_logits=router_logits,
        )
        return hidden_BTD.flatten(0, 1).index_select(0, self.index_N)


class _Sums(NamedTuple):
    """Sums over some rows; FSDP2 finds tensors in tuples only."""

    loss: Tensor
    """Of the labels that receive loss."""
    windows: tuple[Tensor, ...] = ()
    """See `Mitigations.count_windows`."""
    router: Tensor | None = None
    """This rank's share of the load-balancing loss; None if the model does not train with it."""


class TrainStep:
    """Takes optimizer steps on a model."""

    def __init__(
        self,
        *,
        lm: CausalLM,
        mitigations: Mitigations,
        train: TrainConfig,
        optim: OptimConfig,
        seed: int,
        runtime: Runtime,
        row_clipping: RowClipping | None = None,
    ) -> None:
        """Set up steps on a model whose weights are loaded; the optimizer state starts empty."""
        assert row_clipping is None or lm.mesh is None, "a row is clipped by one process"
        self.row_clipping = row_clipping
        self.lm, self.mitigations = lm, mitigations
        self.train, self.optim, self.seed, self.runtime = train, optim, seed, runtime
        self._masks = list_masks(lm.model)
        self.parameters = find_local_parameters(lm.model, lm.mesh)
        num_rows = -(-train.batch_size // lm.num_batch_ways)
        if train.count_micro_rows(num_rows) < num_rows:
            # Also in a last step that has fewer rows: a resumed run must do the same.
            sum_in_fp32(self.parameters)
        assert row_clipping is None or optim.name == "adamw", "it needs all gradients"
        self.optimizer = build_optimizer(self.parameters, optim, seed=seed, mesh=lm.mesh)

    def run(
        self,
        batch: Batch,
        *,
        lr: float,
        step: int,
        first_sample: int,
        labels: tuple[float, float] | None = None,
        share: Callable[[], Sequence[float]] = tuple,
    ) -> StepResult:
        """Take one step with this rank's rows; every rank has the same number.

        ``step`` counts from 1. ``first_sample``, the global index of the first row of
        all ranks, seeds dropout and noise. ``labels`` are those of all ranks before and after
        mitigations; None sums them first. ``share`` is called after backward and returns numbers of
        this rank, as many on every rank, which are summed over ranks together with the loss.

        Raises:
            Diverged: the loss or the gradient norm is not finite.
        """
        if labels is None:
            own_labels = torch.tensor([batch.num_supervised, batch.num_kept], dtype=torch.float64)
            num_supervised, num_kept = self._sum_over_batch(own_labels).tolist()
        else:
            num_supervised, num_kept = labels
        # Noise is added whatever the rows contain: a skipped step would reveal their content.
        if num_kept == 0 and self.row_clipping is None:
            sums = self._sum_over_batch(torch.tensor(share(), dtype=torch.float64)).tolist()
            return StepResult(
                loss=None, num_supervised=int(num_supervised), num_kept=0, shared=tuple(sums)
            )
        self.optimizer.begin(step=step, lr=lr)
        pieces = list(self._micro_batches(len(batch.input_ids)))
        take = partial(self._take, batch, pieces, first_sample=first_sample, num_kept=num_kept)
        if isinstance(self.optimizer, Mezo):
            weight = getattr(self.lm.router_loss, "coefficient", 0.0) / len(pieces)
            totals = self.optimizer.compare(take, router_weight=weight)
        else:
            totals = take()
        mine = torch.tensor(share(), dtype=torch.float64)
        total = self._sum_over_batch(torch.cat([totals, mine.to(totals.device, non_blocking=True)]))
        if isinstance(self.optimizer, Lomo | Mezo):
            grad_norm = self.optimizer.finish()
        else:
            take_gradients(self.parameters)
            if self.lm.mesh is not None:
                sum_partial_gradients(self.parameters, self.lm.mesh)
                average_copies(self.parameters, self.lm.mesh.axis("y"))
            if self.row_clipping is not None:
                num_rows = len(batch.input_ids)
                self.row_clipping.put_mean(self.parameters, step=step, num_rows=num_rows)
            grad_norm = clip_gradients(self.parameters, self.optim.max_grad_norm)
        loss_sum, *others = total.tolist()
        measured, shared = others[: len(totals) - 1], others[len(totals) - 1 :]
        slope = None
        if isinstance(self.optimizer, Mezo):
            slope = self.optimizer.slope = measured.pop()
        router_loss = measured.pop() / len(pieces) if self.lm.router_loss else None
        if not (math.isfinite(loss_sum) and math.isfinite(grad_norm or slope or 0.0)):
            is_loss = not math.isfinite(loss_sum)
            what = f"loss {loss_sum}" if is_loss else f"gradient norm {grad_norm}"
            raise Diverged(step, what, is_own=not math.isfinite(totals[0]))
        self.optimizer.update()
        clear_gradients(self.parameters)
        return StepResult(
            loss=loss_sum if num_kept else None,
            grad_norm=grad_norm,
            num_supervised=int(num_supervised),
            num_kept=int(num_kept),
            penalised_share=measured[0] / measured[1] if measured and measured[1] else None,
            router_loss=router_loss,
            slope=slope,
            shared=tuple(shared),
        )

    def _take(
        self, batch: Batch, pieces: Sequence[slice], *, first_sample: int, num_kept: float
    ) -> Tensor:
        """Run all micro-batches, with their backward unless gradients are disabled.

        Returns sums of the loss; with an n-gram penalty, of the windows beyond its margin and of
        all its windows; with a load-balancing loss, of its shares.
        """
        totals: Tensor | float = 0.0
        num_ways = self.lm.num_batch_ways
        for piece in pieces:
            own_first = first_sample + self.lm.batch_rank * len(batch.input_ids) + piece.start
            torch.manual_seed(derive_seed(self.seed, "dropout", own_first))
            for masks in self._masks:
                masks.start(own_first)
            self.lm.set_last_micro_batch(piece is pieces[-1])
            with self._noise(batch, piece, first_sample):
                parts = self._sum_loss(batch, piece)
            loss = parts.loss / max(num_kept, 1)
            if self.row_clipping is not None:
                # The mean over the row's own labels: its weight must not depend on other rows.
                own = int((batch.labels[piece, 1:] != IGNORE_LABEL).sum())
                self._backward(loss * (num_kept / max(own, 1)), parts.router, 1)
                self.row_clipping.add_row(self.parameters)
            elif torch.is_grad_enabled():
                self._backward(loss * num_ways, parts.router, num_ways / len(pieces))
            # The values are read once, after the update is computed: reading waits for the GPU.
            values = [loss, *parts.windows, *([] if parts.router is None else [parts.router])]
            totals = totals + torch.stack([value.detach().double() for value in values])
        assert isinstance(totals, Tensor), "every rank has a micro-batch"
        return totals

    @torch.no_grad()
    def measure_nll(self, batch: Batch) -> NDArray[np.float32]:
        """Return the NLL of the batch's labels ``[N]`` (nats) by row, in training precision."""
        labels = self._find_labels(batch, slice(None))

        def work() -> Tensor:
            return self.lm.token_terms(labels.hidden_states(self.lm), labels.ids_N).nll_N

        with self.precision():
            nll_N: NDArray[np.float32] = self.lm(work).float().cpu().numpy()
        return nll_N

    def rehearse(self, batch: Batch, rows: slice) -> None:
        """Run forward and backward of a micro-batch without an update, to find whether they work.

        Adds to the gradients. Nothing is sent but by the model itself.
        """
        parts = self._sum_loss(batch, rows)
        self._backward(parts.loss, parts.router, 1)

    def _backward(self, loss: Tensor, router: Tensor | None, factor: float) -> None:
        """Add the gradients of a micro-batch: of its loss and of its load-balancing loss."""
        if router is not None:
            assert self.lm.router_loss is not None, "it has computed its share"
            shape = MeshShape() if self.lm.mesh is None else self.lm.mesh.shape
            # Ranks along y and x have the same share, and the sum of their gradients is used.
            weight = self.lm.router_loss.coefficient / (shape.y * shape.x)
            loss = loss + router * (weight * factor)
        torch.autograd.backward(loss)

    def _sum_loss(self, batch: Batch, rows: slice) -> _Sums:
        """Return the sums over some rows and their labels."""
        labels = self._find_labels(batch, rows)
        router_loss = self.lm.router_loss

        def work() -> _Sums:
            logits: list[Tensor] | None = None if router_loss is None else []
            hidden_ND = labels.hidden_states(self.lm, router_logits=logits)
            router = None
            if router_loss is not None and logits is not None:
                mask_M = self._to_device(labels.is_token_M)
                router = router_loss.share(logits, mask_M, self.lm.mesh)
            if self.mitigations.sums_nll:
                return _Sums(loss=self.lm.sum_nll(hidden_ND, labels.ids_N), router=router)
            needs = self.mitigations.needs - {"reference_nll"}
            terms = replace(
                self.lm.token_terms(hidden_ND, labels.ids_N, needs),
                reference_nll_N=labels.reference_nll_N,
                piece_N=labels.piece_N,
                forget_N=labels.forget_N,
            )
            return _Sums(
                loss=self.mitigations.reduce(terms),
                windows=tuple(self.mitigations.count_windows(terms)),
                router=router,
            )

        with self.precision():
            return self.lm(work)

    def _find_labels(self, batch: Batch, rows: slice) -> _Labels:
        """Find the labels that are not ignored, on the CPU to avoid waiting for the GPU."""
        labels_BT = batch.labels[rows]
        row_N, column_N = np.nonzero(labels_BT[:, 1:] != IGNORE_LABEL)
        place_N = row_N, column_N + 1
        number_N = row_N * labels_BT.shape[1] + batch.document_ids[rows][place_N]
        reference_N = None if batch.reference_nll is None else batch.reference_nll[rows][place_N]
        forget_N = None if batch.forget is None else batch.forget[rows][place_N]
        ends = batch.cu_seqlens(rows)
        assert reference_N is None or np.isfinite(reference_N).all(), "a label was not measured"
        return _Labels(
            input_ids_BT=self._to_device(batch.input_ids[rows]),
            position_ids_BT=self._to_device(batch.position_ids[rows]),
            packing=Packing(cu_seqlens=self._to_device(ends), max_seqlen=int(np.diff(ends).max())),
            index_N=self._to_device(row_N * labels_BT.shape[1] + column_N),
            ids_N=self._to_device(labels_BT[place_N]),
            piece_N=self._to_device(np.cumsum(np.diff(number_N, prepend=number_N[:1]) != 0)),
            reference_nll_N=None if reference_N is None else self._to_device(reference_N),
            forget_N=None if forget_N is None else self._to_device(forget_N),
            is_token_M=batch.document_ids[rows].ravel() >= 0,
        )

    def _noise(self, batch: Batch, rows: slice, first_sample: int) -> AbstractContextManager[None]:
        """Add noise to the embeddings of some rows, if a mitigation does."""
        if self.mitigations.of_model is None:
            return nullcontext()
        noise_BTD = draw_noise(
            self.mitigations.of_model,
            batch,
            rows,
            lm=self.lm,
            seed=self.seed,
            first_sample=first_sample,
        )
        return added_to_embeddings(self.lm, self._to_device(noise_BTD))

    def _micro_batches(self, num_rows: int) -> Iterable[slice]:
        """Split this rank's rows into forward passes; every rank has the same number."""
        size = self.train.count_micro_rows(num_rows)
        if self.row_clipping is not None:
            size = 1
        for first in range(0, num_rows, size):
            yield slice(first, min(first + size, num_rows))

    def _sum_over_batch(self, values: Tensor) -> Tensor:
        """Return the sums over the ranks that split the batch; waits for them only when read."""
        if self.lm.mesh is None:
            return values
        shape = self.lm.mesh.shape
        sums = all_reduce(values.to(self.runtime.device), world_axis())
        return sums / (shape.x * shape.y)

    def _to_device(self, array: Any) -> Tensor:
        tensor = torch.as_tensor(array)
        if self.runtime.device.type != "cuda":
            return tensor
        # From pinned memory the copy runs while the host continues.
        return tensor.pin_memory().to(self.runtime.device, non_blocking=True)

    def precision(self) -> AbstractContextManager[None]:
        """Return a context in which forwards compute in the precision of training."""
        # A frozen base is stored in bf16, as are weights of `train.weights` bf16.
        is_wide = self.lm.compute_dtype != torch.bfloat16
        if self.train.precision == "bf16" and self.lm.mesh is None and is_wide:
            return torch.autocast(self.runtime.device.type, dtype=torch.bfloat16)
        return nullcontext()
