"""Sizes are read from any configuration, and each broken rule is one sentence."""

from dataclasses import replace
from typing import Any

import pytest
from published_sizes import LLAMA_8B
from transformers import (
    FalconConfig,
    Gemma3Config,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from memguard.errors import ConfigError, ModelError
from memguard.parallel.mesh_shape import (
    MeshShape,
    allows,
    build_rules,
    check_mesh,
    find_broken,
    list_meshes,
    nearest_world_sizes,
)
from memguard.parallel.model_sizes import ModelSizes


def test_sizes_of_a_llama() -> None:
    config = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        num_hidden_layers=32,
    )
    assert ModelSizes.from_config(config) == LLAMA_8B


def test_a_head_may_be_wider_than_its_share() -> None:
    config = Qwen3Config(hidden_size=1024, num_attention_heads=16, head_dim=128)
    assert ModelSizes.from_config(config).head_dim == 128


def test_a_composite_configuration_counts_by_its_text_part() -> None:
    config = Gemma3Config(text_config={"hidden_size": 64, "vocab_size": 99})
    sizes = ModelSizes.from_config(config)
    assert (sizes.hidden_size, sizes.vocab_size) == (64, 99)


class PlainConfig:
    """What an older family says of itself: no key/value heads, no head_dim."""

    model_type = "plain"
    hidden_size, num_attention_heads, num_hidden_layers = 64, 4, 2
    intermediate_size: Any = 256
    vocab_size = 300
    num_key_value_heads = None

    def get_text_config(self) -> "PlainConfig":
        return self


def test_what_is_not_said_follows_from_the_rest() -> None:
    sizes = ModelSizes.from_config(PlainConfig())
    assert (sizes.num_kv_heads, sizes.head_dim) == (4, 16)


@pytest.mark.parametrize("value", [None, [256, 512], 0])
def test_a_size_that_is_no_number_is_named(value: Any) -> None:
    config = PlainConfig()
    config.intermediate_size = value
    with pytest.raises(ModelError, match=r"give 'intermediate_size' as a whole .*'plain'"):
        ModelSizes.from_config(config)


def test_a_family_without_the_field_is_named() -> None:
    with pytest.raises(ModelError, match=r"'intermediate_size' .* got None \(model_type 'gptj'\)"):
        ModelSizes.from_config(GPTJConfig())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # (heads, key/value heads, features of a head, FFN width), as published.
        (GPT2Config(), (12, 12, 64, 3072)),
        (GPT2Config(n_inner=100), (12, 12, 64, 100)),
        (FalconConfig(num_kv_heads=71), (71, 1, 64, 18176)),
        (FalconConfig(multi_query=False), (71, 71, 64, 18176)),
        (
            FalconConfig(
                hidden_size=8192,
                num_attention_heads=128,
                num_kv_heads=8,
                new_decoder_architecture=True,
                ffn_hidden_size=30000,
            ),
            (128, 8, 64, 30000),
        ),
        (GPTBigCodeConfig(n_embd=6144, n_head=48), (48, 1, 128, 24576)),
        (GPTBigCodeConfig(multi_query=False), (12, 12, 64, 3072)),
        (OPTConfig(), (12, 12, 64, 3072)),
        (Phi3Config(num_key_value_heads=8), (32, 8, 96, 8192)),
    ],
)
def test_sizes_under_other_names(config: Any, expected: tuple[int, ...]) -> None:
    sizes = ModelSizes.from_config(config)
    found = (sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.intermediate_size)
    assert found == expected


def test_more_ranks_than_the_one_key_head_of_falcon_must_divide_its_features() -> None:
    falcon = ModelSizes.from_config(FalconConfig(hidden_size=96, num_attention_heads=12))
    check_mesh(MeshShape(x=4), falcon)
    with pytest.raises(
        ConfigError, match="above the number of key/value heads must divide their 8"
    ):
        check_mesh(MeshShape(x=6), falcon)


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (
            {"data": 3, "z": 2},
            ["'parallel.data' × 'parallel.z' must divide 'train.batch_size', 16 rows; "
             "got 3 × 2 = 6"],
        ),
        ({"y": 3}, ["'parallel.y' must divide the model's hidden size of 4096; got 3"]),
        ({"x": 64}, ["'parallel.x' must divide the model's 32 attention heads; got 64"]),
        (
            {"x": 3},
            [
                "'parallel.x' must divide the model's 32 attention heads; got 3",
                "'parallel.x' must divide the model's 8 key/value heads or be a multiple of them; "
                "got 3",
                "'parallel.x' must divide the model's FFN width of 14336; got 3",
            ],
        ),
        # Two degrees are one rule's: nothing is said while one of them is open.
        ({"data": 3}, []),
        ({"data": 4, "z": 4, "y": 4096, "x": 32}, []),
    ],
)  # fmt: skip
def test_broken_rules_are_sentences(degrees: dict[Any, int], expected: list[str]) -> None:
    assert find_broken(degrees, build_rules(LLAMA_8B, 16)) == expected


def test_rules_that_only_odd_models_break() -> None:
    widths = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 7}
    sizes = replace(LLAMA_8B, **widths, num_heads=64, num_kv_heads=2, head_dim=6)
    assert find_broken({"x": 8}, build_rules(sizes, None)) == [
        "'parallel.x' above the number of key/value heads must divide their 12 features; got 8",
        "'parallel.x' must leave every rank some of the model's 7 vocabulary entries; got 8",
    ]


def test_an_open_degree_says_where_it_came_from() -> None:
    (problem,) = find_broken({"x": 64}, build_rules(LLAMA_8B, None), rest="x")
    assert problem.endswith("got 64 ('parallel.x' is -1, the rest of the ranks)")
    (problem,) = find_broken({"x": 64}, build_rules(LLAMA_8B, None), rest="data")
    assert problem.endswith("got 64")


def test_only_the_rules_of_the_axes_are_asked() -> None:
    rules = build_rules(LLAMA_8B, 16)
    assert allows(rules, ("x",), 16)
    assert not allows(rules, ("x",), 3)
    assert not allows(rules, ("data", "z"), 3)
    assert allows(build_rules(None, None), ("x",), 3)


def test_widths_of_experts_are_split_by_y_and_x_together() -> None:
    fields = {"num_experts": 60, "moe_intermediate_size": 1408, "intermediate_size": 5632}
    config = Qwen2MoeConfig(**fields, shared_expert_intermediate_size=5632)
    rules = build_rules(ModelSizes.from_config(config), None)
    assert find_broken({"y": 2, "x": 8}, rules) == []
    # 1408 = 2^7 x 11: parts of 44 features for 32 ranks.
    assert find_broken({"y": 4, "x": 8}, rules) == [
        "'parallel.y' × 'parallel.x' must split the experts' FFN width of 1408 into multiples of "
        "8; got 4 × 8 = 32"
    ]
    assert find_broken({"y": 1, "x": 1}, rules) == []
    config = GptOssConfig(intermediate_size=2880)
    assert find_broken({"y": 2, "x": 8}, build_rules(ModelSizes.from_config(config), None)) == []


def test_meshes_of_experts_follow_the_rule() -> None:
    fields = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8}
    sizes = ModelSizes.from_config(MixtralConfig(**fields, intermediate_size=32))
    products = {(mesh.y, mesh.x) for mesh in list_meshes(8, sizes, batch_size=8)}
    assert {y * x for y, x in products} == {1, 2, 4}
    assert nearest_world_sizes(64, sizes, batch_size=1) == [4, 2, 1]
    # Without dense layers of another width there is no other rule for widths.
    assert [rule.axes for rule in build_rules(sizes, None) if "FFN" in rule.text] == [("y", "x")]
