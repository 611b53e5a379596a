"""Trains some modules of a model and freezes the others; lists or sets its dropout.

A frozen parameter has ``requires_grad`` False: autograd computes no gradient for it, and the
optimizer lists only parameters that require one. What a family freezes itself, such as offsets of
routers that are set in another way, stays frozen.

transformers stores dropout as `torch.nn.Dropout`, or as a number on the layer, which passes it to a
function. Fields of the configuration do not tell: many belong to models with another head.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from memguard.errors import ConfigError, ModelError


def freeze_others(model: Any, names: Sequence[str]) -> None:
    """Freeze all parameters that are not in modules of these names.

    Args:
        model: plain, or on the meta device before FSDP2.
        names: full names of modules or their last parts, e.g. ``lm_head`` or ``layers.3``.

    Raises:
        ConfigError: a name matches no module with parameters, or one of its parameters is also
            that of a module that is not named.
    """
    setting, problems = "'train.trainable_modules'", []
    chosen: dict[int, str] = {}
    for name in names:
        matching = [
            (path, module)
            for path, module in model.named_modules()
            if path == name or path.endswith(f".{name}")
        ]
        parameters = [p for _, module in matching for p in module.parameters() if p.requires_grad]
        if not parameters:
            problems.append(
                f"{setting}: {type(model).__name__} has no module '{name}' with weights; it has "
                f"{', '.join(_list_leaves(model))}"
            )
        chosen |= {id(parameter): name for parameter in parameters}
    # Every name of a parameter counts, because a tied weight has several.
    for path, parameter in model.named_parameters(remove_duplicate=False):
        chosen_by = chosen.get(id(parameter))
        if chosen_by is None:
            parameter.requires_grad_(False)
        elif not any(f".{name}." in f".{path}" for name in names):
            problems.append(
                f"{setting}: the weights of '{chosen_by}' are also those of "
                f"'{path.rpartition('.')[0]}' (tied), which would be trained too: name both, or "
                "neither"
            )
    if problems:
        raise ConfigError(*problems)


def _list_leaves(model: nn.Module) -> list[str]:
    """Return the last parts of the names of modules with weights of their own."""
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if any(True for _ in module.parameters(recurse=False))
        }
    )


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
