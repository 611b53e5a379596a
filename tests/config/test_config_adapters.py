"""Settings of adapters: peft's names; what memguard does not compute is refused by name."""

from typing import Any

import pytest
from corpus_examples import summarise
from pydantic import ValidationError

from memguard.config import RunConfig
from memguard.config.adapters import LoraConfig
from memguard.workflows.common.folder import compute_run_key

RUN: dict[str, Any] = {"name": "x", "model": {"path": "m"}, "data": {"train": "a.jsonl"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_parameters": ["experts"]}, "memguard has no 'target_parameters' of peft: its"),
        ({"modules_to_save": ["lm_head"]}, "memguard has no 'modules_to_save' of peft"),
        ({"bias": "all"}, "memguard has no 'bias' of peft"),
        ({"target_modules": []}, "'target_modules' must name a layer, or be all-linear"),
        ({"target_modules": "q_proj"}, "must be all-linear or a list of names, as in .*'q_proj'"),
        ({"init_lora_weights": "pissa"}, "gaussian"),
        ({"use_dora": True, "lora_dropout": 0.1}, "'use_dora' and 'lora_dropout' cannot be comb"),
        ({"r": 0}, "greater than or equal to 1"),
        ({"lora_dropout": 1}, "less than 1"),
        ({"name": "ia3"}, "'lora'"),
    ],
)
def test_unsupported_adapters_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LoraConfig.model_validate({"name": "lora", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": {"trainable_modules": ["lm_head"]}},
            "'adapter' and 'train.trainable_modules' cannot be combined",
        ),
        (
            {"model": {"scratch": {"config": {"model_type": "llama"}}}},
            "'adapter' needs a trained model in 'model.path'",
        ),
    ],
)
def test_settings_that_do_not_go_with_adapters_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate({**RUN, "adapter": {"name": "lora"}, **changes})


def test_defaults_are_those_of_peft() -> None:
    import peft

    ours, theirs = LoraConfig(name="lora"), peft.LoraConfig()
    for name in ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_adapters_are_in_the_run_key() -> None:
    plain = RunConfig.model_validate(RUN)
    adapted, other = (
        RunConfig.model_validate({**RUN, "adapter": {"name": "lora", "r": r}}) for r in (8, 4)
    )
    assert len({compute_run_key(config, summarise(1)) for config in (plain, adapted, other)}) == 3
