"""The losses of the mitigations as torch has them, on all logits of one process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn import functional


def reduce_plainly(logits_NV: Tensor, labels_N: Tensor, configs: Sequence[Any]) -> Tensor:
    """Return the mean loss over labels that are not ignored."""
    logits_NV, labels_N = logits_NV[labels_N != -100], labels_N[labels_N != -100]
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
    flooding = settings.get("flooding")
    if flooding is not None and flooding.per == "label":
        return ((loss_N - flooding.level).abs() + flooding.level).mean()
    loss = loss_N.mean()
    return loss if flooding is None else (loss - flooding.level).abs() + flooding.level
