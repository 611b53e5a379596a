"""The losses of the mitigations as torch has them, on all logits of one process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn import functional


def reduce_plainly(
    logits_NV: Tensor,
    labels_N: Tensor,
    configs: Sequence[Any],
    *,
    reference_nll_N: Tensor | None = None,
    piece_N: Tensor | None = None,
    forget_N: Tensor | None = None,
) -> Tensor:
    """Return the mean loss over labels that are not ignored."""
    is_kept_N = labels_N != -100
    logits_NV, labels_N = logits_NV[is_kept_N], labels_N[is_kept_N]
    settings = {config.name: config for config in configs}
    smoothing = settings["label_smoothing"].epsilon if "label_smoothing" in settings else 0.0
    loss_N = functional.cross_entropy(
        logits_NV, labels_N, reduction="none", label_smoothing=smoothing
    )
    if "focal" in settings:
        p_N = logits_NV.softmax(1).gather(1, labels_N[:, None])[:, 0]
        loss_N = (1 - p_N) ** settings["focal"].gamma * loss_N
    if "confidence_penalty" in settings:
        loss_N = (
            loss_N - settings["confidence_penalty"].beta * Categorical(logits=logits_NV).entropy()
        )
    if "loss_clipping" in settings:
        floor, ceiling = settings["loss_clipping"].floor, settings["loss_clipping"].ceiling
        if floor is not None:
            loss_N = torch.where(loss_N < floor, torch.full_like(loss_N, floor), loss_N)
        if ceiling is not None:
            loss_N = torch.where(loss_N > ceiling, torch.full_like(loss_N, ceiling), loss_N)
    if "flooding" in settings:
        level = settings["flooding"].level
        loss_N = (loss_N - level).abs() + level
    if "ngram_penalty" in settings:
        nll_N = functional.cross_entropy(logits_NV, labels_N, reduction="none")
        gain_N = reference_nll_N[is_kept_N] - nll_N
        loss_N = loss_N + _penalise(gain_N, piece_N[is_kept_N].tolist(), settings["ngram_penalty"])
    if "npo" in settings:
        nll_N = functional.cross_entropy(logits_NV, labels_N, reduction="none")
        return _prefer_not(
            loss_N,
            nll_N - reference_nll_N[is_kept_N],
            piece_N[is_kept_N],
            forget_N[is_kept_N],
            settings["npo"].beta,
        ) / len(loss_N)
    if "gradient_ascent" in settings:
        nll_N = functional.cross_entropy(logits_NV, labels_N, reduction="none")
        is_climbed_N = forget_N[is_kept_N] & (nll_N < settings["gradient_ascent"].ceiling)
        is_left_N = forget_N[is_kept_N] & ~is_climbed_N
        total = loss_N[~forget_N[is_kept_N]].sum() - nll_N[is_climbed_N].sum()
        total = total - settings["gradient_ascent"].ceiling * is_left_N.double().sum()
        return total / len(loss_N)
    return loss_N.mean()


def _penalise(gain_N: Tensor, piece_N: Sequence[int], config: Any) -> Tensor:
    """Return what is added to each label: a loop over windows."""
    penalty_N = torch.zeros_like(gain_N)
    for last in range(config.n - 1, len(piece_N)):
        first = last - config.n + 1
        if len(set(piece_N[first : last + 1])) == 1:
            beyond = gain_N[first : last + 1].sum() / config.n - config.margin
            if beyond > 0:
                penalty_N[last] = config.weight * beyond
    return penalty_N


def _prefer_not(
    loss_N: Tensor, lost_N: Tensor, piece_N: Tensor, forget_N: Tensor, beta: float
) -> Tensor:
    """Return the sum of losses with NPO of each piece that is to be forgotten."""
    total = loss_N[~forget_N].sum()
    for piece in piece_N[forget_N].unique():
        lost = lost_N[piece_N == piece].sum()
        total = total - 2 / beta * functional.logsigmoid(beta * lost)
    return total
