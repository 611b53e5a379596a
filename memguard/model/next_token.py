"""The most likely or a sampled next token over a sharded vocabulary, with logits in fp32.

    hidden_ND  [N, D/y]    last hidden states, replicated over x
    weight_VD  [V/x, D/y]  the head, widened to fp32

    for chunks of C tokens:
      logits_CV = steps(all-reduce over y (hidden_CD @ weight_VD.T) + bias_V)

most likely (`find_best`)

      best_CK   = K largest of an all-gather over x of each rank's K largest, with their ids
      sum_C     = all-reduce over x of sum e^(logits_CV - best_C0)
      logprob   = best_CK - best_C0 - log sum_C

Tied tokens are ordered by id, lowest first, also if a tie crosses the K-th place. The result does
not depend on the device or the mesh, except where logits round differently.

sampled (`draw_tokens`): a number in [0, 1) selects each token, under a scheme as in `truncation`

      weight_CV = exp(logits - max), 0 for truncated tokens         [C, V/x]
      before_C  = sum of the weights of the preceding ranks, after an all-gather over x
      token     = first id whose cumulative weight exceeds uniform * sum of all weights

Tokens stay in the order of ids. Different rounding of logits then shifts a boundary between tokens
by its last bits only; in order of probability two tokens could swap. The sums are float64.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from memguard.config.settings import SamplingScheme
from memguard.model.lm_head import Head, compute_logits, iterate_chunks, max_of_piece, widen
from memguard.model.truncation import find_largest, find_nucleus, gather_largest
from memguard.parallel.collectives import all_gather, all_reduce
from memguard.parallel.mesh import Axis


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnTokens:
    """One sampled token after each of N positions."""

    ids_N: Tensor
    logprob_N: Tensor
    """Log-probability (nats) under the scheme; NaN if the logits are not finite."""


@torch.no_grad()
def draw_tokens(
    head: Head, hidden_ND: Tensor, uniform_N: Tensor, scheme: SamplingScheme
) -> DrawnTokens:
    """Return one token for each of N random numbers; equal numbers and logits give equal tokens.

    Args:
        head: this rank's shard of the head; computes in fp32 (float64 stays), ignoring autocast.
        hidden_ND: local hidden states ``[N, D/y]``.
        uniform_N: float64 in [0, 1), the same on all ranks that hold a part of the model.
        scheme: the sampling scheme.
    """
    head, hidden_ND = widen(head, hidden_ND)
    # The tensors gathered over x take no more memory than the logits of a whole chunk.
    rows_at_once = max(1, head.chunk_tokens // head.vocab_axis.degree)
    head = replace(head, chunk_tokens=rows_at_once)
    ids_N = torch.zeros(len(hidden_ND), dtype=torch.int64, device=hidden_ND.device)
    logprob_N = torch.empty(len(hidden_ND), dtype=torch.float64, device=hidden_ND.device)
    for rows in iterate_chunks(head, len(hidden_ND)):
        logits_CV = compute_logits(head, hidden_ND[rows]) / scheme.temperature
        weight_CV = _weigh(head, logits_CV, scheme)
        ids_N[rows], logprob_N[rows] = _invert(head, weight_CV, uniform_N[rows])
    return DrawnTokens(ids_N=ids_N, logprob_N=logprob_N)


def _weigh(head: Head, logits_CV: Tensor, scheme: SamplingScheme) -> Tensor:
    """Return local weights ``[C, V/x]``, float64; 0 for truncated tokens."""
    axis, top_k, top_p = head.vocab_axis, scheme.top_k, scheme.top_p
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
    # Of tied tokens at the border the lowest ids are kept, which are on the first ranks.
    sum_Cx = all_gather(tied_CV.sum(1, keepdim=True), axis).cumsum(1)
    rank_CV = tied_CV.cumsum(1) + _before(sum_Cx, axis)[:, None]
    cut_CV = logits_CV < nucleus.border_C[:, None]
    cut_CV |= tied_CV & (rank_CV > nucleus.num_at_border_C[:, None])
    return weight_CV.masked_fill_(cut_CV, 0)


def _invert(head: Head, weight_CV: Tensor, uniform_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids ``[C]`` and log-probabilities of the tokens that the numbers select."""
    axis = head.vocab_axis
    if weight_CV.shape[1] == 0:
        weight_CV = weight_CV.new_zeros((len(weight_CV), 1))
    local_CV = weight_CV.cumsum(1)
    sum_Cx = all_gather(local_CV[:, -1:], axis).cumsum(1)
    total_C = sum_Cx[:, -1]
    # Keeps the product below the total, even if it is rounded up.
    wanted_C1 = (uniform_C.to(total_C) * total_C).minimum(total_C * (1 - 2**-52))[:, None]
    is_here_C = (sum_Cx <= wanted_C1).sum(1) == axis.rank
    wanted_C1 = wanted_C1 - _before(sum_Cx, axis)[:, None]
    # Keeps the index at or before the last token with weight, even if the difference is rounded up.
    last_C1 = torch.searchsorted(local_CV, local_CV[:, -1:].contiguous())
    local_C1 = torch.searchsorted(local_CV, wanted_C1, right=True).minimum(last_C1)
    # Keeps the index valid if weights are NaN.
    local_C1 = local_C1.clamp_max(weight_CV.shape[1] - 1)
    drawn_2C = torch.stack([local_C1 + head.first_token, weight_CV.gather(1, local_C1)])[..., 0]
    ids_C, drawn_C = all_reduce(drawn_2C.masked_fill(~is_here_C, 0), axis)
    return ids_C.long(), (drawn_C / total_C).log()


def _before(sum_Cx: Tensor, axis: Axis) -> Tensor:
    """Return the sum over the preceding ranks, from cumulative sums over the ranks."""
    return functional.pad(sum_Cx, (1, 0))[:, axis.rank]


@dataclass(frozen=True, kw_only=True, slots=True)
class BestTokens:
    """The K most likely tokens after each of N positions, best first; ties by lowest id."""

    ids_NK: Tensor
    logprob_NK: Tensor
    """Log-probability (nats, fp32); NaN in the whole row if its logits are not finite."""


@torch.no_grad()
def find_best(head: Head, hidden_ND: Tensor, num: int) -> BestTokens:
    """Return the ``num`` most likely next tokens; all tokens if the vocabulary has fewer.

    Args:
        head: this rank's shard of the head; computes in fp32 (float64 stays), ignoring autocast.
        hidden_ND: local hidden states ``[N, D/y]``.
        num: K, at least 1.
    """
    assert num >= 1, "at least one token"
    assert head.vocab_size < 2**24, "fp32 holds every id exactly"
    head, hidden_ND = widen(head, hidden_ND)
    num = min(num, head.vocab_size)
    # The tensors gathered over x take no more memory than the logits of a whole chunk.
    rows_at_once = max(1, head.chunk_tokens // head.vocab_axis.degree)
    head = replace(head, chunk_tokens=rows_at_once)
    ids_NK = torch.zeros((len(hidden_ND), num), dtype=torch.int64, device=hidden_ND.device)
    logprob_NK = hidden_ND.new_empty(ids_NK.shape)
    for rows in iterate_chunks(head, len(hidden_ND)):
        logits_CV = compute_logits(head, hidden_ND[rows])
        ids_NK[rows], best_CK = _merge(head, *_find_local(logits_CV, num), num)
        exp_CV = (logits_CV - best_CK[:, :1]).exp_()
        sum_C1 = all_reduce(exp_CV.sum(1, keepdim=True), head.vocab_axis)
        logprob_NK[rows] = best_CK - best_CK[:, :1] - sum_C1.log()
    return BestTokens(ids_NK=ids_NK, logprob_NK=logprob_NK)


def _find_local(logits_CV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the local ids and the logits ``[C, num]`` of the largest logits of a shard, by id.

    topk may return any of the tied tokens at the border; this returns the lowest ids.
    """
    # NaN is visible in the log-probability, and must not affect the count below.
    logits_CV = logits_CV.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    num = min(num, logits_CV.shape[1])
    if num == 0:
        return logits_CV.new_zeros((len(logits_CV), 0), dtype=torch.int64), logits_CV[:, :0]
    border_C1 = find_largest(logits_CV, num).amin(1, keepdim=True)
    above_CV, tied_CV = logits_CV > border_C1, logits_CV == border_C1
    num_tied_C1 = num - above_CV.sum(1, keepdim=True)
    taken_CV = above_CV | (tied_CV & (tied_CV.cumsum(1) <= num_tied_C1))
    # Every row has ``num`` of them. `nonzero` would wait for the device to count them.
    local_CK = taken_CV.view(torch.uint8).topk(num).indices.sort(1).values
    return local_CK, logits_CV.gather(1, local_CK)


def _merge(head: Head, local_CK: Tensor, logits_CK: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return ids and logits ``[C, num]`` of the largest logits of all shards, best first."""
    degree, missing = head.vocab_axis.degree, num - local_CK.shape[1]
    ids_CK = functional.pad(local_CK + head.first_token, (0, missing), value=head.vocab_size)
    logits_CK = functional.pad(logits_CK, (0, missing), value=-torch.inf)
    both_C2K = torch.stack([ids_CK.to(logits_CK.dtype), logits_CK], dim=1)
    gathered_C2xK = all_gather(both_C2K.flatten(1), head.vocab_axis).reshape(-1, degree, 2, num)
    ids_CM, logits_CM = (gathered_C2xK[:, :, part].flatten(1) for part in (0, 1))
    # Sorted by id first, so that padding, whose id is the largest, follows tokens of equal logit.
    by_id_CM = ids_CM.argsort(stable=True, dim=1)
    ids_CM, logits_CM = ids_CM.gather(1, by_id_CM), logits_CM.gather(1, by_id_CM)
    best_CK = logits_CM.argsort(stable=True, dim=1, descending=True)[:, :num]
    return ids_CM.gather(1, best_CK).long(), logits_CM.gather(1, best_CK)
