"""Tiny random models of many families, with every step between head and loss made visible."""

from typing import Any

import torch
import transformers
from default_configs import make_default_config, set_no_dropout

from memguard.hf.from_config import RUNNABLE, reduce_config

VOCAB_SIZE = 97
COMPILES_SELECTIVE = (
    transformers.modeling_layers.GradientCheckpointingLayer.__call__ is torch.nn.Module.__call__
)
"""Whether blocks may be compiled with selective checkpointing: not those of transformers 5.17."""

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
    "mixtral": {**_COMMON, "num_local_experts": 4, "intermediate_size": 64},
    "starcoder2": {**_COMMON, "sliding_window": 4},
    "stablelm": _COMMON,
}

# Those that do not, each in its own way: learned positions counted from a mask, ALiBi, a mask made
# without positions, a recurrent state.
LEAKING: dict[str, dict[str, Any]] = {
    "opt": {**_SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0},
    "bloom": {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {**_SMALL, "alibi": False},
    "gpt_oss": {**_COMMON, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


_HEADS: dict[str, Any] = {**_COMMON, "head_dim": 8}
_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_PER_LAYER = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8}

# For comparisons of meshes with one process only. Eager experts have float64.
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "arcee": _COMMON,
    "bitnet": _COMMON,
    "cohere2": {**_COMMON, **_WINDOWS},
    "cwm": dict(
        _HEADS, **_WINDOWS, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
    ),
    "dots1": {**_HEADS, **_EXPERTS, **_SHARED},
    "ernie4_5": _HEADS,
    "ernie4_5_moe": dict(
        _HEADS,
        **_EXPERTS,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=1,
    ),
    "flex_olmo": dict(_COMMON, num_experts=4, num_experts_per_tok=2, intermediate_size=64),
    "exaone4": {**_HEADS, **_WINDOWS},
    "gemma": _HEADS,
    "glm": {**_HEADS, "attention_bias": True},
    "glm4": {**_HEADS, "attention_bias": True},
    "gpt_bigcode": {**_SMALL, **_OLD_NAMES, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "glm4_moe": dict(_HEADS, **_EXPERTS, **_SHARED, use_qk_norm=True, attention_bias=True),
    "granitemoeshared": dict(
        _COMMON, num_local_experts=4, intermediate_size=64, shared_intermediate_size=40
    ),
    "granitemoe": dict(_COMMON, num_local_experts=4, intermediate_size=64, logits_scaling=3.0),
    "helium": _HEADS,
    # Each multiplier is far from 1.
    "hyperclovax": dict(
        _HEADS,
        attention_multiplier=0.5,
        embedding_multiplier=2.0,
        logits_scaling=0.25,
        residual_multiplier=0.5,
        use_post_norm=True,
    ),
    "internlm3": _HEADS,
    "iquestcoder": {**_HEADS, "attention_bias": True, "mlp_bias": True},
    "jais2": _HEADS,
    "ministral": {**_HEADS, "sliding_window": 4},
    "ministral3": {
        **_HEADS,
        "sliding_window": 4,
        # Queries are scaled from the fourth position on.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "nemotron": _HEADS,
    "olmo3": {**_COMMON, **_WINDOWS},
    "persimmon": {**_SMALL, "attention_dropout": 0.0},
    "phi": _COMMON,
    "olmoe": dict(_COMMON, num_experts=4, num_experts_per_tok=2, intermediate_size=64),
    # The first layer is dense.
    "qwen2_moe": dict(_COMMON, **_EXPERTS, shared_expert_intermediate_size=40, mlp_only_layers=[0]),
    "qwen3_moe": {**_HEADS, **_EXPERTS},
    "seed_oss": {**_HEADS, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": _COMMON,
    "vaultgemma": {**_HEADS, **_WINDOWS, "final_logit_softcapping": 1.5},
}

# Whose checkpoints have other names, layouts or buffers than their modules, or old names.
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
STORED_OTHERWISE: dict[str, dict[str, Any]] = {
    "deepseek_v3": dict(
        _SMALL, **_ROUTED, **_LATENT, v_head_dim=8, n_group=2, topk_group=1, first_k_dense_replace=1
    ),
    "gptj": {"vocab_size": VOCAB_SIZE, **_OLD_NAMES, "rotary_dim": 4, "resid_pdrop": 0},
    "hrm_text": _HEADS,
    "phimoe": {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
}

# Whose sizes depend on each other in ways that `reduce_config` does not know: latent attention,
# heads of recurrent layers, one kind of layer for each index.
_LATENT_HEADS = {**_COMMON, **_LATENT, "num_key_value_heads": 4, "v_head_dim": 8}
_LATENT_EXPERTS = dict(
    _LATENT_HEADS,
    **_ROUTED,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    mlp_layer_types=["dense", "sparse"],
)
_INDEXED = {"head_dim": 8, "index_topk": 4, "index_head_dim": 16, "index_n_heads": 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
SIZES_DEPEND: dict[str, dict[str, Any]] = {
    "axk1": _LATENT_EXPERTS,
    "axk2": {**_LATENT_EXPERTS, **_INDEXED},
    "bamba": {**_COMMON, **_MAMBA, "attn_layer_indices": [1]},
    "dbrx": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 0.5},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v2": dict(
        _LATENT_HEADS, **_ROUTED, head_dim=8, n_shared_experts=1, first_k_dense_replace=1
    ),
    "deepseek_v32": {**_LATENT_EXPERTS, **_INDEXED, "first_k_dense_replace": 1},
    "gemma4_text": {**_HEADS, **_WINDOWS, **_PER_LAYER, "global_head_dim": 8},
    "gemma3n_text": dict(
        _HEADS,
        **_PER_LAYER,
        num_hidden_layers=4,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        laurel_rank=8,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
    ),
    "glm4_moe_lite": _LATENT_EXPERTS,
    "glm_moe_dsa": {**_LATENT_EXPERTS, **_INDEXED, "first_k_dense_replace": 1},
    "granitemoehybrid": dict(
        _COMMON,
        **_MAMBA,
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=40,
        logits_scaling=3.0,
    ),
    "hy_v4": {**_LATENT_EXPERTS, **_INDEXED, "head_dim": 16},
    # The default heads need gigabytes without a kernel.
    "bailing_hybrid": dict(
        _LATENT_EXPERTS, **_LINEAR, head_dim=8, num_local_experts=4, first_k_dense_replace=1
    ),
    "kimi_linear": dict(
        _LATENT_EXPERTS,
        **_LINEAR,
        q_lora_rank=None,
        num_local_experts=4,
        linear_head_dim=8,
        linear_num_heads=4,
    ),
    "lfm2_moe": dict(
        _COMMON, **_EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1
    ),
    "longcat_flash": dict(
        _LATENT_HEADS,
        num_layers=2,
        head_dim=8,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=24,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
    ),
    "mamba2": dict(
        _SMALL, expand=2, num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=4
    ),
    "minicpm3": {**_LATENT_HEADS, "dim_model_base": 8},
    "olmo_hybrid": dict(
        _COMMON,
        **_LINEAR,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "xlstm": {**_SMALL, "num_heads": 4, "chunk_size": 4, "autocast_kernel_dtype": "float32"},
    "youtu": _LATENT_HEADS,
    "zamba2": dict(
        _SMALL,
        num_hidden_layers=3,
        layers_block_type=["linear_attention", "hybrid", "hybrid"],
        n_mamba_heads=8,
        mamba_d_state=8,
        chunk_size=4,
        adapter_rank=4,
    ),
}

# For flex attention on GPUs.
LARGE_HEADS = {"head_dim": 16}


def build(
    family: str,
    *,
    attn: str | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Any:
    """A model in eval mode, the same for the same arguments; sdpa where it has it."""
    config = make_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attn, dtype=dtype
        )
    return model.eval()


def make_config(family: str, **overrides: Any) -> Any:
    """A tiny configuration of any model type; without an entry its default one, reduced."""
    entries = {**FAMILIES, **MORE_FAMILIES, **LEAKING, **STORED_OTHERWISE, **SIZES_DEPEND}
    if family in entries:
        return transformers.AutoConfig.for_model(family, **{**entries[family], **overrides})
    # A mesh draws other masks of dropout than one process.
    config = set_no_dropout(reduce_config(make_default_config(family), RUNNABLE[0]))
    for name, value in overrides.items():
        setattr(config, f"_{name}" if name == "experts_implementation" else name, value)
    return config
