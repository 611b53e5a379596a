"""Mean loss on documents that are never trained: the model's utility, which must not get worse.

It is computed in the precision of training, on one process as on every mesh, whose gathered weights
have no other: the same model has the same loss everywhere. It decides which step's weights a run
ends with, and when it ends the run early:

    budget            export   weights of
    kept, or none     last     the last step
    kept, or none     best     the step with the lowest held-out loss
    exceeded (stop)   last     the last audited step within the limit
    exceeded (stop)   best     the same, or the step with the lowest held-out loss if it came before

The losses are those of metrics.jsonl, so a resumed run decides as one that was not interrupted.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from memguard.data.corpus import Corpus
from memguard.data.packing import split_points
from memguard.errors import ConfigError, Diverged, ModelError
from memguard.model.causal_lm import CausalLM
from memguard.model.evaluation import evaluating
from memguard.records import IGNORE_LABEL, KeptBy
from memguard.runtime import Console, Runtime
from memguard.train.metrics import HeldoutMetrics, MetricsLine, MetricsLog


def cut_pieces(
    corpus: Corpus, documents: Iterable[int], seq_len: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield each piece's document, token ids and which of them are supervised, as in training."""
    for index in documents:
        document, begin = corpus.document(index), 0
        for end in split_points(len(document.input_ids), seq_len):
            yield index, document.input_ids[begin:end], document.supervised[begin:end]
            begin = end


@dataclass(kw_only=True)
class HeldoutLoss:
    """Measures the loss on documents that are never trained; every rank has one."""

    lm: CausalLM
    corpus: Corpus
    seq_len: int
    runtime: Runtime
    precision: Callable[[], AbstractContextManager[None]] = nullcontext
    batch_tokens: int = 4096
    """Of a forward pass, padding included; at least one piece of `seq_len`."""
    console: Console = field(default_factory=Console)
    nll_by_step: dict[int, float] = field(default_factory=dict)
    """Loss after each measured step (nats a token)."""

    @property
    def best_step(self) -> int | None:
        """The trained step with the lowest loss, the first of equal ones; None if there is none."""
        trained = [step for step in self.nll_by_step if step > 0]
        return min(trained, key=lambda step: (self.nll_by_step[step], step), default=None)

    @property
    def num_worse(self) -> int:
        """Measurements after that of the lowest loss."""
        return sum(step > (self.best_step or 0) for step in self.nll_by_step)

    def choose_step(
        self, last_step: int, *, export: Literal["last", "best"], last_good_step: int | None = None
    ) -> tuple[int, KeptBy]:
        """Return the step whose weights are exported, and why.

        ``last_good_step`` is the last one within a budget that was exceeded; None if none was.
        """
        within = last_step if last_good_step is None else last_good_step
        if export == "best" and (best := self.best_step) is not None and best <= within:
            return best, "heldout"
        return within, "last" if last_good_step is None else "budget"

    def require_documents(self) -> None:
        """Refuse a run in which no document is held out.

        Raises:
            ConfigError: no document is never trained.
        """
        if not self.chosen[1]:
            raise ConfigError(
                "'train.heldout_every_steps' needs documents that are never trained: set "
                "'data.control', or leave it out"
            )

    def read(self, lines: Iterable[MetricsLine]) -> None:
        """Take the losses of a log."""
        found = (line for line in lines if isinstance(line, HeldoutMetrics))
        self.nll_by_step = {line.step: line.nll for line in found}

    @cached_property
    def chosen(self) -> tuple[str, list[int]]:
        """The bucket and its documents: held-out ones, else control."""
        for role in ("heldout", "control"):
            documents = [i for i, entry in enumerate(self.corpus.manifest) if entry.role == role]
            if documents:
                return self.corpus.manifest[documents[0]].bucket, documents
        return "", []

    def record(self, step: int, log: MetricsLog) -> None:
        """Measure the loss after a step and write it, unless the log has it."""
        if step in self.nll_by_step:
            return
        bucket, documents = self.chosen
        if documents and not self.nll_by_step:
            number = f"{len(documents):,} documents ({bucket})"
            self.console.info(f"held-out loss: measuring on {number}")
        if (line := self.measure(step)) is not None:
            log.write(line)
            self.nll_by_step[step] = line.nll
            self.console.info(f"held-out loss {line.nll:.4f} nats a token ({bucket})")

    @torch.no_grad()
    def measure(self, step: int) -> HeldoutMetrics | None:
        """Return the mean plain loss over all supervised tokens of the held-out documents.

        Longer documents are split as in training. Every rank gets the same result; None without
        documents.

        Raises:
            Diverged, ModelError: the loss is not finite, after or before training.
        """
        bucket, documents = self.chosen
        pieces = [
            (ids.astype(np.int64), np.where(supervised, ids.astype(np.int64), IGNORE_LABEL))
            for _, ids, supervised in cut_pieces(self.corpus, documents, self.seq_len)
        ]
        pieces.sort(key=lambda piece: len(piece[0]), reverse=True)
        mine = [0.0, 0.0]
        with evaluating(self.lm.model):
            for batch in self.lm.deal(_batches(pieces, max(self.seq_len, self.batch_tokens))):
                nll, count = _sum_nll(self.lm, batch or _NOTHING, self.precision)
                mine[0] += nll
                mine[1] += count
        copies = self.runtime.world_size // self.lm.num_batch_ways
        total, num_tokens = (value / copies for value in self.runtime.agree_sum(mine))
        if not num_tokens:
            return None
        if not math.isfinite(total):
            what = f"the loss on documents of '{bucket}' is {total}"
            if step:
                raise Diverged(step, f"{what}. Lower 'optim.lr'")
            raise ModelError(f"{what} before training: the model's weights are damaged")
        return HeldoutMetrics(
            step=step,
            bucket=bucket,
            nll=total / num_tokens,
            num_documents=len(documents),
            num_tokens=int(num_tokens),
        )


Piece = tuple[np.ndarray, np.ndarray]
"""Token ids and labels."""
# For a rank without a batch of its own: it must take part in the other ranks' collectives.
_NOTHING: list[Piece] = [(np.zeros(2, np.int64), np.full(2, IGNORE_LABEL, np.int64))]


def _sum_nll(
    lm: CausalLM, batch: Sequence[Piece], precision: Callable[[], AbstractContextManager[None]]
) -> tuple[float, int]:
    """Return the sum of losses of some pieces (nats) and the number of tokens."""
    longest = len(batch[0][0])
    ids_BT = np.zeros((len(batch), longest), dtype=np.int64)
    labels_BT = np.full((len(batch), longest), IGNORE_LABEL, dtype=np.int64)
    for row, (ids, labels) in enumerate(batch):
        # Padding follows the text, so causal attention does not reach it.
        ids_BT[row, : len(ids)] = ids
        labels_BT[row, : len(ids)] = labels
    labels_next = torch.from_numpy(labels_BT).to(lm.device)[:, 1:]
    keep = labels_next != IGNORE_LABEL

    def work() -> torch.Tensor:
        hidden = lm.hidden_states(torch.from_numpy(ids_BT).to(lm.device))[:, :-1]
        return lm.token_terms(hidden[keep], labels_next[keep]).nll_N

    with precision():
        nll_N = lm(work)
    return float(nll_N.double().sum()), int(keep.sum())


def _batches(pieces: Sequence[Piece], batch_tokens: int) -> list[list[Piece]]:
    """Group pieces, longest first, into batches of at most ``batch_tokens`` with padding."""
    batches: list[list[Piece]] = []
    for piece in pieces:
        if not batches or (len(batches[-1]) + 1) * len(batches[-1][0][0]) > batch_tokens:
            batches.append([])
        batches[-1].append(piece)
    return batches
