"""Default and reduced configurations of a model family, for trials that need no checkpoint.

    default    what the family's configuration class sets; sizes that it leaves out are derived
    few layers default widths, 4 layers, few experts: the modules of the whole model
    narrow     widths of tens of features as well: a model that runs on a CPU in milliseconds

Composite configurations (vision, audio, encoders) are reduced in all their parts.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import transformers

_LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_HEADS: dict[str, int] = {
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
}
_WIDTHS: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim"), 64),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "dim_feedforward"), 64),
    **dict.fromkeys(("ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"), 64),
    "expert_ffn_hidden_size": 64,
    "ffn_hidden_size": 64,
    # Recurrent layers pad a row to whole chunks.
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
}
_NUM_EXPERTS = 8
_VOCABULARY = {"vocab_size": 512}
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# The first layers of a family with experts are often dense.
FEW_LAYERS: dict[str, int] = {**dict.fromkeys(_LAYERS, 4), **dict.fromkeys(_EXPERTS, 2)}
"""Limits that keep default widths."""
_TWO_LAYERS: dict[str, int] = {**dict.fromkeys(_LAYERS, 2), **_VOCABULARY}
RUNNABLE: tuple[Mapping[str, int], ...] = (
    # Routers choose up to 16 experts.
    {**_TWO_LAYERS, **dict.fromkeys(_EXPERTS, 32), **_WIDTHS, **_HEADS},
    # Sizes of some families, such as latent attention, are tied to the default heads.
    {**_TWO_LAYERS, **dict.fromkeys(_EXPERTS, 32), **_WIDTHS},
    _TWO_LAYERS,
)
"""Limits of models to run, the smallest first."""


def make_default_config(model_type: str) -> Any:
    """Return the default configuration of a family, as a decoder where the class has both.

    Sizes without a default, which some families read nevertheless, are derived from the others.

    Args:
        model_type: a key of transformers' mapping of causal language models.
    """
    config = transformers.AutoConfig.for_model(model_type)
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    for part in _list_parts(config):
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


def reduce_config(config: Any, limits: Mapping[str, int]) -> Any:
    """Return a copy whose sizes are at most these.

    Args:
        config: a transformers configuration.
        limits: largest size by name of the field. With a limit for the vocabulary, special tokens
            are moved into it.
    """
    small = copy.deepcopy(config)
    for part in _list_parts(small):
        num_before = getattr(part, "num_hidden_layers", None)
        for name, limit in limits.items():
            value = vars(part).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > limit:
                setattr(part, name, limit)
        num_layers = getattr(part, "num_hidden_layers", None)
        for name, value in list(vars(part).items()):
            # One entry for each layer, such as `layer_types`.
            if isinstance(value, list) and num_before and len(value) == num_before:
                setattr(part, name, value[:num_layers])
        for number, name in enumerate(_SPECIAL_TOKENS):
            token = getattr(part, name, None)
            if isinstance(token, int) and token >= limits.get("vocab_size", token + 1):
                setattr(part, name, number)
    return small


def set_no_dropout(config: Any) -> Any:
    """Return a copy in which every rate of dropout is 0."""
    changed = copy.deepcopy(config)
    for part in _list_parts(changed):
        for name, value in list(vars(part).items()):
            if "drop" in name and isinstance(value, float) and 0 < value < 1:
                setattr(part, name, 0.0)
    return changed


def _list_parts(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PretrainedConfig):
            yield from _list_parts(value)
