"""Probability of a label when sampling from the most likely tokens only, vocabulary sharded.

    scheme     logits / temperature, then the top_k largest, then the smallest set of those whose
               probability reaches top_p; the rules, and the order, of `transformers`
    ties       at the border of top_k all stay; at that of top_p the lowest ids stay, as many as
               it takes (transformers leaves them to its sort)

    for C/x tokens at a time:
      top_k    peaks_CG = largest logit of each of G groups of the vocabulary; of the rows with
               fewer than k peaks above the label (an all-reduce over x):
               border_C = k-th largest of an all-gather over x of each rank's k + 1 largest
      top_p    m = 64, doubled until enough: nucleus of an all-gather over x of each rank's m
               largest, which is right when no rank kept back more than its border
      logprob_C = label_C - max_C - log(probability mass that stays)     -inf where it is cut off

At most [C/x, V] = [C, V/x] candidates are gathered, and far fewer where the model is sure.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from memguard.parallel.collectives import all_gather, all_reduce
from memguard.parallel.head import (
    Head,
    max_of_piece,
    pick_label,
)
from memguard.parallel.largest import find_largest, find_peaks

_FIRST_CANDIDATES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """A way to draw the next token."""

    temperature: float = 1.0
    """Divides the logits."""
    top_k: int | None = None
    """Tokens to draw from; None or the vocabulary's size is all."""
    top_p: float | None = None
    """Probability of the tokens to draw from; None or 1 is all."""

    def __post_init__(self) -> None:
        assert self.temperature > 0, "temperature 0 is the argmax, which token_scores has"
        assert self.top_k is None or self.top_k >= 1, "at least one token stays"
        assert self.top_p is None or 0 <= self.top_p <= 1, "a probability"

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn with the model's own probabilities."""
        return self.temperature == 1 and self.top_k is None and self.top_p in (None, 1)


def score_truncated(
    head: Head,
    logits_CV: Tensor,
    labels_C: Tensor,
    truncation: Truncation,
    peaks_CG: Tensor | None = None,
) -> Tensor:
    """Return the log-probability ``[C]`` (nats) with which sampling draws each label of a chunk.

    Args:
        head: this rank's piece.
        logits_CV: a chunk's local logits ``[C, V/x]`` after the steps; left as they are. Callers
            keep C at a chunk's tokens divided by x.
        labels_C: ``[C]`` token ids.
        truncation: from what is drawn.
        peaks_CG: of the logits, where they are at hand; see `largest.find_peaks`.
    """
    if truncation.temperature != 1:
        logits_CV, peaks_CG = logits_CV / truncation.temperature, None
    axis, top_k, top_p = head.vocab_axis, truncation.top_k, truncation.top_p
    local_C, here_C = head.local_labels(labels_C)
    label_C = all_reduce(pick_label(logits_CV, local_C, here_C), axis)
    if top_k is None or top_k >= head.vocab_size:
        return _score_from_all(head, logits_CV, labels_C, label_C, top_p)
    # Few labels of a text that is not known by heart are among the likeliest, and finding those
    # takes ten times as long as telling that as many groups have one above the label.
    peaks_CG = find_peaks(logits_CV) if peaks_CG is None else peaks_CG
    num_above_C = (peaks_CG > label_C[:, None]).sum(1)
    # What damaged weights say of a label is not that it is never drawn.
    num_above_C.masked_fill_(max_of_piece(peaks_CG).isnan(), -head.vocab_size)
    rows_N = (all_reduce(num_above_C, axis) < top_k).nonzero()[:, 0]
    logprob_C = torch.full_like(label_C, -torch.inf)
    if not len(rows_N):
        return logprob_C
    # One more than stays: where it ties with the last of those, it and maybe others stay as well.
    best_NM = gather_largest(head, logits_CV, top_k + 1, peaks_CG, rows_N).flatten(1)
    sorted_NM = best_NM.sort(1, descending=True).values
    border_N1, next_N1 = sorted_NM[:, top_k - 1 : top_k], sorted_NM[:, top_k : top_k + 1]
    label_N = label_C[rows_N]
    if (top_p is not None and top_p < 1) or (border_N1 == next_N1).any():
        logits_NV = logits_CV[rows_N]
        kept_NV = logits_NV.masked_fill(logits_NV < border_N1, -torch.inf)
        logprob_C[rows_N] = _score_from_all(head, kept_NV, labels_C[rows_N], label_N, top_p)
        return logprob_C
    max_N1 = sorted_NM[:, :1]
    mass_N = (sorted_NM[:, :top_k] - max_N1).exp_().sum(1)
    cut_N = (label_N < border_N1[:, 0]) & ~mass_N.isnan()
    logprob_N = (label_N - max_N1[:, 0] - mass_N.log()).masked_fill_(cut_N, -torch.inf)
    logprob_C[rows_N] = logprob_N
    return logprob_C


def _score_from_all(
    head: Head, logits_CV: Tensor, labels_C: Tensor, label_C: Tensor, top_p: float | None
) -> Tensor:
    """Return the log-probabilities of labels that are drawn from what is not -inf, or its top_p."""
    axis = head.vocab_axis
    max_C = all_reduce(max_of_piece(logits_CV), axis, "max")
    mass_C = all_reduce((logits_CV - max_C[:, None]).exp_().sum(1), axis)
    if top_p is None or top_p >= 1:
        return label_C - max_C - mass_C.log()
    nucleus = find_nucleus(head, logits_CV, max_C, mass_C, top_p)
    ids_V = torch.arange(logits_CV.shape[1], device=labels_C.device) + head.first_token
    before_CV = (logits_CV == nucleus.border_C[:, None]) & (ids_V < labels_C[:, None])
    num_before_C = all_reduce(before_CV.sum(1), axis)
    cut_C = label_C < nucleus.border_C
    cut_C |= (label_C == nucleus.border_C) & (num_before_C >= nucleus.num_at_border_C)
    cut_C &= ~nucleus.mass_C.isnan()
    return (label_C - max_C - nucleus.mass_C.log()).masked_fill(cut_C, -torch.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class Nucleus:
    """The smallest set of tokens whose probability reaches top_p, of C rows."""

    border_C: Tensor
    """Smallest logit in it."""
    num_at_border_C: Tensor
    """How many of the tokens with that logit are in it."""
    mass_C: Tensor
    """Sum of exp(logit - max) over it."""


def find_nucleus(
    head: Head, logits_CV: Tensor, max_C: Tensor, mass_C: Tensor, top_p: float
) -> Nucleus:
    """Return the nucleus of each row.

    Args:
        head: this rank's piece.
        logits_CV: a chunk's local logits, -inf where a token is cut off already.
        max_C: largest logit, of all ranks.
        mass_C: sum of exp(logit - max), of all ranks.
        top_p: probability to be reached.
    """
    num = _FIRST_CANDIDATES
    while True:
        pieces_CxM = gather_largest(head, logits_CV, num)
        sorted_CM = pieces_CxM.flatten(1).sort(1, descending=True).values
        sum_CM = (sorted_CM - max_C[:, None]).exp().cumsum(1)
        target_C = top_p * mass_C
        # A token stays while what is above it does not reach top_p; the first always does.
        num_kept_C = 1 + (sum_CM[:, :-1] < target_C[:, None]).sum(1)
        last_C1 = num_kept_C[:, None] - 1
        border_C1 = sorted_CM.gather(1, last_C1)
        reached_C = sum_CM.gather(1, last_C1)[:, 0] >= target_C
        kept_back_C = pieces_CxM.amin(2).amax(1)
        complete_C = reached_C & (border_C1[:, 0] >= kept_back_C)
        complete = complete_C.all() | (num >= _widest_piece(head))
        # Asked of all: a rank that rounds otherwise must not leave the others waiting.
        if all_reduce(complete.int(), head.vocab_axis, "min"):
            break
        num *= 2
    return Nucleus(
        border_C=border_C1[:, 0],
        num_at_border_C=num_kept_C - (sorted_CM > border_C1).sum(1),
        mass_C=sum_CM.gather(1, last_C1)[:, 0],
    )


def _widest_piece(head: Head) -> int:
    return -(-head.vocab_size // head.vocab_axis.degree)


def gather_largest(
    head: Head,
    logits_CV: Tensor,
    num: int,
    peaks_CG: Tensor | None = None,
    rows_N: Tensor | None = None,
) -> Tensor:
    """Return each rank's largest logits ``[C, x, num]``, unordered; -inf where it has fewer.

    Args:
        head: this rank's piece.
        logits_CV: a chunk's local logits.
        num: of each rank.
        peaks_CG: see `largest.find_largest`.
        rows_N: the same.
    """
    num, degree = min(num, _widest_piece(head)), head.vocab_axis.degree
    largest_CM = find_largest(logits_CV, min(num, logits_CV.shape[1]), peaks_CG, rows_N)
    largest_CM = functional.pad(largest_CM, (0, num - largest_CM.shape[1]), value=-torch.inf)
    return all_gather(largest_CM, head.vocab_axis).reshape(-1, degree, num)
