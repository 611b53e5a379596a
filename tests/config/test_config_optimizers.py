"""Settings of optimizers: what one cannot do, or does not read, is refused with a way out."""

import typing
from typing import Any

import pytest
from pydantic import ValidationError

from memguard.config import OptimConfig, RunConfig, TrainConfig
from memguard.config.optimizers import OPTIMIZERS, is_quantised

RUN: dict[str, Any] = {"name": "x", "model": {"path": "m"}, "data": {"train": "a.jsonl"}}
ADALOMO = {"optim": {"name": "adalomo", "max_grad_norm": None}}
MEZO = {"optim": {"name": "mezo", "max_grad_norm": None}}
BF16 = {"train": {"weights": "bf16"}}
DP_SGD = {"mitigations": [{"name": "dp_sgd", "noise_multiplier": 1.0}]}


def test_every_name_has_facts() -> None:
    annotation = OptimConfig.model_fields["name"].annotation
    assert set(typing.get_args(annotation)) == OPTIMIZERS.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": {"name": "adalomo"}}, "'optim.max_grad_norm' must be null with .*before the n"),
        ({"optim": {"name": "lomo"}}, "'optim.max_grad_norm' must be null .*two backward passes"),
        ({"optim": {"name": "mezo"}}, "'optim.max_grad_norm' must be null .*no gradients; got 1$"),
        (
            {"optim": {**ADALOMO["optim"], "betas": [0.9, 0.99]}},
            r"'optim.betas' does nothing .*99\)",
        ),
        ({"optim": {**MEZO["optim"], "weight_decay": 0.1}}, "'optim.weight_decay' does nothing"),
        ({**ADALOMO, "adapter": {"name": "lora"}}, "'adapter' must be null with .*use adamw"),
        ({**MEZO, **DP_SGD}, "'mitigations' must be without dp_sgd with"),
        (
            {**ADALOMO, "train": {"micro_batch_size": 4}},
            "'train.micro_batch_size' must be null with .*lower 'train.b",
        ),
        ({**MEZO, **BF16}, "'train.weights' must be fp32 with 'optim.name: mezo'"),
        ({**MEZO, "train": {"dropout": 0.1}}, "'train.dropout' must be null"),
        (
            {**MEZO, "train": {"activation_checkpointing": "full"}},
            "must be auto with .*no gradients",
        ),
        ({**BF16, "adapter": {"name": "lora"}}, "'train.weights' must be fp32 with 'adapter'"),
        ({**BF16, **DP_SGD}, "'train.weights' must be fp32 with 'mitigations': dp_sgd"),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message.removesuffix("$")) as caught:
        RunConfig.model_validate({**RUN, **changes})
    problem = str(caught.value.errors()[0]["ctx"]["error"])
    assert len(problem) <= 160
    assert "\n" not in problem


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_every_default_written_out_is_accepted(name: str) -> None:
    optim = OptimConfig(name=name, max_grad_norm=None)  # type: ignore[arg-type]
    train = TrainConfig(micro_batch_size=16, batch_size=16)
    run = {**RUN, "optim": optim.model_dump(), "train": train.model_dump()}
    assert RunConfig.model_validate(run).optim.name == name


@pytest.mark.parametrize(
    ("shape", "is_embedding", "expected"),
    [
        ((64, 64), False, True),
        ((63, 64), False, False),
        ((4096, 65), False, False),
        ((8192,), False, False),
        ((64, 64), True, False),
        ((8, 16, 64), False, True),
    ],
)
def test_moments_of_large_matrices_are_quantised(
    shape: tuple[int, ...], is_embedding: bool, expected: bool
) -> None:
    assert is_quantised(shape, is_embedding=is_embedding) is expected
