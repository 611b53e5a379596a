"""What a step trains: names of modules by hand, memory and traffic against the engine's step."""

from functools import partial

import pytest
from fake_step import SimulatedStep
from ranks import RankPool
from step_cases import Case, check_memory, check_traffic, simulate_all
from step_flops import count_flops

from memguard.parallel.mesh_shape import MeshShape
from memguard.planner.parameters import find_trained
from memguard.planner.step_settings import AdapterSizes, StepSettings

# Measured: 8 % at most. Blocks are counted as the one with most to train, and the first block that
# backward reaches as the others, which weighs more where the rest of the step is small.
PEAK_TOLERANCE = 0.1
TIED = {"tie_word_embeddings": True}
# Two rows at a time on rank 0.
make_case = partial(Case, mesh=(2, 2, 1, 1), num_rows=2, micro_batch_size=2)

CASES = [
    make_case(modules=("lm_head",)),
    make_case(modules=("lm_head",), mesh=(1, 1, 1, 1)),
    make_case(modules=("layers.2", "model.norm"), checkpointing="full"),
    make_case(modules=("down_proj", "q_proj"), mesh=(2, 2, 2, 2), family="qwen2"),
    make_case(modules=("q_proj", "down_proj"), mesh=(1, 1, 1, 1)),
    make_case(modules=("embed_tokens", "lm_head", "1.mlp"), fields=TIED),
    make_case(modules=("model", "lm_head"), mesh=(1, 2, 2, 2), family="qwen3"),
]


@pytest.fixture(scope="module")
def steps(ranks: RankPool) -> dict[str, SimulatedStep]:
    return simulate_all(ranks, CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_and_traffic_are_those_of_the_engine(
    steps: dict[str, SimulatedStep], case: Case
) -> None:
    check_memory(case, steps[str(case)], PEAK_TOLERANCE)
    check_traffic(case, steps[str(case)])


LLAMA = Case().sizes


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
        sizes = Case(fields={"tie_word_embeddings": is_tied}).sizes
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
