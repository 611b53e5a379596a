"""Probability of a label when sampling from the most likely tokens only, vocabulary sharded.

    scheme     logits / temperature, then the top_k largest, then the smallest set of those whose
               probability reaches top_p; the rules, and the order, of `transformers`
    ties       at the border of top_k all stay; at that of top_p the lowest ids stay, as many as
               it takes (transformers leaves them to its sort)

    for chunks of C/x tokens:
      top_k    peaks_CG = largest logit of each of G groups of the vocabulary; of the rows with
               fewer than k peaks above the label (an all-reduce over x):
               border_C = k-th largest of an all-gather over x of each rank's k + 1 largest
      top_p    m = 64, doubled until enough: nucleus of an all-gather over x of each rank's m
               largest, which is right when no rank kept back more than its border
      logprob_C = label_C - max_C - log(probability mass that stays)     -inf where it is cut off

At most [C/x, V] = [C, V/x] candidates are gathered, and far fewer where the model is sure.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from memguard.parallel.collectives import all_gather, all_reduce
from memguard.parallel.head import (
    Head,
    compute_logits,
    iterate_chunks,
    max_of_piece,
    pick_label,
    widen,
)

_FIRST_CANDIDATES = 64
# Of a group, whose largest stands for all: what the groups save and what they cost are equal here.
_GROUP_TOKENS = 16


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


@torch.no_grad()
def log_truncated(
    head: Head,
    hidden_ND: Tensor,
    labels_N: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Return the log-probability ``[N]`` (nats, fp32) with which sampling draws each label.

    Args:
        head: this rank's piece; computes in fp32 (float64 stays), whatever autocast says.
        hidden_ND: local hidden states ``[N, D/y]``.
        labels_N: ``[N]`` token ids.
        temperature: see `Truncation`.
        top_k: the same.
        top_p: the same.
    """
    truncation = Truncation(temperature=temperature, top_k=top_k, top_p=top_p)
    head, hidden_ND = widen(head, hidden_ND)
    # What is gathered over x takes no more than the logits of a whole chunk.
    rows_at_once = max(1, head.chunk_tokens // head.vocab_axis.degree)
    head = replace(head, chunk_tokens=rows_at_once)
    logprob_N = hidden_ND.new_empty(len(labels_N))
    for rows in iterate_chunks(head, len(labels_N)):
        logits_CV = compute_logits(head, hidden_ND[rows])
        logprob_N[rows] = score_truncated(head, logits_CV, labels_N[rows], truncation)
    return logprob_N


def score_truncated(
    head: Head, logits_CV: Tensor, labels_C: Tensor, truncation: Truncation
) -> Tensor:
    """Return the log-probability ``[C]`` (nats) with which sampling draws each label of a chunk.

    Args:
        head: this rank's piece.
        logits_CV: a chunk's local logits ``[C, V/x]`` after the steps; left as they are. Callers
            keep C at `rows_at_once`.
        labels_C: ``[C]`` token ids.
        truncation: from what is drawn.
    """
    if truncation.temperature != 1:
        logits_CV = logits_CV / truncation.temperature
    axis, top_k, top_p = head.vocab_axis, truncation.top_k, truncation.top_p
    local_C, here_C = head.local_labels(labels_C)
    label_C = all_reduce(pick_label(logits_CV, local_C, here_C), axis)
    if top_k is None or top_k >= head.vocab_size:
        return _score_from_all(head, logits_CV, labels_C, label_C, top_p)
    # Few labels of a text that is not known by heart are among the likeliest, and finding those
    # takes ten times as long as telling that as many groups have one above the label.
    peaks_CG = _find_peaks(logits_CV)
    num_above_C = (peaks_CG > label_C[:, None]).sum(1)
    # What damaged weights say of a label is not that it is never drawn.
    num_above_C.masked_fill_(max_of_piece(peaks_CG).isnan(), -head.vocab_size)
    rows = (all_reduce(num_above_C, axis) < top_k).nonzero()[:, 0]
    logprob_C = torch.full_like(label_C, -torch.inf)
    if len(rows):
        logprob_C[rows] = _score_top_k(
            head, logits_CV[rows], peaks_CG[rows], labels_C[rows], label_C[rows], top_k, top_p
        )
    return logprob_C


def _score_top_k(
    head: Head,
    logits_CV: Tensor,
    peaks_CG: Tensor,
    labels_C: Tensor,
    label_C: Tensor,
    top_k: int,
    top_p: float | None,
) -> Tensor:
    # One more than stays: where it ties with the last of those, it and maybe others stay as well.
    best_CM = _gather_largest(head, logits_CV, top_k + 1, peaks_CG).flatten(1)
    sorted_CK = _take_largest(best_CM, top_k + 1).sort(1, descending=True).values
    border_C1, next_C1 = sorted_CK[:, top_k - 1 : top_k], sorted_CK[:, top_k:]
    if (top_p is not None and top_p < 1) or (border_C1 == next_C1).any():
        kept_CV = logits_CV.masked_fill(logits_CV < border_C1, -torch.inf)
        return _score_from_all(head, kept_CV, labels_C, label_C, top_p)
    max_C1 = sorted_CK[:, :1]
    mass_C = (sorted_CK[:, :top_k] - max_C1).exp_().sum(1)
    cut_C = (label_C < border_C1[:, 0]) & ~mass_C.isnan()
    return (label_C - max_C1[:, 0] - mass_C.log()).masked_fill_(cut_C, -torch.inf)


def _score_from_all(
    head: Head, logits_CV: Tensor, labels_C: Tensor, label_C: Tensor, top_p: float | None
) -> Tensor:
    """Return the log-probabilities of labels that are drawn from what is not -inf, or its top_p."""
    axis = head.vocab_axis
    max_C = all_reduce(max_of_piece(logits_CV), axis, "max")
    mass_C = all_reduce((logits_CV - max_C[:, None]).exp_().sum(1), axis)
    if top_p is None or top_p >= 1:
        return label_C - max_C - mass_C.log()
    nucleus = _find_nucleus(head, logits_CV, max_C, mass_C, top_p)
    ids_V = torch.arange(logits_CV.shape[1], device=labels_C.device) + head.first_token
    before_CV = (logits_CV == nucleus.border_C[:, None]) & (ids_V < labels_C[:, None])
    num_before_C = all_reduce(before_CV.sum(1), axis)
    cut_C = label_C < nucleus.border_C
    cut_C |= (label_C == nucleus.border_C) & (num_before_C >= nucleus.num_at_border_C)
    cut_C &= ~nucleus.mass_C.isnan()
    return (label_C - max_C - nucleus.mass_C.log()).masked_fill(cut_C, -torch.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Nucleus:
    """The smallest set of tokens whose probability reaches top_p, of C rows."""

    border_C: Tensor
    """Smallest logit in it."""
    num_at_border_C: Tensor
    """How many of the tokens with that logit are in it."""
    mass_C: Tensor
    """Sum of exp(logit - max) over it."""


def _find_nucleus(
    head: Head, logits_CV: Tensor, max_C: Tensor, mass_C: Tensor, top_p: float
) -> _Nucleus:
    num = _FIRST_CANDIDATES
    while True:
        pieces_CxM = _gather_largest(head, logits_CV, num)
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
    return _Nucleus(
        border_C=border_C1[:, 0],
        num_at_border_C=num_kept_C - (sorted_CM > border_C1).sum(1),
        mass_C=sum_CM.gather(1, last_C1)[:, 0],
    )


def _widest_piece(head: Head) -> int:
    return -(-head.vocab_size // head.vocab_axis.degree)


def _gather_largest(
    head: Head, logits_CV: Tensor, num: int, peaks_CG: Tensor | None = None
) -> Tensor:
    """Return each rank's largest logits ``[C, x, num]``, unordered; -inf where it has fewer."""
    num, degree = min(num, _widest_piece(head)), head.vocab_axis.degree
    largest_CM = _find_largest(logits_CV, min(num, logits_CV.shape[1]), peaks_CG)
    largest_CM = functional.pad(largest_CM, (0, num - largest_CM.shape[1]), value=-torch.inf)
    return all_gather(largest_CM, head.vocab_axis).reshape(-1, degree, num)


def _find_peaks(logits_CV: Tensor) -> Tensor:
    """Return the largest logit of each group ``[C, G]``; group g has g, g + G, g + 2G, ...

    The last few logits, which make no whole row of groups, are groups of their own.
    """
    num_groups = logits_CV.shape[1] // _GROUP_TOKENS
    if num_groups == 0:
        return logits_CV
    grouped_CxG, rest_CR = _cut_groups(logits_CV, num_groups)
    return torch.cat([grouped_CxG.amax(1), rest_CR], 1)


def _find_largest(logits_CV: Tensor, num: int, peaks_CG: Tensor | None) -> Tensor:
    """Return the ``num`` largest of each row, unordered.

    They are in the ``num`` groups with the largest peaks: each other group is beaten by as many.
    """
    num_groups = logits_CV.shape[1] // _GROUP_TOKENS
    if num_groups < 2 * num:
        return _take_largest(logits_CV, num)
    if peaks_CG is None:
        peaks_CG = _find_peaks(logits_CV)
    grouped_CxG, rest_CR = _cut_groups(logits_CV, num_groups)
    groups_CN = _find_places(peaks_CG[:, :num_groups], num)
    spread_CxN = groups_CN[:, None].expand(-1, _GROUP_TOKENS, -1)
    candidates_CM = grouped_CxG.gather(2, spread_CxN).flatten(1)
    return _take_largest(torch.cat([candidates_CM, rest_CR], 1), num)


def _cut_groups(logits_CV: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    size = num_groups * _GROUP_TOKENS
    grouped_CGM = logits_CV[:, :size].reshape(len(logits_CV), _GROUP_TOKENS, num_groups)
    return grouped_CGM, logits_CV[:, size:]


def _take_largest(values_CM: Tensor, num: int) -> Tensor:
    """Return the ``num`` largest of each row, unordered."""
    if values_CM.shape[1] == num:
        return values_CM
    if values_CM.device.type == "cpu":
        # Several times faster than topk there.
        return torch.from_numpy(np.partition(values_CM.numpy(), -num, axis=1)[:, -num:])
    return values_CM.topk(num, sorted=False).values


def _find_places(values_CM: Tensor, num: int) -> Tensor:
    """Return where the ``num`` largest of each row are, unordered."""
    if values_CM.device.type == "cpu":
        return torch.from_numpy(np.argpartition(values_CM.numpy(), -num, axis=1)[:, -num:])
    return values_CM.topk(num, sorted=False).indices
