"""AdamW, its parameter groups and the learning rate of a step."""

import math

import torch
from torch import nn

from memguard.config import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Make AdamW with weight decay on matrices only; norms and biases have none."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in parameters if p.ndim >= 2],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
    )


def learning_rate(step: int, num_steps: int, config: OptimConfig) -> float:
    """Return the learning rate of a step, from 0.

    Linear warm-up over ``warmup_fraction`` of the steps, then cosine to ``min_lr_fraction``.
    """
    num_warmup = round(config.warmup_fraction * num_steps)
    if step < num_warmup:
        return config.lr * (step + 1) / (num_warmup + 1)
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    floor = config.min_lr_fraction
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def clip_gradients(model: nn.Module, max_norm: float | None) -> float:
    """Scale the gradients to at most ``max_norm`` and return their norm before."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf, foreach=True)
    return float(norm)
