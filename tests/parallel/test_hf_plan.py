"""Roles of every module of the families, and the refusals, each in one line that names it all."""

from typing import Any

import pytest
import torch
import transformers
from ranks import RankPool
from tiny_families import FAMILIES, build
from torch import nn
from torch.distributed.tensor.placement_types import Replicate, Shard

from memguard.errors import ModelError
from memguard.hf.assembly import Assembly, build_meta_layer
from memguard.parallel.hf_plan import find_blocks, plan_sharding, plan_storage
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape

LINEAR = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "plain"),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "plain"),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "transposed"),
}
NORMS = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), "norm")
HEAD_NORMS = dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), "head_norm")
BLOCKS = ("model.layers.0", "model.layers.1")


def expect_roles(family: str) -> dict[str, str]:
    inside = {**LINEAR, **NORMS, **(HEAD_NORMS if family == "qwen3" else {})}
    return {
        "model.embed_tokens": "embedding",
        "lm_head": "plain",
        "model.norm": "norm",
        **{f"{block}.{name}": role for block in BLOCKS for name, role in inside.items()},
    }


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_module_has_its_role(family: str, is_tied: bool) -> None:
    plan = plan_sharding(build(family, tie_word_embeddings=is_tied))
    assert plan.roles == expect_roles(family)
    assert plan.is_tied == is_tied
    assert plan.blocks == BLOCKS
    assert plan.attentions == tuple(f"{block}.self_attn" for block in BLOCKS)
    keys = {f"{block}.self_attn.{each}_proj" for block in BLOCKS for each in "kv"}
    assert plan.key_value == keys
    assert set(plan.groups) == {
        tuple(f"{block}.{name}" for name in names)
        for block in BLOCKS
        for names in (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("mlp.gate_proj", "mlp.up_proj"),
        )
    }


def test_a_model_on_the_meta_device_has_the_same_plan() -> None:
    with torch.device("meta"):
        on_meta = build("qwen3", tie_word_embeddings=True)
    assert plan_sharding(on_meta) == plan_sharding(build("qwen3", tie_word_embeddings=True))


def refusal(model: Any) -> str:
    with pytest.raises(ModelError) as caught:
        plan_sharding(model)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(type(model).__name__)
    assert message.endswith("It can use the axes data and z."), "the way out"
    return message


def with_plan(plan: dict[str, str], **fields: Any) -> Any:
    """A Llama whose plan is partly another one."""
    config = build("llama", **fields).config
    config.base_model_tp_plan = {**config.base_model_tp_plan, **plan}
    return transformers.AutoModelForCausalLM.from_config(config)


def test_an_unknown_style_is_listed_with_its_modules() -> None:
    styles = {"self_attn.o_proj": "sideways", "mlp.up_proj": "colwise_gather_output"}
    message = refusal(with_plan({f"layers.*.{name}": style for name, style in styles.items()}))
    for name, style in styles.items():
        assert all(f"{block}.{name} ({style})" in message for block in BLOCKS)
    # A gathered output is no role: fused projections have it, whose parts lie side by side.
    assert "q_proj" not in message


def test_a_long_list_is_cut_and_counted() -> None:
    plan = dict.fromkeys(build("llama").config.base_model_tp_plan, "sideways")
    message = refusal(with_plan(plan, num_hidden_layers=5))
    assert message.count("(sideways)") == 6
    assert "and 29 more" in message


def test_an_uncovered_parameter_is_listed() -> None:
    model = build("llama")
    model.model.layers[0].mlp.scale = nn.Parameter(torch.ones(3))
    model.model.layers[1].input_layernorm.shift = nn.Parameter(torch.ones(32))
    message = refusal(model)
    assert "no role is defined for" in message
    assert "model.layers.0.mlp.scale" in message
    assert "model.layers.1.input_layernorm.shift" in message


@pytest.mark.parametrize("family", ["mamba", "bloom"])
def test_a_family_without_a_plan_is_refused(family: str) -> None:
    assert "has no plan for tensor parallelism in this version of transformers" in refusal(
        build(family)
    )


@pytest.mark.parametrize("family", ["granitemoeshared"])
def test_other_architectures_are_refused_by_their_styles(family: str) -> None:
    model = build(family)
    styles = {*model.config.base_model_tp_plan.values()} - {"colwise", "rowwise"}
    message = refusal(model)
    assert "styles that memguard does not support" in message
    assert any(f"({style})" in message for style in styles)


# Sharded regardless, most would be almost right: losses off by 0.3 to 2 %, without an error.
@pytest.mark.parametrize(
    ("family", "fields", "culprit"),
    [
        ("olmo", {}, "model.norm (OlmoLayerNorm)"),
        ("nanochat", {}, "model.layers.0.input_layernorm (NanoChatRMSNorm)"),
    ],
)
def test_modules_that_compute_something_else_are_refused(
    monkeypatch: pytest.MonkeyPatch, family: str, fields: dict[str, Any], culprit: str
) -> None:
    monkeypatch.setitem(FAMILIES, family, {**FAMILIES["qwen3"], **fields})
    message = refusal(build(family, num_hidden_layers=1))
    assert "no sharded form of" in message
    assert culprit in message


def test_a_linear_layer_of_another_kind_is_refused() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = build("llama")
    model.model.layers[1].mlp.down_proj.__class__ = Doubled
    assert "no sharded form of model.layers.1.mlp.down_proj (Doubled)" in refusal(model)


def test_a_linear_layer_with_another_forward_but_the_same_result_is_split() -> None:
    roles = plan_sharding(build("falcon")).roles
    assert roles["transformer.h.0.self_attention.query_key_value"] == "plain"
    assert roles["transformer.h.1.mlp.dense_4h_to_h"] == "transposed"


def test_biases_of_all_heads_are_refused() -> None:
    assert "(ALiBi)" in refusal(build("falcon", alibi=True))


def test_weights_of_conv1d_have_their_placements_exchanged() -> None:
    plan = plan_sharding(build("gpt2"))
    block = "transformer.h.1"
    assert plan.placements(f"{block}.attn.c_attn.weight") == (Shard(0), Shard(1))
    assert plan.placements(f"{block}.attn.c_proj.weight") == (Shard(1), Shard(0))
    assert plan.placements(f"{block}.attn.c_attn.bias") == (Replicate(), Shard(0))
    assert plan.placements("transformer.wpe.weight") == (Shard(1), Replicate())


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_a_scaled_embedding_is_split(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setitem(FAMILIES, "gemma", FAMILIES["qwen3"])
    assert plan_sharding(build(family)).roles["model.embed_tokens"] == "embedding"


def test_an_embedding_with_another_forward_is_refused() -> None:
    class Shifted(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    model = build("llama")
    model.model.embed_tokens.__class__ = Shifted
    assert "no sharded form of model.embed_tokens (Shifted)" in refusal(model)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mixtral", "phi3", "stablelm"])
def test_storage_of_any_family_can_be_shared(family: str) -> None:
    model = build(family)
    plan = plan_storage(model)
    assert not plan.is_split
    assert len(plan.blocks) == 2
    # In FSDP2's terms: whole on y and x.
    for name, _ in model.named_parameters():
        assert plan.placements(name) == (Replicate(), Replicate())


def test_blocks_that_share_a_parameter_are_one_unit_of_storage() -> None:
    model = build("phi3")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    assert plan_storage(model).blocks == ()


def test_a_parameter_without_dimensions_is_refused() -> None:
    model = build("phi3")
    model.model.layers[1].scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ModelError, match=r"without dimensions.*model\.layers\.1\.scale"):
        plan_storage(model)


def test_a_model_without_a_head_is_refused() -> None:
    assert "has no LM head" in _refusal_without_way_out(build("llama").model)


def _refusal_without_way_out(model: Any) -> str:
    with pytest.raises(ModelError) as caught:
        plan_sharding(model)
    return str(caught.value)


def test_blocks_are_the_list_with_the_most_parameters() -> None:
    model = nn.Module()
    model.short = nn.ModuleList([nn.Identity()] * 2)
    model.layers = nn.ModuleList([nn.Identity()] * 11)
    assert find_blocks(model) == tuple(f"layers.{number}" for number in range(11))
    assert find_blocks(nn.Linear(2, 2)) == ()
    # A block whose parameters are all in its experts, of which there are more than blocks.
    model.layers = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2) for _ in range(8)])])
    assert find_blocks(model) == ("layers.0",)


def names_of_sharded(families: list[str]) -> list[tuple[list[str], dict[str, tuple[int, ...]]]]:
    """On a rank: names with aliases, and shapes of the whole."""
    mesh = build_mesh(MeshShape(x=2), "cpu")
    found = []
    for family in families:
        for is_tied in (False, True):
            config = build(family, tie_word_embeddings=is_tied).config
            layer = build_meta_layer(config, Assembly(mesh=mesh, device=torch.device("cpu")))
            model = layer.lm.model
            names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
            found.append((names, {n: tuple(p.shape) for n, p in model.named_parameters()}))
    return found


def test_names_and_shapes_of_parameters_stay(ranks: RankPool) -> None:
    families = ["llama", "qwen2", "qwen3"]
    plain = [
        build(family, tie_word_embeddings=is_tied)
        for family in families
        for is_tied in (False, True)
    ]
    for found in ranks(names_of_sharded, 2, families):
        for (names, shapes), model in zip(found, plain, strict=True):
            assert names == [name for name, _ in model.named_parameters(remove_duplicate=False)]
            assert shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}
