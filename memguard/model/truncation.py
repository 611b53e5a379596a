"""Probability of a label under top-k and top-p sampling, over a sharded vocabulary.

    scheme     logits / temperature, then the top_k largest, then the smallest set of those whose
               probability reaches top_p; rules and order are those of `transformers`
    ties       at the border of top_k all tied tokens are kept; at the border of top_p the lowest
               ids are kept until top_p is reached (in transformers this depends on its sort)

    for C/x tokens at a time:
      top_k    peaks_CG = largest logit of each of G groups of the vocabulary; for the rows with
               fewer than k peaks above the label (an all-reduce over x):
               border_C = k-th largest of an all-gather over x of each rank's k + 1 largest
      top_p    m = 64, doubled until enough: nucleus of an all-gather over x of each rank's m
               largest, which is exact if every logit that was not gathered is below the border
      logprob_C = label_C - max_C - log(probability mass that is kept)      -inf if truncated

At most [C/x, V] = [C, V/x] candidates are gathered, and far fewer for confident predictions.

Group g of a chunk's local logits has tokens g, g + G, g + 2G, ...; each of the last few tokens,
which do not fill all groups, is a group of its own. One pass over the logits computes the peaks.
The peaks then replace further passes: they locate the largest logit, give a lower bound on the
number of tokens above a label, and select the tokens that may be among the largest.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from memguard.config.settings import SamplingScheme
from memguard.model.lm_head import Head, max_of_piece, pick_label
from memguard.parallel.collectives import all_gather, all_reduce

# Size of a group: smaller groups have more peaks to read, larger groups more candidates.
_GROUP_TOKENS = 16
_FIRST_CANDIDATES = 64


def find_peaks(logits_CV: Tensor) -> Tensor:
    """Return the largest logit of each group ``[C, G]``."""
    num_groups = logits_CV.shape[1] // _GROUP_TOKENS
    if num_groups == 0:
        return logits_CV.clone()
    size = num_groups * _GROUP_TOKENS
    grouped_CxG = logits_CV[:, :size].reshape(len(logits_CV), _GROUP_TOKENS, num_groups)
    peaks_CG = grouped_CxG.amax(1)
    if size == logits_CV.shape[1]:
        return peaks_CG
    return torch.cat([peaks_CG, logits_CV[:, size:]], 1)


def raise_peaks(peaks_CG: Tensor, width: int, places_C1: Tensor, logits_C1: Tensor) -> None:
    """Update the peaks for one more logit in each row.

    Args:
        peaks_CG: changed in place.
        width: V/x.
        places_C1: indices of the added logits.
        logits_C1: the logits; -inf changes nothing.
    """
    num_groups = width // _GROUP_TOKENS
    size = num_groups * _GROUP_TOKENS
    alone_C1 = places_C1 - size + num_groups
    groups_C1 = torch.where(places_C1 < size, places_C1 % max(1, num_groups), alone_C1)
    peaks_CG.scatter_(1, groups_C1, peaks_CG.gather(1, groups_C1).maximum(logits_C1))


def find_first(logits_CV: Tensor, peaks_CG: Tensor) -> Tensor:
    """Return the index of the largest logit of each row ``[C]``, the first if several tie."""
    best_C1 = peaks_CG.amax(1, keepdim=True)
    ids_CM = _list_members(_argmax(peaks_CG)[:, None], logits_CV.shape[1])
    first_C1 = ids_CM.gather(1, _argmax(logits_CV.gather(1, ids_CM))[:, None])
    # An earlier group may have the same largest logit, and NaN equals nothing: these rows are
    # searched in full.
    doubtful = ((peaks_CG == best_C1).sum(1) != 1).nonzero()[:, 0]
    if len(doubtful):
        first_C1[doubtful, 0] = _argmax(logits_CV[doubtful])
    return first_C1[:, 0]


def find_largest(
    logits_CV: Tensor, num: int, peaks_CG: Tensor | None = None, rows_N: Tensor | None = None
) -> Tensor:
    """Return the ``num`` largest logits of each row, or of the rows ``[N]`` only, unordered.

    They are in the ``num``, at most V/x, groups with the largest peaks: for any other group,
    ``num`` logits are at least as large. Only candidates for them are copied.
    """
    width = logits_CV.shape[1]
    num_groups = width // _GROUP_TOKENS
    if num_groups < 2 * num:
        return _take_largest(logits_CV if rows_N is None else logits_CV[rows_N], num)
    if peaks_CG is None:
        peaks_CG = find_peaks(logits_CV)
    if rows_N is None:
        rows_N = torch.arange(len(logits_CV), device=logits_CV.device)
    groups_NM = _find_places(peaks_CG[rows_N, :num_groups], num)
    places_NM = rows_N[:, None] * width + _list_members(groups_NM, width)
    # Ten times as fast on a CPU as with two indices.
    candidates_NM = logits_CV.reshape(-1).index_select(0, places_NM.flatten()).view_as(places_NM)
    rest_NR = logits_CV[:, num_groups * _GROUP_TOKENS :][rows_N]
    return _take_largest(torch.cat([candidates_NM, rest_NR], 1), num)


def _list_members(groups_CN: Tensor, width: int) -> Tensor:
    """Return the indices ``[C, N * 16]`` of the groups' logits, 16 times for a group of one."""
    num_groups = width // _GROUP_TOKENS
    steps = torch.arange(_GROUP_TOKENS, device=groups_CN.device) * num_groups
    # Tokens that do not fill all groups are numbered as groups G, G + 1, ...
    alone = groups_CN + (_GROUP_TOKENS - 1) * num_groups
    members_CxN = torch.where(
        (groups_CN < num_groups)[:, None], groups_CN[:, None] + steps[:, None], alone[:, None]
    )
    return members_CxN.flatten(1)


def _take_largest(values_CM: Tensor, num: int) -> Tensor:
    if values_CM.shape[1] == num:
        return values_CM
    if values_CM.device.type == "cpu":
        # Several times faster than topk on CPUs.
        return torch.from_numpy(np.partition(values_CM.numpy(), -num, axis=1)[:, -num:])
    return values_CM.topk(num, sorted=False).values


def _find_places(values_CM: Tensor, num: int) -> Tensor:
    """Return the indices of the ``num`` largest values of each row, unordered."""
    if values_CM.device.type == "cpu":
        return torch.from_numpy(np.argpartition(values_CM.numpy(), -num, axis=1)[:, -num:])
    return values_CM.topk(num, sorted=False).indices


def _argmax(values_CM: Tensor) -> Tensor:
    """Return the index of the largest value of each row ``[C]``, the first if several tie."""
    if values_CM.device.type == "cpu":
        # Ten times as fast as torch's argmax on CPUs.
        return torch.from_numpy(values_CM.numpy().argmax(1))
    return values_CM.argmax(1)


def score_truncated(
    head: Head,
    logits_CV: Tensor,
    labels_C: Tensor,
    scheme: SamplingScheme,
    peaks_CG: Tensor | None = None,
) -> Tensor:
    """Return the log-probability ``[C]`` (nats) with which sampling draws each label of a chunk.

    Args:
        head: this rank's shard of the head.
        logits_CV: a chunk's local logits ``[C, V/x]`` after the steps; not changed. Callers choose
            C as a chunk's tokens divided by x.
        labels_C: ``[C]`` token ids.
        scheme: the sampling scheme.
        peaks_CG: peaks of the logits, if already computed; see `find_peaks`.
    """
    if scheme.temperature != 1:
        logits_CV, peaks_CG = logits_CV / scheme.temperature, None
    axis, top_k, top_p = head.vocab_axis, scheme.top_k, scheme.top_p
    local_C, here_C = head.local_labels(labels_C)
    label_C = all_reduce(pick_label(logits_CV, local_C, here_C), axis)
    if top_k is None or top_k >= head.vocab_size:
        return _score_from_all(head, logits_CV, labels_C, label_C, top_p)
    # Few labels of a text that is not memorized are among the top_k. Finding the top_k takes ten
    # times as long as finding that top_k groups have a logit above the label.
    peaks_CG = find_peaks(logits_CV) if peaks_CG is None else peaks_CG
    num_above_C = (peaks_CG > label_C[:, None]).sum(1)
    # Rows with NaN, from damaged weights, must give NaN and not a log-probability of -inf.
    num_above_C.masked_fill_(max_of_piece(peaks_CG).isnan(), -head.vocab_size)
    rows_N = (all_reduce(num_above_C, axis) < top_k).nonzero()[:, 0]
    logprob_C = torch.full_like(label_C, -torch.inf)
    if not len(rows_N):
        return logprob_C
    # One more than top_k: if it ties with the k-th largest, it and perhaps others are kept as well.
    best_NM = gather_largest(head, logits_CV, top_k + 1, peaks_CG, rows_N).flatten(1)
    sorted_NM = best_NM.sort(1, descending=True).values
    border_N1, next_N1 = sorted_NM[:, top_k - 1 : top_k], sorted_NM[:, top_k : top_k + 1]
    label_N = label_C[rows_N]
    # Of a row with NaN the result stays NaN.
    label_N = label_N.masked_fill(label_N < border_N1[:, 0], -torch.inf)
    if (top_p is not None and top_p < 1) or (border_N1 == next_N1).any():
        logits_NV = logits_CV[rows_N]
        kept_NV = logits_NV.masked_fill(logits_NV < border_N1, -torch.inf)
        logprob_C[rows_N] = _score_from_all(head, kept_NV, labels_C[rows_N], label_N, top_p)
        return logprob_C
    max_N1 = sorted_NM[:, :1]
    mass_N = (sorted_NM[:, :top_k] - max_N1).exp_().sum(1)
    logprob_C[rows_N] = label_N - max_N1[:, 0] - mass_N.log()
    return logprob_C


def _score_from_all(
    head: Head, logits_CV: Tensor, labels_C: Tensor, label_C: Tensor, top_p: float | None
) -> Tensor:
    """Return the log-probabilities of labels among the logits above -inf, with top_p applied."""
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
    """The smallest set of tokens whose probability reaches top_p, for each of C rows."""

    border_C: Tensor
    """Smallest logit in the set."""
    num_at_border_C: Tensor
    """Number of tokens with that logit in the set."""
    mass_C: Tensor
    """Sum of exp(logit - max) over the set."""


def find_nucleus(
    head: Head, logits_CV: Tensor, max_C: Tensor, mass_C: Tensor, top_p: float
) -> Nucleus:
    """Return the nucleus of each row.

    ``logits_CV`` are a chunk's local logits, -inf for tokens that are already truncated; ``max_C``
    and ``mass_C`` are the largest logit and the sum of exp(logit - max) over all ranks. The set
    must reach the probability ``top_p``.
    """
    num = _FIRST_CANDIDATES
    while True:
        pieces_CxM = gather_largest(head, logits_CV, num)
        sorted_CM = pieces_CxM.flatten(1).sort(1, descending=True).values
        sum_CM = (sorted_CM - max_C[:, None]).exp().cumsum(1)
        target_C = top_p * mass_C
        # A token is kept while the mass above it is below top_p; the first is always kept.
        num_kept_C = 1 + (sum_CM[:, :-1] < target_C[:, None]).sum(1)
        last_C1 = num_kept_C[:, None] - 1
        border_C1 = sorted_CM.gather(1, last_C1)
        reached_C = sum_CM.gather(1, last_C1)[:, 0] >= target_C
        kept_back_C = pieces_CxM.amin(2).amax(1)
        complete_C = reached_C & (border_C1[:, 0] >= kept_back_C)
        complete = complete_C.all() | (num >= _widest_piece(head))
        # Agreed over all ranks: a rank that rounds differently must not leave the others waiting.
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
    """Return each rank's largest logits ``[C, x, num]``, unordered; padded with -inf.

    ``peaks_CG`` and ``rows_N`` are those of `find_largest`.
    """
    num, degree = min(num, _widest_piece(head)), head.vocab_axis.degree
    largest_CM = find_largest(logits_CV, min(num, logits_CV.shape[1]), peaks_CG, rows_N)
    largest_CM = functional.pad(largest_CM, (0, num - largest_CM.shape[1]), value=-torch.inf)
    return all_gather(largest_CM, head.vocab_axis).reshape(-1, degree, num)
