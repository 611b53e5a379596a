"""Mean loss on documents that are never trained: the model's utility, which must not get worse.

It is computed in the precision of training, on one process as on every mesh, whose gathered weights
have no other: the same model has the same loss everywhere.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from memguard.data.corpus import Corpus
from memguard.data.packing import split_points
from memguard.errors import Diverged, ModelError
from memguard.model.causal_lm import CausalLM
from memguard.model.evaluation import evaluating
from memguard.records import IGNORE_LABEL
from memguard.runtime import Runtime
from memguard.train.metrics import HeldoutMetrics


def choose_heldout(corpus: Corpus) -> tuple[str, list[int]]:
    """Return the bucket for the loss and its documents: held-out ones, else control."""
    for role in ("heldout", "control"):
        documents = [index for index, entry in enumerate(corpus.manifest) if entry.role == role]
        if documents:
            return corpus.manifest[documents[0]].bucket, documents
    return "", []


def cut_pieces(
    corpus: Corpus, documents: Iterable[int], seq_len: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield each piece's document, token ids and which of them are supervised, as in training."""
    for index in documents:
        document, begin = corpus.document(index), 0
        for end in split_points(len(document.input_ids), seq_len):
            yield index, document.input_ids[begin:end], document.supervised[begin:end]
            begin = end


@torch.no_grad()
def measure_heldout(
    lm: CausalLM,
    corpus: Corpus,
    *,
    seq_len: int,
    batch_tokens: int,
    step: int,
    runtime: Runtime,
    precision: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> HeldoutMetrics | None:
    """Return the mean plain loss over all supervised tokens of the held-out documents.

    Longer documents are split into the same pieces of ``seq_len`` as in training; a forward pass
    has ``batch_tokens``, padding included. Every rank calls this and gets the same result.

    Raises:
        Diverged, ModelError: the loss is not finite, after or before training.
    """
    bucket, documents = choose_heldout(corpus)
    pieces = [
        (ids.astype(np.int64), np.where(supervised, ids.astype(np.int64), IGNORE_LABEL))
        for _, ids, supervised in cut_pieces(corpus, documents, seq_len)
    ]
    pieces.sort(key=lambda piece: len(piece[0]), reverse=True)
    mine = [0.0, 0.0]
    with evaluating(lm.model):
        for batch in lm.deal(_batches(pieces, batch_tokens)):
            nll, count = _sum_nll(lm, batch or _NOTHING, precision)
            mine[0] += nll
            mine[1] += count
    copies = runtime.world_size // lm.num_batch_ways
    total, num_tokens = (value / copies for value in runtime.agree_sum(mine))
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
