"""Probability of a label when sampling from the most likely tokens only, vocabulary sharded.

    scheme     logits / temperature, then the top_k largest, then the smallest set of those whose
               probability reaches top_p; the rules, and the order, of `transformers`
    ties       at the border of top_k all stay; at that of top_p the lowest ids stay, as many as
               it takes (transformers leaves them to its sort)

    for chunks of C/x tokens:
      top_k    border_C = k-th largest of an all-gather over x of each rank's k largest
      top_p    m = 64, doubled until enough: nucleus of an all-gather over x of each rank's m
               largest, which is right when no rank kept back more than its border
      logprob_C = label_C - max_C - log(probability mass that stays)     -inf where it is cut off

At most [C/x, V] = [C, V/x] candidates are gathered, and far fewer where the model is sure.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from memguard.parallel.collectives import all_gather, all_reduce
from memguard.parallel.head import Head, iterate_chunks, max_of_piece, pick_label
from memguard.parallel.token_scores import compute_logits, widen

_FIRST_CANDIDATES = 64


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
        temperature: divides the logits.
        top_k: tokens to draw from; None or the vocabulary's size is all.
        top_p: probability of the tokens to draw from; None or 1 is all.
    """
    assert temperature > 0, "temperature 0 is the argmax, which token_scores has"
    assert top_k is None or top_k >= 1, "at least one token stays"
    assert top_p is None or 0 <= top_p <= 1, "a probability"
    head, hidden_ND = widen(head, hidden_ND)
    # What is gathered over x takes no more than the logits of a whole chunk.
    rows_at_once = max(1, head.chunk_tokens // head.vocab_axis.degree)
    head = replace(head, chunk_tokens=rows_at_once)
    logprob_N = hidden_ND.new_empty(len(labels_N))
    for rows in iterate_chunks(head, len(labels_N)):
        logits_CV = compute_logits(head, hidden_ND[rows]) / temperature
        logprob_N[rows] = _score_chunk(head, logits_CV, labels_N[rows], top_k, top_p)
    return logprob_N


def _score_chunk(
    head: Head, logits_CV: Tensor, labels_C: Tensor, top_k: int | None, top_p: float | None
) -> Tensor:
    axis = head.vocab_axis
    local_C, here_C = head.local_labels(labels_C)
    label_C = all_reduce(pick_label(logits_CV, local_C, here_C), axis)
    max_C = all_reduce(max_of_piece(logits_CV), axis, "max")
    cut_C = torch.zeros_like(here_C)
    if top_k is not None and top_k < head.vocab_size:
        border_C = _gather_largest(head, logits_CV, top_k).flatten(1).topk(top_k).values[:, -1]
        cut_C = label_C < border_C
        logits_CV = logits_CV.masked_fill(logits_CV < border_C[:, None], -torch.inf)
    mass_C = all_reduce((logits_CV - max_C[:, None]).exp_().sum(1), axis)
    if top_p is not None and top_p < 1:
        nucleus = _find_nucleus(head, logits_CV, max_C, mass_C, top_p)
        ids_V = torch.arange(logits_CV.shape[1], device=labels_C.device) + head.first_token
        before_CV = (logits_CV == nucleus.border_C[:, None]) & (ids_V < labels_C[:, None])
        num_before_C = all_reduce(before_CV.sum(1), axis)
        cut_C |= label_C < nucleus.border_C
        cut_C |= (label_C == nucleus.border_C) & (num_before_C >= nucleus.num_at_border_C)
        mass_C = nucleus.mass_C
    # What damaged weights say of a label is not that it is never drawn.
    cut_C &= ~mass_C.isnan()
    return (label_C - max_C - mass_C.log()).masked_fill(cut_C, -torch.inf)


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
        kept_back_C = pieces_CxM[:, :, -1].amax(1)
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


def _gather_largest(head: Head, logits_CV: Tensor, num: int) -> Tensor:
    """Return each rank's largest logits ``[C, x, num]``, -inf where it has fewer."""
    num, degree = min(num, _widest_piece(head)), head.vocab_axis.degree
    largest_CM = logits_CV.topk(min(num, logits_CV.shape[1])).values
    largest_CM = functional.pad(largest_CM, (0, num - largest_CM.shape[1]), value=-torch.inf)
    return all_gather(largest_CM, head.vocab_axis).reshape(-1, degree, num)
