"""Default configurations of a model family, for trials that need no checkpoint.

default      what the family's configuration class sets; sizes that it leaves out are derived
few layers   default widths, 4 layers, few experts: the modules of the whole model
"""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import transformers

from memguard.hf.from_config import EXPERTS, LAYERS, list_parts

_NUM_EXPERTS = 8
# The first layers of a family with experts are often dense.
FEW_LAYERS: dict[str, int] = {**dict.fromkeys(LAYERS, 4), **dict.fromkeys(EXPERTS, 2)}
"""Limits that keep default widths."""


def make_default_config(model_type: str) -> Any:
    """Return the default configuration of a family, as a decoder where the class has both.

    Sizes without a default, which some families read nevertheless, are derived from the others.

    Args:
        model_type: a key of transformers' mapping of causal language models.
    """
    config = transformers.AutoConfig.for_model(model_type)
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    for part in list_parts(config):
        _derive(part, "num_key_value_heads", lambda part: part.num_attention_heads)
        _derive(part, "head_dim", lambda part: part.hidden_size // part.num_attention_heads)
        _derive(part, "n_routed_experts", lambda _: _NUM_EXPERTS)
        _derive(part, "n_shared_experts", lambda _: 1)
        _derive(part, "num_experts_per_tok", lambda _: 2)
    return config


def _derive(part: Any, name: str, rule: Callable[[Any], int]) -> None:
    # Families without these fields, and those that have them for each layer.
    with contextlib.suppress(Exception):
        if getattr(part, name, 0) is None:
            setattr(part, name, rule(part))


def set_no_dropout(config: Any) -> Any:
    """Return a copy in which every rate of dropout is 0."""
    changed = copy.deepcopy(config)
    for part in list_parts(changed):
        for name, value in list(vars(part).items()):
            if "drop" in name and isinstance(value, float) and 0 < value < 1:
                setattr(part, name, 0.0)
    return changed
