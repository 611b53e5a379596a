"""Dropout of a model, set wherever its family has it; its configuration stays what it was."""

import copy
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from memguard.errors import ModelError

_NAMES = ("dropout", "pdrop")


def set_dropout(model: nn.Module, share: float) -> int:
    """Set every dropout of a model and return how many its modules hold.

    transformers keeps them as `torch.nn.Dropout`, or as a number on the layer that hands it to a
    function. A few families (Falcon, Persimmon) look into their configuration at each pass: parts
    of the model get a copy of it, and the model's own, which is exported, is left as it is.

    Args:
        model: on one process; ranks that share activations would drop different ones. Its
            configuration says already how attention is computed: the copies say the same.
        share: of the activations that are dropped in training.

    Raises:
        ModelError: a family without dropout.
    """
    num_set = 0
    copies: dict[int, PretrainedConfig] = {}
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = share
            num_set += 1
        num_set += _set_numbers(module, share)
        config = getattr(module, "config", None)
        if module is not model and isinstance(config, PretrainedConfig):
            if id(config) not in copies:
                copies[id(config)] = copy.deepcopy(config)
                _set_numbers(copies[id(config)], share)
            module.config = copies[id(config)]
    if not num_set:
        raise ModelError(
            f"'train.dropout' does nothing: {type(model).__name__} has no dropout. Leave it out"
        )
    return num_set


def _set_numbers(holder: Any, share: float) -> int:
    """Set the attributes that are numbers and named for dropout; return how many there are."""
    # A configuration that says 0 makes an int of it.
    found = [
        name
        for name, value in vars(holder).items()
        if any(part in name for part in _NAMES)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    ]
    for name in found:
        setattr(holder, name, share)
    return len(found)
