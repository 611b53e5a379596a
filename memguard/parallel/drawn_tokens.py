"""Tokens drawn from the most likely ones, vocabulary sharded: a number in [0, 1) decides each.

    scheme     as in `truncation`: temperature, then top-k, then top-p, with its ties
    weight_CV  exp(logits - max), 0 where a token is cut off     [C, V/x]

    before_C   = sum over the ranks before of their weights, after an all-gather over x of C numbers
    token      = first id whose weights up to and with it exceed uniform * sum of all weights

Ids keep their order, so logits that round otherwise move a border by their last bits; in order of
probability two tokens would change places. The sums are float64.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from memguard.parallel.collectives import all_gather, all_reduce
from memguard.parallel.head import Head, compute_logits, iterate_chunks, max_of_piece, widen
from memguard.parallel.mesh import Axis
from memguard.parallel.truncation import Truncation, find_nucleus, gather_largest


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnTokens:
    """One token drawn after each of N."""

    ids_N: Tensor
    logprob_N: Tensor
    """Log-probability (nats) with which it is drawn; NaN where the logits are not finite."""


@torch.no_grad()
def draw_tokens(
    head: Head, hidden_ND: Tensor, uniform_N: Tensor, truncation: Truncation
) -> DrawnTokens:
    """Return one token for each of N numbers; equal numbers and logits, equal tokens.

    Args:
        head: this rank's piece; computes in fp32 (float64 stays), whatever autocast says.
        hidden_ND: local hidden states ``[N, D/y]``.
        uniform_N: float64 in [0, 1), the same on all ranks that hold a part of the model.
        truncation: what is drawn from.
    """
    head, hidden_ND = widen(head, hidden_ND)
    # What is gathered over x takes no more than the logits of a whole chunk.
    rows_at_once = max(1, head.chunk_tokens // head.vocab_axis.degree)
    head = replace(head, chunk_tokens=rows_at_once)
    ids_N = torch.zeros(len(hidden_ND), dtype=torch.int64, device=hidden_ND.device)
    logprob_N = torch.empty(len(hidden_ND), dtype=torch.float64, device=hidden_ND.device)
    for rows in iterate_chunks(head, len(hidden_ND)):
        logits_CV = compute_logits(head, hidden_ND[rows]) / truncation.temperature
        weight_CV = _weigh(head, logits_CV, truncation)
        ids_N[rows], logprob_N[rows] = _invert(head, weight_CV, uniform_N[rows])
    return DrawnTokens(ids_N=ids_N, logprob_N=logprob_N)


def _weigh(head: Head, logits_CV: Tensor, truncation: Truncation) -> Tensor:
    """Return local weights ``[C, V/x]``, float64; 0 where a token is cut off."""
    axis, top_k, top_p = head.vocab_axis, truncation.top_k, truncation.top_p
    if top_k is not None and top_k < head.vocab_size:
        border_C = gather_largest(head, logits_CV, top_k).flatten(1).topk(top_k).values[:, -1]
        logits_CV = logits_CV.masked_fill(logits_CV < border_C[:, None], -torch.inf)
    max_C = all_reduce(max_of_piece(logits_CV), axis, "max")
    weight_CV = (logits_CV - max_C[:, None]).double().exp_()
    if top_p is None or top_p >= 1:
        return weight_CV
    mass_C = all_reduce((logits_CV - max_C[:, None]).exp_().sum(1), axis)
    nucleus = find_nucleus(head, logits_CV, max_C, mass_C, top_p)
    tied_CV = logits_CV == nucleus.border_C[:, None]
    # Of the tokens at the border the lowest ids stay, which are those of the first ranks.
    sum_Cx = all_gather(tied_CV.sum(1, keepdim=True), axis).cumsum(1)
    rank_CV = tied_CV.cumsum(1) + _before(sum_Cx, axis)[:, None]
    cut_CV = logits_CV < nucleus.border_C[:, None]
    cut_CV |= tied_CV & (rank_CV > nucleus.num_at_border_C[:, None])
    return weight_CV.masked_fill_(cut_CV, 0)


def _invert(head: Head, weight_CV: Tensor, uniform_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids ``[C]`` and log-probabilities of the tokens at which the numbers point."""
    axis = head.vocab_axis
    if weight_CV.shape[1] == 0:
        weight_CV = weight_CV.new_zeros((len(weight_CV), 1))
    local_CV = weight_CV.cumsum(1)
    sum_Cx = all_gather(local_CV[:, -1:], axis).cumsum(1)
    total_C = sum_Cx[:, -1]
    # Below the total, even where the product is rounded up to it.
    wanted_C1 = (uniform_C.to(total_C) * total_C).minimum(total_C * (1 - 2**-52))[:, None]
    is_here_C = (sum_Cx <= wanted_C1).sum(1) == axis.rank
    wanted_C1 = wanted_C1 - _before(sum_Cx, axis)[:, None]
    # Not beyond the last that has weight, where the difference is rounded up.
    last_C1 = torch.searchsorted(local_CV, local_CV[:, -1:].contiguous())
    local_C1 = torch.searchsorted(local_CV, wanted_C1, right=True).minimum(last_C1)
    # Where weights are no numbers.
    local_C1 = local_C1.clamp_max(weight_CV.shape[1] - 1)
    found_2C = torch.stack([local_C1 + head.first_token, weight_CV.gather(1, local_C1)])[..., 0]
    ids_C, drawn_C = all_reduce(found_2C.masked_fill(~is_here_C, 0), axis)
    return ids_C.long(), (drawn_C / total_C).log()


def _before(sum_Cx: Tensor, axis: Axis) -> Tensor:
    """Return the sum of the ranks before, of sums over all ranks up to each."""
    return functional.pad(sum_Cx, (1, 0))[:, axis.rank]
