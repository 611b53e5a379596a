"""The table of model types: what is tried decides, and reasons are those of the refusals."""

from typing import Any

import family_groups as families
import pytest
import transformers
from default_configs import FEW_LAYERS, make_default_config, set_no_dropout
from family_groups import GROUPS, list_lines, shorten_reason, survey_families
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from memguard.errors import ConfigError, ModelError
from memguard.hf.from_config import RUNNABLE, reduce_config

pytestmark = pytest.mark.slow


def test_each_group_has_the_families_that_belong_there() -> None:
    done: list[str] = []
    names = ("xlnet", "bloom", "llama", "hyperclovax", "dbrx", "bert", "gpt_neox", "seed_oss")
    table = survey_families(names, done.append)
    assert tuple(done) == names
    found = {family.model_type: family for family in table.families}
    # By group, then by name.
    assert list(found) == [
        *("gpt_neox", "hyperclovax", "llama", "seed_oss"),
        *("bert", "bloom", "xlnet", "dbrx"),
    ]
    assert {name: family.group for name, family in found.items()} == {
        "gpt_neox": "any mesh",
        "hyperclovax": "any mesh",
        "llama": "any mesh",
        "seed_oss": "any mesh",
        "bert": "data and z",
        "bloom": "data and z",
        "xlnet": "none",
        "dbrx": "unknown",
    }
    assert found["llama"].is_compared
    assert not found["bloom"].is_compared
    assert found["bloom"].reason == "no plan for tensor parallelism"
    assert found["xlnet"].reason == (
        "is not a causal language model: its predictions depend on later tokens"
    )
    assert found["bert"].condition == "is_decoder: true in config.json"
    # It has the field, but does not read it.
    assert found["gpt_neox"].condition is None
    assert found["seed_oss"].condition is not None
    assert "train.dropout: 0 in a run" in found["seed_oss"].condition
    assert found["llama"].condition is None
    assert table.counts == dict(zip(GROUPS, (4, 2, 0, 1, 1), strict=True))
    assert table.num_compared == 4
    lines = list(list_lines(table))
    assert lines[0] == "any mesh (4)"
    assert lines[-1].endswith(": 4 any mesh, 2 data and z, 1 none, 1 unknown")
    bloom = ["bloom", "no", "plan", "for", "tensor", "parallelism"]
    assert bloom in [line.split() for line in lines]
    assert any("only with is_decoder: true in config.json" in line for line in lines)


def test_the_answer_is_that_of_the_functions_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = families.build_meta_layer
    refused: list[tuple[int, int]] = []

    def refuse(config: Any, sharding: Any) -> Any:
        shape = sharding.mesh.shape
        if (shape.y, shape.x) in refused:
            raise ModelError(f"Llama cannot be split over x and y: not on y={shape.y}")
        return inner(config, sharding)

    monkeypatch.setattr(families, "build_meta_layer", refuse)
    for given, group, reason in (
        ([], "any mesh", None),
        ([(2, 2)], "data and z", "not on y=2"),
        ([(2, 2), (1, 1)], "one process", "not on y=1"),
    ):
        refused[:] = given
        family = families.try_family("llama")
        assert (family.group, family.reason) == (group, reason)


def test_a_family_that_crashes_is_listed_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(config: Any, sharding: Any) -> Any:
        raise AssertionError("no sharded form of 'positions'")

    monkeypatch.setattr(families, "build_meta_layer", crash)
    family = families.try_family("llama")
    assert family.group == "one process"
    assert family.reason == ("sharding fails with AssertionError: no sharded form of 'positions'")


def test_an_unknown_head_keeps_a_family_off_y_and_x(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = families._Trial(has_run=True, has_known_head=False)
    monkeypatch.setattr(families, "_run_small", lambda config: trial)
    family = families.try_family("llama")
    assert family.group == "data and z"
    assert family.reason.startswith("transforms the output of its head")


def test_names_that_are_no_types_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        survey_families(["gpt-neo", "llama", "zzz"])
    assert len(caught.value.problems) == 2
    assert "got 'gpt-neo': did you mean gpt_neo" in caught.value.problems[0]
    assert "leave out all names" in caught.value.problems[1]


@pytest.mark.parametrize(
    ("message", "short"),
    [
        (
            "BloomForCausalLM has no plan for tensor parallelism in this version of transformers. "
            "It can use the axes data and z.",
            "no plan for tensor parallelism",
        ),
        (
            "GlmForCausalLM cannot be split over x and y: its plan for tensor parallelism has "
            "styles that memguard does not support: model.layers.0.mlp.up (packed), "
            "model.layers.1.mlp.up (packed), model.layers.1.mlp.down (packed) and 9 more. It can "
            "use the axes data and z.",
            "other styles: mlp.up (packed), mlp.down (packed)",
        ),
        (
            "DogeForCausalLM cannot be split over x and y: no role is defined for "
            "model.layers.0.a, model.layers.1.a, model.b. It can use the axes data and z.",
            "no role is defined for a, model.b",
        ),
        (
            "the model's configuration must give 'hidden_size' as a whole number to be split over "
            "a mesh; got None (model_type 'x'). It can run on one process.",
            "the model's configuration must give 'hidden_size' as a whole number to be split over "
            "a mesh",
        ),
    ],
)
def test_a_reason_keeps_what_differs_between_families(message: str, short: str) -> None:
    assert shorten_reason(message) == short


def test_a_reduced_configuration_keeps_its_widths_or_not() -> None:
    config = make_default_config("qwen3_moe")
    few = reduce_config(config, FEW_LAYERS)
    assert (few.num_hidden_layers, few.num_experts) == (4, 2)
    assert few.hidden_size == config.hidden_size
    narrow = reduce_config(config, RUNNABLE[0])
    assert (narrow.hidden_size, narrow.num_hidden_layers, narrow.vocab_size) == (64, 2, 512)
    # Per-layer lists follow, and special tokens stay inside of the vocabulary.
    gemma = reduce_config(make_default_config("gemma2"), RUNNABLE[0])
    assert len(gemma.layer_types) == gemma.num_hidden_layers
    roberta = transformers.RobertaConfig(pad_token_id=4000)
    assert reduce_config(roberta, RUNNABLE[0]).pad_token_id < 512
    # Sizes that a class leaves out are derived.
    assert make_default_config("nemotron").num_key_value_heads > 0
    assert set_no_dropout(transformers.GPT2Config()).attn_pdrop == 0
    assert config.num_experts > 2, "the original is unchanged"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_type_of_the_installed_transformers_is_listed() -> None:
    table = survey_families()
    assert {family.model_type for family in table.families} == {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    counts = table.counts
    assert counts["any mesh"] >= 31
    assert counts["any mesh"] + counts["data and z"] >= 172
    assert table.num_compared >= 23
    # Every other family has its reason.
    assert all(family.reason for family in table.families if family.group != "any mesh")
    # Most have run.
    assert sum(family.has_run for family in table.families) >= 163


def test_a_family_that_fails_does_not_end_the_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("rows do not match")

    monkeypatch.setattr(families, "plan_sharding", fail)
    (family,) = survey_families(["llama"]).families
    assert family.group == "none"
    assert family.reason == "memguard fails: AssertionError: rows do not match"
