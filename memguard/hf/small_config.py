"""Reduced configurations of a model family, for trials that need no checkpoint.

    few layers   the family's widths, 2 layers: the modules of the whole model
    narrow       widths of tens of features as well: a model that runs on a CPU in milliseconds

Composite configurations (vision, audio, encoders) are reduced in all their parts.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import transformers

LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"),
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
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
_VOCABULARY = {"vocab_size": 512}
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TWO_LAYERS: dict[str, int] = {**dict.fromkeys(LAYERS, 2), **_VOCABULARY}
RUNNABLE: tuple[Mapping[str, int], ...] = (
    # Routers choose up to 16 experts.
    {**_TWO_LAYERS, **dict.fromkeys(EXPERTS, 32), **_WIDTHS, **_HEADS},
    # Sizes of some families, such as latent attention, are tied to the default heads.
    {**_TWO_LAYERS, **dict.fromkeys(EXPERTS, 32), **_WIDTHS},
    _TWO_LAYERS,
)
"""Limits of models to run, the smallest first."""


def reduce_config(config: Any, limits: Mapping[str, int]) -> Any:
    """Return a copy whose sizes are at most these.

    Args:
        config: a transformers configuration.
        limits: largest size by name of the field. With a limit for the vocabulary, special tokens
            are moved into it.
    """
    small = copy.deepcopy(config)
    for part in list_parts(small):
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


def list_parts(config: Any) -> Iterator[Any]:
    """Yield a configuration and all its parts."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PretrainedConfig):
            yield from list_parts(value)
