"""Trains some modules of a model and freezes the others.

A frozen parameter has ``requires_grad`` False: autograd computes no gradient for it, and the
optimizer lists only parameters that require one. What a family freezes itself, such as offsets of
routers that are set in another way, stays frozen.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from memguard.errors import ConfigError


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
