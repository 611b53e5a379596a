"""Scores of single tokens over a sharded vocabulary, in fp32.

    hidden_ND  [N, D/y]    last hidden states, replicated over x
    weight_VD  [V/x, D/y]  the head, widened to fp32 for scores; bias_V [V/x]
    labels_N   [N]         the token that follows each position, replicated

    for chunks of C tokens:
      logits_CV = steps(all-reduce over y (hidden_CD @ weight_VD.T) + bias_V)
      best_C, argmax_C, other_C = from each rank's values, after an all-gather over x of 3 C numbers
                  (only best_C, by an all-reduce over x, if argmax and margin are not requested),
                  and C more, logits[label], for ranks
      sums_C    = all-reduce over x of 2 to 6 C numbers, with d = logits_CV - best_C:
                  logits[label], sum e^d, sum e^d d, sum e^d d^2, sum d, number above the label
      logprob_C = logits[label] - best_C - log sum e^d
      is_best_C = 1 where logits[label] = best_C, else 0
      rank_C    = 1 + number of tokens v with logits[v] > logits[label] + a margin

The sums are relative to the best logit, which keeps cancellation in the variance small.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memguard.config.settings import SamplingScheme
from memguard.model.lm_head import (
    Head,
    compute_logits,
    iterate_chunks,
    max_of_piece,
    pick_label,
    scoring,
    widen,
)
from memguard.model.truncation import find_first, find_peaks, raise_peaks, score_truncated
from memguard.parallel.collectives import all_gather, all_reduce

EXTRA_SCORES = frozenset({"entropy", "is_best", "mean_logprob", "rank", "variance_logprob"})
# On a CPU: with fewer rows, a matmul is limited by reading the head; with more logits, they do not
# stay in the cache between two sums over them.
_CPU_CHUNK_TOKENS, _CPU_CHUNK_LOGITS = 128, 1 << 20
_CPU_BLOCK_LOGITS = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """Scores of N tokens, computed in fp32; None if not requested."""

    logprob_N: Tensor
    """Log-probability of the label (nats)."""
    argmax_N: Tensor | None = None
    """Most likely token, the lowest id if several tie."""
    margin_N: Tensor | None = None
    """Logit of the label minus that of the best other token; 0 if they tie."""
    entropy_N: Tensor | None = None
    """-sum_v p(v) log p(v) (nats)."""
    mean_logprob_N: Tensor | None = None
    """Mean over the vocabulary of log p(v) (nats)."""
    variance_logprob_N: Tensor | None = None
    """Variance of log p(v) with v drawn from p (nats squared); the mean of log p(v) is -entropy."""
    is_best_N: Tensor | None = None
    """1 if no token has a larger logit than the label, also where several tie; else 0."""
    rank_N: Tensor | None = None
    """1 + number of tokens above the label; 1 in a row with NaN. No decoding that prefers likelier
    tokens gives the label more than 1/rank."""
    sampled_SN: Tensor | None = None
    """Log-probability of the label under each of S sampling schemes; -inf if it is truncated."""


@torch.no_grad()
def score_tokens(
    head: Head,
    hidden_ND: Tensor,
    labels_N: Tensor,
    *,
    needs: frozenset[str] = frozenset(),
    choices: bool = True,
    schemes: Sequence[SamplingScheme] = (),
    rank_margin: float = 0.0,
    not_ranked: Sequence[int] = (),
) -> TokenScores:
    """Return log-probability, argmax and margin of N labels, and the scores in ``needs``.

    Args:
        head: this rank's shard of the head; computes in fp32 (float64 stays), ignoring autocast.
        hidden_ND: local hidden states ``[N, D/y]``.
        labels_N: ``[N]`` token ids.
        needs: any of `EXTRA_SCORES`.
        choices: whether to compute argmax and margin.
        schemes: sampling schemes, see `truncation.score_truncated`.
        rank_margin: a token is above the label if its logit is larger by more than this.
        not_ranked: token ids that are above no label, such as those that decoding suppresses.
    """
    unknown = needs - EXTRA_SCORES
    assert not unknown, f"the head does not compute {sorted(unknown)}"
    assert head.vocab_size < 2**24, "fp32 holds every id exactly"
    head, hidden_ND = widen(head, hidden_ND)
    head = replace(head, chunk_tokens=_choose_chunk(head, hidden_ND.device, bool(schemes)))
    names = ("logprob", *(("margin",) if choices else ()), *sorted(needs))
    scores_SN = hidden_ND.new_empty((len(names), len(labels_N)))
    sampled_SN = hidden_ND.new_empty((len(schemes), len(labels_N)))
    argmax_N = labels_N.new_empty(len(labels_N), dtype=torch.int64)
    # One buffer for all chunks, because allocating it takes as long as a sum over it.
    num_rows = min(head.chunk_tokens, len(labels_N))
    buffer_CV = hidden_ND.new_empty((num_rows, head.num_tokens))
    for rows in iterate_chunks(head, len(labels_N)):
        labels_C = labels_N[rows]
        logits_CV = buffer_CV[: len(labels_C)]
        _write_logits(head, hidden_ND[rows], logits_CV)
        peaks_CG = other_C = None
        places = head.local_labels(labels_C)
        own = [pick_label(logits_CV, *places, -torch.inf)] if "rank" in needs else []
        if choices:
            found = _find_best(head, logits_CV, labels_C, own)
            best_C, argmax_N[rows], other_C, peaks_CG, *own = found
        else:
            pieces = torch.stack([max_of_piece(logits_CV), *own])
            best_C, *own = all_reduce(pieces, head.vocab_axis, "max")
        for number, scheme in enumerate(schemes):
            if not scheme.is_plain:
                sampled_SN[number, rows] = score_truncated(
                    head, logits_CV, labels_C, scheme, peaks_CG
                )
        border_C = own[0] + rank_margin if own else None
        scores = _sum_up(head, logits_CV, labels_C, best_C, other_C, needs, border_C, not_ranked)
        scores_SN[:, rows] = torch.stack([scores[name] for name in names])
        for number, scheme in enumerate(schemes):
            if scheme.is_plain:
                sampled_SN[number, rows] = scores["logprob"]
    fields = {f"{name}_N": score_N for name, score_N in zip(names, scores_SN, strict=True)}
    return TokenScores(
        argmax_N=argmax_N if choices else None, sampled_SN=sampled_SN if schemes else None, **fields
    )


def _choose_chunk(head: Head, device: torch.device, gathers: bool) -> int:
    """Return C, so that tensors gathered over x take no more than the logits of a whole chunk."""
    size = max(1, head.chunk_tokens // (head.vocab_axis.degree if gathers else 1))
    if device.type == "cpu":
        # The same on all ranks, independent of the size of each shard.
        widest = -(-head.vocab_size // head.vocab_axis.degree)
        size = min(size, max(_CPU_CHUNK_TOKENS, _CPU_CHUNK_LOGITS // max(1, widest)))
    return size


def _write_logits(head: Head, hidden_CD: Tensor, logits_CV: Tensor) -> None:
    if head.weight_VD is None or head.steps or head.feature_axis.degree > 1:
        logits_CV.copy_(compute_logits(head, hidden_CD))
        return
    with scoring(head, hidden_CD.device):
        torch.mm(hidden_CD, head.weight_VD.T, out=logits_CV)
    if head.bias_V is not None:
        logits_CV.add_(head.bias_V)


def _choose_block(logits_CV: Tensor) -> int:
    """Return the number of rows that are summed at a time; all rows on a GPU."""
    num_rows, width = logits_CV.shape
    if logits_CV.device.type == "cpu" and width:
        # Each thread processes a part of the rows and has its own cache.
        num_rows = min(num_rows, _CPU_BLOCK_LOGITS * torch.get_num_threads() // width)
    return max(1, num_rows)


def _sum_up(
    head: Head,
    logits_CV: Tensor,
    labels_C: Tensor,
    best_C: Tensor,
    other_C: Tensor | None,
    needs: frozenset[str],
    border_C: Tensor | None,
    not_ranked: Sequence[int],
) -> dict[str, Tensor]:
    """Return one chunk's scores except argmax; overwrites the chunk's logits."""
    names = ["label", "exp"]
    if "mean_logprob" in needs:
        names.append("below")
    if needs & {"entropy", "variance_logprob"}:
        names.append("first")
    if "variance_logprob" in needs:
        names.append("second")
    size = _choose_block(logits_CV)
    if border_C is not None:
        names.append("above")
    # If other sums need d, e^d must not overwrite it.
    exp_BV = torch.empty_like(logits_CV[:size]) if len(names) > 2 else None
    local = range(head.first_token, head.first_token + head.num_tokens)
    places = [local.index(token) for token in not_ranked if token in local]
    parts_PC = logits_CV.new_empty((len(names), len(labels_C)))
    parts_PC[0] = pick_label(logits_CV, *head.local_labels(labels_C))
    for first in range(0, len(labels_C), size):
        rows = slice(first, first + size)
        below_BV, sums = logits_CV[rows], dict(zip(names, parts_PC[:, rows], strict=True))
        if border_C is not None and exp_BV is not None:
            # As numbers: several times as fast on a CPU as to count what is true. NaN is not above.
            above_BV = torch.gt(below_BV, border_C[rows, None], out=exp_BV[: len(below_BV)])
            above_BV[:, places] = 0
            torch.sum(above_BV, 1, out=sums["above"])
        below_BV.sub_(best_C[rows, None])
        _sum_block(below_BV, exp_BV, sums)
    total = dict(zip(names, all_reduce(parts_PC, head.vocab_axis), strict=True))

    log_sum_C = total["exp"].log()
    scores = {"logprob": total["label"] - best_C - log_sum_C}
    if other_C is not None:
        scores["margin"] = total["label"] - other_C
    if "is_best" in needs:
        scores["is_best"] = (total["label"] == best_C).to(best_C.dtype)
    if "rank" in needs:
        scores["rank"] = (1 + total["above"]).masked_fill(log_sum_C.isnan(), 1)
    if "mean_logprob" in needs:
        scores["mean_logprob"] = total["below"] / head.vocab_size - log_sum_C
    if "entropy" in needs:
        scores["entropy"] = log_sum_C - total["first"] / total["exp"]
    if "variance_logprob" in needs:
        square_C = (total["first"] / total["exp"]) ** 2
        scores["variance_logprob"] = (total["second"] / total["exp"] - square_C).clamp_min(0)
    return scores


def _sum_block(below_BV: Tensor, exp_BV: Tensor | None, sums: dict[str, Tensor]) -> None:
    """Write the sums of a block; may overwrite ``below_BV``, the logits minus the best logit."""
    room = below_BV if exp_BV is None else exp_BV[: len(below_BV)]
    exp_BV = torch.exp(below_BV, out=room)
    torch.sum(exp_BV, 1, out=sums["exp"])
    if "below" in sums:
        torch.sum(below_BV, 1, out=sums["below"])
    for name in ("first", "second"):
        if name in sums:
            torch.sum(exp_BV.mul_(below_BV), 1, out=sums[name])


def _find_best(
    head: Head, logits_CV: Tensor, labels_C: Tensor, own: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the best logit, its lowest token id, the best logit except the label's, and peaks.

    Then the largest over all ranks of each of the other numbers ``[C]`` that are given.
    """
    local_C, here_C = head.local_labels(labels_C)
    if logits_CV.shape[1] == 0:
        best_C = other_C = max_of_piece(logits_CV)
        first_C, peaks_CG = torch.zeros_like(local_C), logits_CV
    else:
        # One search among all tokens but the label, whose result is then compared with the label.
        local_C1, here_C1 = local_C[:, None], here_C[:, None]
        label_C1 = logits_CV.gather(1, local_C1)
        logits_CV.scatter_(1, local_C1, label_C1.masked_fill(here_C1, -torch.inf))
        peaks_CG = find_peaks(logits_CV)
        second_C1 = find_first(logits_CV, peaks_CG)[:, None]
        other_C1 = logits_CV.gather(1, second_C1)
        logits_CV.scatter_(1, local_C1, label_C1)
        raise_peaks(peaks_CG, logits_CV.shape[1], local_C1, label_C1)
        is_best_C1 = (label_C1 > other_C1) | ((label_C1 == other_C1) & (local_C1 < second_C1))
        is_best_C1 &= here_C1
        best_C = label_C1.where(is_best_C1, other_C1)[:, 0]
        first_C = local_C1.where(is_best_C1, second_C1)[:, 0]
        other_C = other_C1[:, 0]
    ids_C = (first_C + head.first_token).to(best_C.dtype)
    pieces_PC = torch.stack([best_C, ids_C, other_C, *own])
    best_xC, ids_xC, other_xC, *own_xC = all_gather(pieces_PC, head.vocab_axis).reshape(
        len(pieces_PC), head.vocab_axis.degree, -1
    )
    best_C = best_xC.amax(0)
    # If several ranks have the best logit, the first of them holds the lowest id.
    winner_C = (best_xC == best_C).int().argmax(0)
    argmax_C = ids_xC.gather(0, winner_C[None]).squeeze(0).long()
    return best_C, argmax_C, other_xC.amax(0), peaks_CG, *(each_xC.amax(0) for each_xC in own_xC)
