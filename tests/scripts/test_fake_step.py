"""A simulated step: counts of transformers, views of several ranks, meshes and models refused."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import transformers
from accelerate import init_empty_weights
from fake_step import SimulatedStep, simulate_step
from ranks import RankPool
from tiny_families import FAMILIES, LEAKING, MORE_FAMILIES

from memguard.config import TrainConfig
from memguard.errors import ConfigError, ModelError
from memguard.parallel.mesh_shape import MeshShape

pytestmark = pytest.mark.slow

# A mesh would refuse its dropout before anything else.
GPT2 = {"summary_first_dropout": 0}

# What auto means on a CPU.
CPU = {"micro_batch_size": None, "activation_checkpointing": "none", "precision": "fp32"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Ranks of a mesh, each with its view of a step."""

    mesh: tuple[int, int, int, int] = (1, 1, 1, 1)
    family: str = "llama"
    is_tied: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    views: tuple[int, ...] = (0,)
    train: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        fields = {**FAMILIES, **MORE_FAMILIES, **LEAKING}[self.family] | {
            "tie_word_embeddings": self.is_tied,
            **self.fields,
        }
        return transformers.AutoConfig.for_model(self.family, **fields)

    @property
    def shape(self) -> MeshShape:
        data, z, y, x = self.mesh
        return MeshShape(data=data, z=z, y=y, x=x)


def simulate(case: Case) -> list[SimulatedStep]:
    train = TrainConfig(**{**CPU, "batch_size": case.shape.num_batch_ways, **case.train})
    return [
        simulate_step(case.config, case.shape, train=train, seq_len=16, rank=rank)
        for rank in case.views
    ]


def count_by_transformers(case: Case) -> int:
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(case.config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def check_step(step: SimulatedStep) -> None:
    """Check what holds on every rank of fp32 weights."""
    assert step.weight_bytes == step.gradient_bytes == 4 * step.num_stored
    # Beside two moments AdamW keeps the number of steps, four bytes a parameter tensor.
    num_steps_bytes = step.optimizer_bytes - 2 * step.weight_bytes
    assert 0 < num_steps_bytes < 4 * 50
    assert num_steps_bytes % 4 == 0
    assert step.peak_bytes == sum(step.peak_origins.values())
    assert step.peak_bytes >= 4 * step.weight_bytes
    assert min(step.stages_s.values()) >= 0
    assert "forward and backward" in step.stages_s


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        pytest.param(Case(is_tied=True), marks=pytest.mark.long),
        pytest.param(
            Case(family="qwen3", train={"precision": "bf16", "activation_checkpointing": "full"}),
            marks=pytest.mark.long,
        ),
        pytest.param(Case(mesh=(1, 1, 1, 2)), marks=pytest.mark.long),
        Case(mesh=(2, 3, 2, 2), family="qwen2", is_tied=True),
    ],
    ids=["one process", "tied", "qwen3", "x", "qwen2 on every axis"],
)
def test_the_model_is_whole(ranks: RankPool, case: Case) -> None:
    ((step,),) = ranks(simulate, 1, case)
    check_step(step)
    assert step.num_parameters == count_by_transformers(case)
    if case.shape.num_ranks == 1:
        assert step.num_stored == step.num_parameters
        assert not step.calls
    else:
        assert step.calls


def test_the_ranks_along_z_have_the_model_once(ranks: RankPool) -> None:
    # Three divide neither 97 entries nor 32 features: the last rank has less.
    (steps,) = ranks(simulate, 1, Case(mesh=(1, 3, 1, 1), views=(0, 1, 2)))
    for step in steps:
        check_step(step)
    stored = [step.num_stored for step in steps]
    assert sum(stored) == steps[0].num_parameters
    assert stored[0] == stored[1] > stored[2]
    assert all(step.calls == steps[0].calls for step in steps), "each sends the same"


def test_all_ranks_of_an_even_mesh_see_the_same(ranks: RankPool) -> None:
    case = Case(mesh=(2, 2, 2, 2), fields={"vocab_size": 96}, views=(0, 5, 15))
    (steps,) = ranks(simulate, 1, case)
    first = steps[0]
    for step in steps[1:]:
        assert step.peak_bytes == first.peak_bytes
        assert step.num_stored == first.num_stored
        assert step.calls == first.calls


def test_micro_batches_send_weights_again_and_gradients_over_data_once(ranks: RankPool) -> None:
    one, two = (
        ranks(
            simulate, 1, Case(mesh=(2, 2, 1, 1), train={"batch_size": 4 * n, "micro_batch_size": 1})
        )[0][0]
        for n in (1, 2)
    )

    def count(step: SimulatedStep, axis: str) -> int:
        return sum(number for key, number in step.calls.items() if key[1] == axis)

    assert count(two, "z") == 2 * count(one, "z")
    assert count(two, "data") == count(one, "data")
    assert two.gradient_bytes == one.gradient_bytes


@pytest.mark.parametrize(
    ("case", "error", "said"),
    [
        (Case(mesh=(1, 1, 1, 3)), ConfigError, "'parallel.x' must divide"),
        (Case(mesh=(1, 1, 3, 1)), ConfigError, "'parallel.y' must divide"),
        (
            Case(mesh=(1, 1, 1, 2), family="bloom", fields={"intermediate_size": 128}),
            ModelError,
            "^BloomForCausalLM has no plan",
        ),
        (
            Case(mesh=(1, 1, 1, 2), family="granitemoeshared"),
            ModelError,
            "^GraniteMoeSharedForCausalLM cannot be split over x and y",
        ),
    ],
    ids=["x", "y", "bloom", "granitemoeshared"],
)
def test_what_cannot_run_is_refused(
    ranks: RankPool, case: Case, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        ranks(simulate, 1, case)
