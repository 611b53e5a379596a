"""Tiny random models of many families, with every step between head and loss made visible."""

from typing import Any

import torch
import transformers

VOCAB_SIZE = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Large, so that documents of one row that see each other change logits by much.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": True,
}
_OLD_NAMES: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_SMALL = {key: value for key, value in _COMMON.items() if key not in ("num_key_value_heads",)}

# Those that keep documents of a packed row apart. Windows are shorter than the rows of the tests;
# caps and scales are far from 1.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": {**_COMMON, "sliding_window": 4},
    "qwen2": _COMMON,
    "qwen3": {**_COMMON, "head_dim": 8},
    "gpt2": {**_COMMON, **_OLD_NAMES, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "gemma2": {**_COMMON, "head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 1.5},
    "gemma3_text": {**_COMMON, "head_dim": 8, "sliding_window": 4},
    "cohere": {**_COMMON, "logit_scale": 0.25},
    "granite": {**_COMMON, "logits_scaling": 3.0},
    "phi3": _COMMON,
    "gpt_neox": _SMALL,
    "olmo2": _COMMON,
    "mixtral": {**_COMMON, "num_local_experts": 4},
    "starcoder2": {**_COMMON, "sliding_window": 4},
    "stablelm": _COMMON,
}

# Those that do not, each in its own way: learned positions counted from a mask, ALiBi, a mask made
# without positions, a recurrent state.
LEAKING: dict[str, dict[str, Any]] = {
    "opt": {**_SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gpt_oss": {**_COMMON, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


# For flex attention on GPUs.
LARGE_HEADS = {"head_dim": 16}


def build(family: str, *, attn: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """A model in fp32, in eval mode, the same for the same arguments; sdpa where it has it."""
    fields = {**{**FAMILIES, **LEAKING}[family], **overrides}
    config = transformers.AutoConfig.for_model(family, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attn, dtype=torch.float32
        )
    return model.eval()
