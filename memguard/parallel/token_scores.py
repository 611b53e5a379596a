"""What a model says of single tokens, over a sharded vocabulary, in fp32.

    hidden_ND  [N, D/y]    last hidden states, replicated over x
    weight_VD  [V/x, D/y]  the head, widened to fp32 for scores; bias_V [V/x]
    labels_N   [N]         the token that follows each of them, replicated

    for chunks of C tokens:
      logits_CV = steps(all-reduce over y (hidden_CD @ weight_VD.T) + bias_V)
      best_C, argmax_C, other_C = of the ranks' own, after an all-gather over x of 3 C numbers
      sums_C    = all-reduce over x of 2 to 5 C numbers, with d = logits_CV - best_C:
                  logits[label], sum e^d, sum e^d d, sum e^d d^2, sum d
      logprob_C = logits[label] - best_C - log sum e^d

The sums are taken from the best logit: what cancels in a variance is then small.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memguard.parallel.collectives import all_gather, all_reduce
from memguard.parallel.head import Head, apply_steps, iterate_chunks, max_of_piece, pick_label

EXTRA_SCORES = frozenset({"entropy", "mean_logprob", "variance_logprob"})


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """What the model says of N tokens, computed in fp32; None where it was not asked for."""

    logprob_N: Tensor
    """Log-probability of the label (nats)."""
    argmax_N: Tensor
    """Most likely token, the lowest id where several tie."""
    margin_N: Tensor
    """Logit of the label minus that of the best other token; 0 where they tie."""
    entropy_N: Tensor | None = None
    """-sum_v p(v) log p(v) (nats)."""
    mean_logprob_N: Tensor | None = None
    """Mean over the vocabulary of log p(v) (nats)."""
    variance_logprob_N: Tensor | None = None
    """Variance of log p(v) where v is drawn from p (nats squared); its mean is -entropy."""


@torch.no_grad()
def score_tokens(
    head: Head, hidden_ND: Tensor, labels_N: Tensor, *, needs: frozenset[str] = frozenset()
) -> TokenScores:
    """Return log-probability, argmax and margin of N labels, and what else is needed.

    Args:
        head: this rank's piece; computes in fp32 (float64 stays), whatever autocast says.
        hidden_ND: local hidden states ``[N, D/y]``.
        labels_N: ``[N]`` token ids.
        needs: any of `EXTRA_SCORES`.
    """
    unknown = needs - EXTRA_SCORES
    assert not unknown, f"the vocabulary layer does not compute {sorted(unknown)}"
    head, hidden_ND = widen(head, hidden_ND)
    names = ("logprob", "margin", *sorted(needs))
    scores_SN = hidden_ND.new_empty((len(names), len(labels_N)))
    argmax_N = labels_N.new_empty(len(labels_N), dtype=torch.int64)
    for rows in iterate_chunks(head, len(labels_N)):
        argmax_N[rows], found = _score_chunk(head, hidden_ND[rows], labels_N[rows], needs)
        scores_SN[:, rows] = torch.stack([found[name] for name in names])
    fields = {f"{name}_N": score_N for name, score_N in zip(names, scores_SN, strict=True)}
    return TokenScores(argmax_N=argmax_N, **fields)


def widen(head: Head, hidden_ND: Tensor) -> tuple[Head, Tensor]:
    """Return head and hidden states in fp32, or float64 where one of them is."""
    narrow = hidden_ND if head.weight_VD is None else head.weight_VD
    wide = torch.promote_types(torch.promote_types(hidden_ND.dtype, narrow.dtype), torch.float32)
    weight_VD = None if head.weight_VD is None else head.weight_VD.detach().to(wide)
    return replace(head, weight_VD=weight_VD), hidden_ND.detach().to(wide)


def compute_logits(head: Head, hidden_CD: Tensor) -> Tensor:
    """Return a chunk's local logits ``[C, V/x]`` after the steps, in hidden's own dtype."""
    # Training's autocast must not reach scores.
    with torch.autocast(hidden_CD.device.type, enabled=False):
        return apply_steps(head.steps, head.logits(hidden_CD))


def _score_chunk(
    head: Head, hidden_CD: Tensor, labels_C: Tensor, needs: frozenset[str]
) -> tuple[Tensor, dict[str, Tensor]]:
    logits_CV = compute_logits(head, hidden_CD)
    local_C, here_C = head.local_labels(labels_C)
    best_C, argmax_C, other_C = _find_best(head, logits_CV, local_C, here_C)
    label_C = pick_label(logits_CV, local_C, here_C)
    below_CV = logits_CV - best_C[:, None]
    del logits_CV
    exp_CV = below_CV.exp()
    parts = {"label": label_C, "exp": exp_CV.sum(1)}
    if "mean_logprob" in needs:
        parts["below"] = below_CV.sum(1)
    if needs & {"entropy", "variance_logprob"}:
        exp_CV.mul_(below_CV)
        parts["first"] = exp_CV.sum(1)
    if "variance_logprob" in needs:
        parts["second"] = exp_CV.mul_(below_CV).sum(1)
    sums = all_reduce(torch.stack(list(parts.values())), head.vocab_axis)
    total = dict(zip(parts, sums, strict=True))

    log_sum_C = total["exp"].log()
    found = {
        "logprob": total["label"] - best_C - log_sum_C,
        "margin": total["label"] - other_C,
    }
    if "mean_logprob" in needs:
        found["mean_logprob"] = total["below"] / head.vocab_size - log_sum_C
    if "entropy" in needs:
        found["entropy"] = log_sum_C - total["first"] / total["exp"]
    if "variance_logprob" in needs:
        square_C = (total["first"] / total["exp"]) ** 2
        found["variance_logprob"] = (total["second"] / total["exp"] - square_C).clamp_min(0)
    return argmax_C, found


def _find_best(
    head: Head, logits_CV: Tensor, local_C: Tensor, here_C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best logit, its lowest token id, and the best logit of all but the label."""
    assert head.vocab_size < 2**24, "fp32 holds every id exactly"
    if logits_CV.shape[1] == 0:
        best_C = other_C = max_of_piece(logits_CV)
        first_C = torch.zeros_like(local_C)
    else:
        first_C = logits_CV.argmax(1)
        best_C = logits_CV.gather(1, first_C[:, None]).squeeze(1)
        label_C = logits_CV.gather(1, local_C[:, None]).squeeze(1)
        hidden_C = label_C.masked_fill(here_C, -torch.inf)
        other_C = logits_CV.scatter(1, local_C[:, None], hidden_C[:, None]).amax(1)
    ids_C = (first_C + head.first_token).to(best_C.dtype)
    pieces_3xC = all_gather(torch.stack([best_C, ids_C, other_C]), head.vocab_axis).reshape(
        3, head.vocab_axis.degree, -1
    )
    best_xC, ids_xC, other_xC = pieces_3xC
    best_C = best_xC.amax(0)
    # The first of the ranks that have it holds the lowest ids.
    winner_C = (best_xC == best_C).int().argmax(0)
    argmax_C = ids_xC.gather(0, winner_C[None]).squeeze(0).long()
    return best_C, argmax_C, other_xC.amax(0)
