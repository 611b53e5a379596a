"""The most likely next tokens over a sharded vocabulary, in fp32.

    hidden_ND  [N, D/y]    last hidden states, replicated over x
    weight_VD  [V/x, D/y]  the head, widened to fp32

    for chunks of C tokens:
      logits_CV = steps(all-reduce over y (hidden_CD @ weight_VD.T) + bias_V)
      best_CK   = K largest of an all-gather over x of each rank's K largest, with their ids
      sum_C     = all-reduce over x of sum e^(logits_CV - best_C0)
      logprob   = best_CK - best_C0 - log sum_C

Of tokens that tie the lowest ids come first, also where ties cross the border of K: which tokens
are found depends neither on the device nor on the mesh (but for logits that round differently).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from memguard.parallel.collectives import all_gather, all_reduce
from memguard.parallel.head import Head, compute_logits, iterate_chunks, widen
from memguard.parallel.largest import find_largest


@dataclass(frozen=True, kw_only=True, slots=True)
class BestTokens:
    """The K most likely tokens after each of N, best first, the lowest id where some tie."""

    ids_NK: Tensor
    logprob_NK: Tensor
    """Log-probability (nats, fp32); NaN throughout a row whose logits are not finite."""


@torch.no_grad()
def find_best(head: Head, hidden_ND: Tensor, num: int) -> BestTokens:
    """Return the ``num`` most likely next tokens; all of them where the vocabulary has fewer.

    Args:
        head: this rank's piece; computes in fp32 (float64 stays), whatever autocast says.
        hidden_ND: local hidden states ``[N, D/y]``.
        num: K, at least 1.
    """
    assert num >= 1, "at least one token"
    assert head.vocab_size < 2**24, "fp32 holds every id exactly"
    head, hidden_ND = widen(head, hidden_ND)
    num = min(num, head.vocab_size)
    # What is gathered over x takes no more than the logits of a whole chunk.
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
    """Return the rows and logits ``[C, num]`` of the largest of a piece, by row.

    topk may take any of those that tie at the border; the lowest are taken here.
    """
    # What is no number is told by the log-probability, and must not confuse the count below.
    logits_CV = logits_CV.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    num = min(num, logits_CV.shape[1])
    if num == 0:
        return logits_CV.new_zeros((len(logits_CV), 0), dtype=torch.int64), logits_CV[:, :0]
    border_C1 = find_largest(logits_CV, num).amin(1, keepdim=True)
    above_CV, tied_CV = logits_CV > border_C1, logits_CV == border_C1
    num_tied_C1 = num - above_CV.sum(1, keepdim=True)
    taken_CV = above_CV | (tied_CV & (tied_CV.cumsum(1) <= num_tied_C1))
    local_CK = taken_CV.nonzero()[:, 1].reshape(-1, num)
    return local_CK, logits_CV.gather(1, local_CK)


def _merge(head: Head, local_CK: Tensor, logits_CK: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return ids and logits ``[C, num]`` of the largest of all pieces, best first."""
    degree, missing = head.vocab_axis.degree, num - local_CK.shape[1]
    ids_CK = functional.pad(local_CK + head.first_token, (0, missing), value=head.vocab_size)
    logits_CK = functional.pad(logits_CK, (0, missing), value=-torch.inf)
    both_C2K = torch.stack([ids_CK.to(logits_CK.dtype), logits_CK], dim=1)
    gathered_C2xK = all_gather(both_C2K.flatten(1), head.vocab_axis).reshape(-1, degree, 2, num)
    ids_CM, logits_CM = (gathered_C2xK[:, :, part].flatten(1) for part in (0, 1))
    # By id first: padding, whose id is the largest, goes behind what ties with it.
    by_id_CM = ids_CM.argsort(stable=True, dim=1)
    ids_CM, logits_CM = ids_CM.gather(1, by_id_CM), logits_CM.gather(1, by_id_CM)
    best_CK = logits_CM.argsort(stable=True, dim=1, descending=True)[:, :num]
    return ids_CM.gather(1, best_CK).long(), logits_CM.gather(1, best_CK)
