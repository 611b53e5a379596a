"""Sizes are read from any configuration, and each broken rule is one sentence."""

from typing import Any

import pytest
from transformers import Gemma3Config, GPT2Config, LlamaConfig, Qwen3Config

from memguard.errors import ModelError
from memguard.parallel.mesh_shape import ModelSizes, allows, build_rules, find_broken

LLAMA_8B = ModelSizes(
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    num_layers=32,
)


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
    with pytest.raises(ModelError, match=r"'intermediate_size' .* got None \(model_type 'gpt2'\)"):
        ModelSizes.from_config(GPT2Config())


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
    sizes = ModelSizes(
        hidden_size=64,
        num_heads=64,
        num_kv_heads=2,
        head_dim=6,
        intermediate_size=64,
        vocab_size=7,
        num_layers=1,
    )
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
