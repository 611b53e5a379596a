"""Fields of a model's configuration that no model has, told before one is built. No torch.

transformers takes them as they are: a billion layers are built one by one, and of -1 layers none.
"""

from collections.abc import Mapping
from typing import Any

from memguard.errors import ModelError

# Far above what exists; a model of these sizes is still described in seconds.
_MOST_LAYERS, _MOST_HEADS, _MOST = 4096, 1 << 20, 1 << 30
_LIMITS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), (1, _MOST_LAYERS)),
    **dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads"),
        (1, _MOST_HEADS),
    ),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim", "n_inner"), (1, _MOST)
    ),
    **dict.fromkeys(("head_dim", "vocab_size"), (1, _MOST)),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), (1, _MOST)),
    # 0 means a dense model.
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
        (0, _MOST_HEADS),
    ),
    "moe_intermediate_size": (0, _MOST),
}
_QUANTISED = ("quantization_config", "compression_config")
_PARTS = ("text_config", "decoder", "llm_config", "language_config", "thinker_config")
"""Of a composite configuration, where the language model's may be."""
_MOST_DIGITS = 30


def check_fields(fields: Mapping[str, Any], *, place: str) -> None:
    """Refuse sizes out of range, quantised weights and other files than those that are hashed.

    What is no whole number is left to the family's own checks.

    Args:
        fields: of a config.json or of `model.scratch.config`.
        place: where they stand, for messages.

    Raises:
        ModelError: the first such field.
    """
    for name in _QUANTISED:
        if fields.get(name):
            raise ModelError(
                f"{place}: '{name}' says that the weights are quantised, and such are not read: "
                "convert them to bfloat16 first"
            )
    if fields.get("transformers_weights"):
        raise ModelError(
            f"{place}: 'transformers_weights' names another file than model.safetensors or those "
            "of its index, and it is not read: leave it out"
        )
    for name, (least, most) in _LIMITS.items():
        value = fields.get(name)
        if isinstance(value, int) and not least <= value <= most:
            got = str(value)
            got = got if len(got) <= _MOST_DIGITS else f"{got[:_MOST_DIGITS]}..."
            raise ModelError(
                f"{place}: '{name}' must be a whole number from {least} to {most:,}; got {got}"
            )
    for name in _PARTS:
        part = fields.get(name)
        if isinstance(part, Mapping) and part is not fields:
            # One level: composite configurations have no more, and a file may nest without end.
            check_fields({k: v for k, v in part.items() if k not in _PARTS}, place=place)
