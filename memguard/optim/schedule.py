"""The learning rate of a step."""

import math

from memguard.config import OptimConfig


def learning_rate(step: int, num_steps: int, config: OptimConfig) -> float:
    """Return the learning rate of a step, counted from 0.

    It rises linearly over the W = ``warmup_fraction`` of the N steps, reaches ``lr`` at step W and
    then follows ``schedule``. Step N, the first one after training, would have ``min_lr_fraction``
    of ``lr``:

        warm-up     (step + 1) / (W + 1)
        cosine      floor + (1 - floor) * (1 + cos(pi * progress)) / 2
        linear      floor + (1 - floor) * (1 - progress)
        constant    1                                 progress = (step - W) / (N - W)
    """
    num_warmup = round(config.warmup_fraction * num_steps)
    if step < num_warmup:
        return config.lr * (step + 1) / (num_warmup + 1)
    if config.schedule == "constant":
        return config.lr
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    is_linear = config.schedule == "linear"
    share = 1 - progress if is_linear else 0.5 * (1 + math.cos(math.pi * progress))
    floor = config.min_lr_fraction
    return config.lr * (floor + (1 - floor) * share)
