"""Mean loss on documents that are never trained: what must not get worse."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from memguard.data.corpus import Corpus
from memguard.data.packing import split_points
from memguard.errors import ModelError
from memguard.parallel.vocab import VocabLayer
from memguard.records import IGNORE_LABEL
from memguard.train.metrics import HeldoutMetrics


def choose_heldout(corpus: Corpus) -> tuple[str, list[int]]:
    """Return the bucket the loss is measured on and its documents: held-out ones, else control."""
    for role in ("heldout", "control"):
        found = [index for index, entry in enumerate(corpus.manifest) if entry.role == role]
        if found:
            return corpus.manifest[found[0]].bucket, found
    return "", []


@torch.inference_mode()
def measure_heldout(
    vocab: VocabLayer, corpus: Corpus, *, seq_len: int, batch_tokens: int, step: int
) -> HeldoutMetrics | None:
    """Return the mean plain loss over all supervised tokens of the held-out documents.

    Args:
        vocab: the model, in fp32 arithmetic whatever the training precision.
        corpus: the run's documents.
        seq_len: longer documents are cut into the same pieces as in training (tokens).
        batch_tokens: tokens of one forward pass, padding included.
        step: steps taken so far, for the record.

    Returns:
        None where nothing is held out.

    Raises:
        ModelError: the loss is not finite.
    """
    bucket, documents = choose_heldout(corpus)
    pieces = []
    for index in documents:
        document = corpus.document(index)
        begin = 0
        for end in split_points(len(document.input_ids), seq_len):
            ids = document.input_ids[begin:end].astype(np.int64)
            labels = np.where(document.supervised[begin:end], ids, IGNORE_LABEL)
            pieces.append((ids, labels))
            begin = end
    pieces.sort(key=lambda piece: len(piece[0]), reverse=True)
    total, num_tokens = 0.0, 0
    training = vocab.model.training
    vocab.model.eval()
    for batch in _batches(pieces, batch_tokens):
        longest = len(batch[0][0])
        ids_BT = np.zeros((len(batch), longest), dtype=np.int64)
        labels_BT = np.full((len(batch), longest), IGNORE_LABEL, dtype=np.int64)
        for row, (ids, labels) in enumerate(batch):
            ids_BT[row, : len(ids)] = ids
            labels_BT[row, : len(ids)] = labels
        # Padding stands behind the text, where a causal model cannot see it.
        hidden = vocab.hidden_states(torch.from_numpy(ids_BT).to(vocab.device))[:, :-1]
        labels_next = torch.from_numpy(labels_BT).to(vocab.device)[:, 1:]
        keep = labels_next != IGNORE_LABEL
        nll_N = vocab.token_nll(hidden[keep], labels_next[keep])
        total += float(nll_N.double().sum())
        num_tokens += int(keep.sum())
    vocab.model.train(training)
    if not num_tokens:
        return None
    if not math.isfinite(total):
        why = "training diverged; lower 'optim.lr'" if step else "the model's weights are damaged"
        raise ModelError(f"the loss on documents of '{bucket}' is {total} after step {step}: {why}")
    return HeldoutMetrics(
        step=step,
        bucket=bucket,
        nll=total / num_tokens,
        num_documents=len(documents),
        num_tokens=num_tokens,
    )


Piece = tuple[np.ndarray, np.ndarray]


def _batches(pieces: Sequence[Piece], batch_tokens: int) -> list[list[Piece]]:
    """Cut pieces, longest first, into batches of at most ``batch_tokens`` with padding."""
    batches: list[list[Piece]] = []
    for piece in pieces:
        if not batches or (len(batches[-1]) + 1) * len(batches[-1][0][0]) > batch_tokens:
            batches.append([])
        batches[-1].append(piece)
    return batches
