"""The largest logits of each row, found by groups.

    logits_CV  [C, V/x]   a chunk's local logits
    peaks_CG   [C, G]     largest logit of each group; group g has g, g + G, g + 2G, ..., and the
                          last few, which make no whole row of groups, are groups of their own

One pass over the logits gives the peaks, and these answer what would take a pass each: where the
largest is, how many tokens at least are above a label, which tokens may be among the num largest.
"""

import numpy as np
import torch
from torch import Tensor

# Of a group, whose largest stands for all: what the groups save and what they cost are equal here.
_GROUP_TOKENS = 16


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
    """Let the peaks know of one more logit in each row.

    Args:
        peaks_CG: changed.
        width: V/x.
        places_C1: where the logits stand.
        logits_C1: what they are; -inf changes nothing.
    """
    num_groups = width // _GROUP_TOKENS
    size = num_groups * _GROUP_TOKENS
    alone_C1 = places_C1 - size + num_groups
    groups_C1 = torch.where(places_C1 < size, places_C1 % max(1, num_groups), alone_C1)
    peaks_CG.scatter_(1, groups_C1, peaks_CG.gather(1, groups_C1).maximum(logits_C1))


def find_first(logits_CV: Tensor, peaks_CG: Tensor) -> Tensor:
    """Return where the largest of each row is ``[C]``, the first of several."""
    best_C1 = peaks_CG.amax(1, keepdim=True)
    ids_CM = _list_members(_argmax(peaks_CG)[:, None], logits_CV.shape[1])
    first_C1 = ids_CM.gather(1, _argmax(logits_CV.gather(1, ids_CM))[:, None])
    # Another group may have the same before it; and what is no number is equal to nothing.
    doubtful = ((peaks_CG == best_C1).sum(1) != 1).nonzero()[:, 0]
    if len(doubtful):
        first_C1[doubtful, 0] = _argmax(logits_CV[doubtful])
    return first_C1[:, 0]


def find_largest(
    logits_CV: Tensor, num: int, peaks_CG: Tensor | None = None, rows_N: Tensor | None = None
) -> Tensor:
    """Return the ``num`` largest of each row, or of the rows ``[N]`` alone, unordered.

    They are in the ``num`` groups with the largest peaks: each other group is beaten by as many.

    Args:
        logits_CV: of which none is copied but those that may be among them.
        num: at most V/x.
        peaks_CG: where they are at hand.
        rows_N: which rows; None is all.
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
    """Return the places ``[C, N * 16]`` of the groups' logits; a group of one has it 16 times."""
    num_groups = width // _GROUP_TOKENS
    steps = torch.arange(_GROUP_TOKENS, device=groups_CN.device) * num_groups
    # What makes no whole row of groups stands behind them, in place of group G and what follows.
    alone = groups_CN + (_GROUP_TOKENS - 1) * num_groups
    members_CxN = torch.where(
        (groups_CN < num_groups)[:, None], groups_CN[:, None] + steps[:, None], alone[:, None]
    )
    return members_CxN.flatten(1)


def _take_largest(values_CM: Tensor, num: int) -> Tensor:
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


def _argmax(values_CM: Tensor) -> Tensor:
    """Return where the largest of each row is ``[C]``, the first of several."""
    if values_CM.device.type == "cpu":
        # Ten times as fast as torch's there.
        return torch.from_numpy(values_CM.numpy().argmax(1))
    return values_CM.argmax(1)
