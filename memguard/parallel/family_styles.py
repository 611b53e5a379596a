"""Roles of the modules of families for which transformers has no plan that can be used here.

Each table maps names of modules below the base model, with ``*`` for the number of a block, to
roles (`hf_plan`). Embedding, head and norms of the residual stream need no entry.
"""

from collections.abc import Callable
from typing import Any, Literal

from memguard.parallel.fused import Parts
from memguard.parallel.model_sizes import read_num_kv_heads

Role = Literal[
    "plain",
    "transposed",
    "embedding",
    "positions",
    "norm",
    "head_norm",
    "heads_norm",
    "sinks",
    "experts",
    "alternating_experts",
    "experts_block",
    "router",
    "expert_plain",
    "expert_transposed",
    "unsplit",
]

_LLAMA: dict[str, Role] = {
    "layers.*.self_attn.q_proj": "plain",
    "layers.*.self_attn.k_proj": "plain",
    "layers.*.self_attn.v_proj": "plain",
    "layers.*.self_attn.o_proj": "transposed",
    "layers.*.mlp.gate_proj": "plain",
    "layers.*.mlp.up_proj": "plain",
    "layers.*.mlp.down_proj": "transposed",
}

_OLMO: dict[str, Role] = {
    **_LLAMA,
    "layers.*.self_attn.q_norm": "heads_norm",
    "layers.*.self_attn.k_norm": "heads_norm",
}

_HEAD_NORMS: dict[str, Role] = {
    "layers.*.self_attn.q_norm": "head_norm",
    "layers.*.self_attn.k_norm": "head_norm",
}

_EXPERTS: dict[str, Role] = {"layers.*.mlp.gate": "router", "layers.*.mlp.experts": "experts"}

_SHARED_EXPERTS: dict[str, Role] = {
    "layers.*.mlp.shared_experts.gate_proj": "expert_plain",
    "layers.*.mlp.shared_experts.up_proj": "expert_plain",
    "layers.*.mlp.shared_experts.down_proj": "expert_transposed",
}

# query_key_value has the three projections of one head, or group of heads, after the other.
_NEOX: dict[str, Role] = {
    "self_attention.query_key_value": "plain",
    "self_attention.dense": "transposed",
    "mlp.dense_h_to_4h": "plain",
    "mlp.dense_4h_to_h": "transposed",
}

_GPT2: dict[str, Role] = {
    "wpe": "positions",
    "h.*.attn.c_attn": "plain",
    "h.*.attn.c_proj": "transposed",
    "h.*.mlp.c_fc": "plain",
    "h.*.mlp.c_proj": "transposed",
}

_GLM: dict[str, Role] = {
    **{name: role for name, role in _LLAMA.items() if "gate" not in name and "up" not in name},
    "layers.*.mlp.gate_up_proj": "plain",
}

ROLES_OF_FAMILY: dict[str, dict[str, Role]] = {
    "dots1": {**_LLAMA, **_HEAD_NORMS, **_EXPERTS, **_SHARED_EXPERTS},
    "ernie4_5_moe": {
        **_LLAMA,
        **_EXPERTS,
        **_SHARED_EXPERTS,
        "layers.*.mlp.gate.moe_statics": "router",
    },
    "flex_olmo": {**_OLMO, **_EXPERTS},
    "glm4_moe": {**_LLAMA, **_HEAD_NORMS, **_EXPERTS, **_SHARED_EXPERTS},
    "gpt_oss": {
        **_LLAMA,
        "layers.*.self_attn": "sinks",
        "layers.*.mlp.router": "router",
        "layers.*.mlp.experts": "alternating_experts",
    },
    "granitemoe": {
        **_LLAMA,
        "layers.*.block_sparse_moe.router": "router",
        "layers.*.block_sparse_moe.experts": "experts",
    },
    "mixtral": {**_LLAMA, **_EXPERTS},
    "olmoe": {**_OLMO, **_EXPERTS},
    "falcon": {f"h.*.{name}": role for name, role in _NEOX.items()},
    "glm": _GLM,
    "glm4": _GLM,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "opt": {
        "decoder.embed_positions": "positions",
        "decoder.layers.*.self_attn.q_proj": "plain",
        "decoder.layers.*.self_attn.k_proj": "plain",
        "decoder.layers.*.self_attn.v_proj": "plain",
        "decoder.layers.*.self_attn.out_proj": "transposed",
        "decoder.layers.*.fc1": "plain",
        "decoder.layers.*.fc2": "transposed",
    },
    "persimmon": {
        **{f"layers.*.{name}".replace("attention", "attn"): role for name, role in _NEOX.items()},
        "layers.*.self_attn.q_layernorm": "head_norm",
        "layers.*.self_attn.k_layernorm": "head_norm",
    },
    "phi3": {
        "layers.*.self_attn.qkv_proj": "plain",
        "layers.*.self_attn.o_proj": "transposed",
        "layers.*.mlp.gate_up_proj": "plain",
        "layers.*.mlp.down_proj": "transposed",
    },
    "qwen2_moe": {
        **_LLAMA,
        **_EXPERTS,
        "layers.*.mlp.shared_expert_gate": "router",
        "layers.*.mlp.shared_expert.gate_proj": "expert_plain",
        "layers.*.mlp.shared_expert.up_proj": "expert_plain",
        "layers.*.mlp.shared_expert.down_proj": "expert_transposed",
    },
    "qwen3_moe": {**_LLAMA, **_HEAD_NORMS, **_EXPERTS},
    "stablelm": _LLAMA,
}
"""By ``model_type``."""


def _split_heads(config: Any, num_features: int) -> Parts | None:
    """Parts of all query heads, all key heads and all value heads."""
    num_heads = config.num_attention_heads
    num_kv_heads = read_num_kv_heads(lambda field: getattr(config, field, None)) or num_heads
    head_dim = num_features // (num_heads + 2 * num_kv_heads)
    key = num_kv_heads * head_dim
    return Parts(sizes=(num_heads * head_dim, key, key), key_value=(1, 2))


def _split_shared_heads(config: Any, num_features: int) -> Parts | None:
    """None if the three projections of one head are together, which any mesh keeps together."""
    if getattr(config, "new_decoder_architecture", False):
        num_groups = config.num_kv_heads
        num_queries = config.num_attention_heads // num_groups
        head_dim = num_features // num_groups // (num_queries + 2)
        sizes = (num_queries * head_dim, head_dim, head_dim)
        return Parts(sizes=sizes, num_groups=num_groups, key_value=(1, 2))
    return _split_heads(config, num_features) if config.multi_query else None


def _split_halves(config: Any, num_features: int) -> Parts | None:
    return Parts(sizes=(num_features // 2,) * 2)


PARTS_OF_FAMILY: dict[str, dict[str, Callable[[Any, int], Parts | None]]] = {
    "falcon": {"query_key_value": _split_shared_heads},
    "glm": {"gate_up_proj": _split_halves},
    "glm4": {"gate_up_proj": _split_halves},
    "gpt2": {"c_attn": _split_heads},
    "gpt_bigcode": {"c_attn": _split_shared_heads},
    "phi3": {"qkv_proj": _split_heads, "gate_up_proj": _split_halves},
}
"""By ``model_type`` and last part of a layer's name: its parts, from configuration and features."""
