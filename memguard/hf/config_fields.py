"""Refuses invalid configuration fields before a model is built, without torch.

transformers does not check them: it builds a billion layers one by one, and none for -1 layers.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from memguard.errors import ModelError, shorten

# Far above existing models; a model of these sizes can still be described in seconds.
_MOST_LAYERS, _MOST_HEADS, _MOST = 4096, 1 << 20, 1 << 30
_LIMITS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), (1, _MOST_LAYERS)),
    **dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads"),
        (1, _MOST_HEADS),
    ),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size"), (1, _MOST)),
    **dict.fromkeys(("ffn_dim", "n_inner", "head_dim", "vocab_size"), (1, _MOST)),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), (1, _MOST)),
    # 0 means a dense model.
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
        (0, _MOST_HEADS),
    ),
    "moe_intermediate_size": (0, _MOST),
}
DROPOUTS = (
    *("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "activation_dropout"),
    *("dropout", "embd_pdrop", "embedding_dropout", "hidden_dropout", "hidden_dropout_prob"),
    *("resid_pdrop", "residual_dropout"),
)
"""Probabilities of dropout; transformers passes any number on to the kernels."""
_QUANTISED = ("quantization_config", "compression_config")
_PARTS = ("text_config", "decoder", "llm_config", "language_config", "thinker_config")
"""Fields of a composite configuration that may contain the language model's configuration."""
_MOST_DIGITS = 30
_UNSUPPORTED = {
    "bitnet": (
        "packed ternary ones, which cannot be trained: use the same model's plain weights in "
        "bfloat16 ('linear_class': 'autobitlinear', 'quantization_mode': 'online')"
    ),
    "mxfp4": (
        "quantised, which is not supported: they are in MXFP4; use the model's bfloat16 form, "
        "which transformers writes with Mxfp4Config(dequantize=True) and save_pretrained"
    ),
}
"""What a `quant_method` makes of the weights, and the way out."""
_OTHER = "quantised, which is not supported: convert them to bfloat16 first"


def is_ternary(quantised: Any) -> bool:
    """Whether weights are stored plain and rounded to ternary ones in each forward (BitNet).

    ``quantised`` is the field ``quantization_config`` of a configuration.
    """
    return isinstance(quantised, Mapping) and (
        quantised.get("quant_method") == "bitnet"
        and quantised.get("linear_class") == "autobitlinear"
        and quantised.get("quantization_mode") == "online"
    )


def check_fields(fields: Mapping[str, Any], *, place: str) -> None:
    """Refuse numbers out of range, quantised weights and weights in files that are not hashed.

    Values that are not numbers are left to the checks of the model's family.

    Args:
        fields: of a config.json or of `model.scratch.config`.
        place: where the fields come from, for messages.

    Raises:
        ModelError: for the first invalid field.
    """
    if wrong := next(_find_wrong(fields), None):
        raise ModelError(f"{place}: {wrong}")
    for name in _PARTS:
        part = fields.get(name)
        if isinstance(part, Mapping) and part is not fields:
            # Composite configurations have one level; deeper nesting in a file is not followed.
            check_fields({k: v for k, v in part.items() if k not in _PARTS}, place=place)


def _find_wrong(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the fields of one level."""
    for name in _QUANTISED:
        quantised = fields.get(name)
        if quantised and not is_ternary(quantised):
            method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
            yield f"'{name}' says that the weights are {_UNSUPPORTED.get(str(method), _OTHER)}"
    if fields.get("transformers_weights"):
        yield "'transformers_weights' names another file than the model's own: remove the field"
    for name, (least, most) in _LIMITS.items():
        value = fields.get(name)
        if isinstance(value, int) and not least <= value <= most:
            got = str(value)
            got = got if len(got) <= _MOST_DIGITS else f"{got[:_MOST_DIGITS]}..."
            yield f"'{name}' must be a whole number from {least} to {most:,}; got {got}"
    for name in DROPOUTS:
        value = fields.get(name)
        if isinstance(value, int | float) and not 0 <= value <= 1:
            yield f"'{name}' must be a number from 0 to 1; got {value:.4g}"
    for name in _PARTS:
        part = fields.get(name)
        if part is not None and not isinstance(part, Mapping):
            got = shorten(ascii(part))
            yield f"'{name}' must be the fields of a language model; got '{got}'. Remove it"


def check_positions(limit: Any, seq_len: int) -> None:
    """Refuse rows longer than the model's maximum number of positions.

    ``limit`` is the field ``max_position_embeddings``: none if it is not a positive integer.

    Raises:
        ModelError: names the maximum.
    """
    if isinstance(limit, int) and 0 < limit < seq_len:
        raise ModelError(
            f"'data.seq_len' must be at most {limit}, the model's max_position_embeddings; "
            f"got {seq_len}"
        )
