"""What a step trains: names of modules by hand, memory and traffic against the engine's step."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import transformers
from fake_mesh import Calls
from fake_step import SimulatedStep, simulate_step
from planner_models import MODEL
from ranks import RankPool

from memguard.config import TrainConfig
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.compute import count_flops
from memguard.planner.memory import estimate_memory
from memguard.planner.parameters import find_trained
from memguard.planner.step_settings import AdapterSizes, StepSettings
from memguard.planner.traffic import list_collectives

# Measured: 8 % at most. Blocks are counted as the one with most to train, and the first block that
# backward reaches as the others, which weighs more where the rest of the step is small.
PEAK_TOLERANCE = 0.1
SEQ_LEN = 512


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step of rank 0 that trains some modules; two rows."""

    modules: tuple[str, ...]
    mesh: tuple[int, int, int, int] = (2, 2, 1, 1)
    family: str = "llama"
    checkpointing: Any = "none"
    is_tied: bool = False

    @property
    def shape(self) -> MeshShape:
        data, z, y, x = self.mesh
        return MeshShape(data=data, z=z, y=y, x=x)

    @property
    def config(self) -> Any:
        fields = {**MODEL, "tie_word_embeddings": self.is_tied}
        return transformers.AutoConfig.for_model(self.family, **fields)

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes.from_config(self.config)

    @property
    def settings(self) -> StepSettings:
        return StepSettings(
            num_tokens=2 * SEQ_LEN,
            num_labels=2 * (SEQ_LEN - 1),
            chunk_tokens=1024,
            checkpointing=self.checkpointing,
            trained_modules=self.modules,
        )


CASES = [
    Case(modules=("lm_head",)),
    Case(modules=("lm_head",), mesh=(1, 1, 1, 1)),
    Case(modules=("layers.2", "model.norm"), checkpointing="full"),
    Case(modules=("down_proj", "q_proj"), mesh=(2, 2, 2, 2), family="qwen2"),
    Case(modules=("q_proj", "down_proj"), mesh=(1, 1, 1, 1)),
    Case(modules=("embed_tokens", "lm_head", "1.mlp"), is_tied=True),
    Case(modules=("model", "lm_head"), mesh=(1, 2, 2, 2), family="qwen3"),
]


def simulate_all(cases: Sequence[Case]) -> list[SimulatedStep]:
    return [
        simulate_step(
            case.config,
            case.shape,
            train=TrainConfig(
                batch_size=2 * case.shape.num_batch_ways,
                micro_batch_size=2,
                precision="bf16",
                activation_checkpointing=case.checkpointing,
                trainable_modules=case.modules,
            ),
            seq_len=SEQ_LEN,
        )
        for case in cases
    ]


@pytest.fixture(scope="module")
def steps(ranks: RankPool) -> dict[Case, SimulatedStep]:
    return dict(zip(CASES, ranks(simulate_all, 1, CASES, timeout_s=280)[0], strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_and_traffic_are_those_of_the_engine(
    steps: dict[Case, SimulatedStep], case: Case
) -> None:
    step = steps[case]
    memory = estimate_memory(case.sizes, case.shape, case.settings, seq_len=SEQ_LEN)
    assert memory.peak.weights == step.weight_bytes
    assert memory.gradient_bytes == step.gradient_bytes
    assert memory.gradient_bytes == 4 * step.num_stored
    part = find_trained(case.sizes, case.shape, modules=case.modules)
    units = [block.unit for block in part.blocks]
    num_tensors = sum(len(unit.parameters) for unit in [*units, *part.others])
    # AdamW also counts the steps of each parameter, in four bytes.
    assert memory.peak.optimizer == step.optimizer_bytes - 4 * num_tensors
    assert memory.peak.total == pytest.approx(step.peak_bytes, rel=PEAK_TOLERANCE)
    expected: Calls = Counter()
    for call in list_collectives(case.sizes, case.shape, case.settings):
        expected[call.phase, call.axis, call.operation, call.num_bytes] += call.num_calls
    assert step.calls == expected


LLAMA = Case(modules=()).sizes


@pytest.mark.parametrize(
    ("modules", "first", "num_trained"),
    [
        (None, 0, {"input_layernorm.weight", "mlp.down_proj.weight"}),
        (("lm_head",), 3, set()),
        (("layers.2", "lm_head"), 2, {"input_layernorm.weight", "mlp.down_proj.weight"}),
        (("1.mlp.down_proj",), 1, {"mlp.down_proj.weight"}),
        (("input_layernorm",), 0, {"input_layernorm.weight"}),
        (("embed_tokens",), 0, set()),
        (("proj",), 3, set()),
    ],
)
def test_names_select_modules_as_in_training(
    modules: tuple[str, ...] | None, first: int, num_trained: set[str]
) -> None:
    part = find_trained(LLAMA, MeshShape(), modules=modules)
    assert part.first == first
    watched = {"input_layernorm.weight", "mlp.down_proj.weight"}
    assert watched & set(part.typical.unit.parameters) == num_trained


def test_a_trained_embedding_is_the_head_only_if_they_are_tied() -> None:
    for is_tied in (True, False):
        sizes = Case(modules=(), is_tied=is_tied).sizes
        assert find_trained(sizes, MeshShape(), modules=("embed_tokens",)).has_head == is_tied


def test_targets_of_some_blocks_count_there_only() -> None:
    adapter = AdapterSizes(r=2, targets=("layers.1.self_attn.v_proj", "down_proj"))
    part = find_trained(LLAMA, MeshShape(), adapter)
    names = [[layer.name for layer in block.adapted] for block in part.blocks]
    assert names == [["down_proj"], ["v_proj", "down_proj"], ["down_proj"]]
    # 512 features, 4 heads of 64 for keys and values, FFN width of 1,408.
    assert part.stored == 3 * 2 * (1408 + 512) + 2 * (512 + 256)


def test_frozen_blocks_before_the_first_trained_one_only_run_forward() -> None:
    def count(modules: tuple[str, ...] | None) -> int:
        settings = StepSettings(num_tokens=8, num_labels=8, trained_modules=modules)
        return count_flops(LLAMA, MeshShape(), settings, seq_len=-1)

    linear = 2 * 8 * (512 * (512 + 2 * 256) + 512 * 512 + 3 * 512 * 1408)
    inputs = 2 * 8 * 512 * (512 + 2 * 256)
    head = 2 * 8 * 512 * 4096
    # Forward of three blocks, backward of one; its input needs no gradient.
    assert count(("layers.2",)) == 5 * linear - inputs + 2 * head
    assert count(None) == 9 * linear + 3 * head
