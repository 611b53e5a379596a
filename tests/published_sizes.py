"""Sizes of published models."""

from typing import Any

from memguard.parallel.model_sizes import ModelSizes

_LLAMA31: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}

CONFIG_FIELDS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        **_LLAMA31,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "Llama-3.1-70B": {
        **_LLAMA31,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "Llama-3.1-405B": {
        **_LLAMA31,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
    "Qwen3-32B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
"""Sizes in the config.json published with each model."""

LLAMA_405B = ModelSizes.from_json(CONFIG_FIELDS["Llama-3.1-405B"])
LLAMA_8B = ModelSizes.from_json(CONFIG_FIELDS["Llama-3.1-8B"])
