"""Lists or sets the dropout of a model, wherever its family has it.

transformers stores dropout as `torch.nn.Dropout`, or as a number on the layer, which passes it to a
function. Fields of the configuration do not tell: many belong to models with another head.
"""

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from memguard.errors import ModelError

_NAMES = ("dropout", "pdrop")
_LAYER_DROPOUT = "layerdrop"


def list_dropout(model: nn.Module) -> dict[str, float]:
    """Return the rates above 0 that act in training, by the name of the setting or module.

    Also those of layers that are left out as a whole (``layerdrop``).
    """
    rates = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            rates[path.rpartition(".")[2]] = module.p
        for name in _list_numbers(module, (*_NAMES, _LAYER_DROPOUT)):
            rates[name] = max(getattr(module, name), rates.get(name, 0))
    return {name: rate for name, rate in rates.items() if rate > 0}


def set_dropout(model: nn.Module, share: float) -> int:
    """Set every dropout rate of a model and return how many its modules have.

    A few families (Falcon, Persimmon) read their configuration in each forward pass: submodules get
    a copy of it, and the model's own, which is exported, is not changed. The attention
    implementation must be set in it, as the copies inherit it. The model is on one process: ranks
    that share activations would drop different ones.

    Raises:
        ModelError: the model's family has no dropout.
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
            f"'train.dropout' has no effect: {type(model).__name__} has no dropout. Remove it"
        )
    return num_set


def _set_numbers(holder: Any, share: float) -> int:
    """Set the numeric attributes named after dropout (`_NAMES`); return how many there are."""
    names = list(_list_numbers(holder, _NAMES))
    for name in names:
        setattr(holder, name, share)
    return len(names)


def _list_numbers(holder: Any, parts: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of numeric attributes that contain one of the parts."""
    for name, value in vars(holder).items():
        # A 0 in a configuration is an int, not a float.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and any(part in name for part in parts):
            yield name
