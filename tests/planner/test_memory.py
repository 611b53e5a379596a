"""Estimated memory of a rank, against the engine's own step on fake tensors, and by hand."""

import subprocess
import sys
from dataclasses import replace

import pytest
from fake_step import SimulatedStep
from hypothesis import given, settings
from hypothesis import strategies as st
from published_sizes import LLAMA_405B
from ranks import RankPool
from step_cases import MODES, ONE, Case, check_memory, simulate_all

from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.fit import count_parameters
from memguard.planner.memory import estimate_memory
from memguard.planner.step_settings import StepSettings

pytestmark = pytest.mark.slow

# Measured: 5 % at most, on these cases and some hundred others. What the estimate leaves out, and
# what at sizes as small as these is not yet lost beside the rest: statistics of norms, losses token
# by token, indices, copies that live for one operation.
PEAK_TOLERANCE = 0.1

TIED = {"tie_word_embeddings": True}
SMALL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6}
# Neither three ranks along z nor two along x divide it.
UNEVEN = {"vocab_size": 4097}


QUICK = [
    *(Case(checkpointing=mode) for mode in MODES),
    Case(mesh=ONE),
    Case(family="mistral", is_bf16=False, fields=SMALL),
    Case(family="qwen2", fields=TIED, checkpointing="full"),
    # Two ranks share a key/value head, each has two query heads.
    Case(mesh=(1, 1, 1, 8), fields={**SMALL, "num_attention_heads": 16}, seq_len=1024),
    Case(fields=SMALL, num_rows=2),
    Case(mesh=(1, 4, 1, 2), reshard=False),
    Case(mesh=(1, 1, 2, 2), fields={**SMALL, "vocab_size": 65536}),
    Case(mesh=(1, 3, 1, 2), fields=UNEVEN, rank=5),
]
MORE = [
    Case(family="qwen3", fields=SMALL, checkpointing="selective"),
    Case(mesh=(1, 2, 1, 2), seq_len=4096, checkpointing="full", fields=SMALL),
    Case(mesh=(1, 3, 1, 2), fields=UNEVEN),
    *(
        Case(mesh=mesh, family=family, fields=fields, checkpointing=mode)
        for mesh in (ONE, (1, 2, 2, 2))
        for family, fields in (("llama", {}), ("mistral", TIED), ("qwen2", TIED), ("qwen3", {}))
        for mode in MODES
    ),
    *(
        Case(mesh=mesh, checkpointing=mode, is_bf16=is_bf16)
        for mesh in ((1, 1, 1, 4), (1, 1, 4, 1), (1, 4, 1, 1), (4, 1, 1, 1), (1, 1, 1, 8))
        for mode, is_bf16 in (*((mode, True) for mode in MODES), ("none", False))
    ),
    *(
        Case(mesh=mesh, checkpointing=mode, **changes)
        for mesh in (ONE, (1, 2, 2, 2))
        for mode in MODES
        for changes in (
            {"is_bf16": False},
            {"num_rows": 4},
            {"num_rows": 4, "micro_batch_size": 4},
            {"seq_len": 64},
            {"seq_len": 4096},
            {"fields": {"vocab_size": 65536}},
            {"fields": LARGE},
        )
    ),
    *(Case(mesh=(1, 4, 2, 1), checkpointing=mode, reshard=False) for mode in MODES),
    *(
        Case(mesh=(1, 3, 2, 2), checkpointing=mode, fields=UNEVEN, rank=rank, family="qwen3")
        for mode in MODES
        for rank in (0, 11)
    ),
]


@pytest.fixture(scope="module")
def quick(ranks: RankPool) -> dict[str, SimulatedStep]:
    return simulate_all(ranks, QUICK)


@pytest.fixture(scope="module")
def more(ranks: RankPool) -> dict[str, SimulatedStep]:
    return simulate_all(ranks, MORE)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_memory_is_that_of_the_engine(quick: dict[str, SimulatedStep], case: Case) -> None:
    check_memory(case, quick[str(case)], PEAK_TOLERANCE)


@pytest.mark.mesh
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_meshes_and_models(more: dict[str, SimulatedStep], case: Case) -> None:
    check_memory(case, more[str(case)], PEAK_TOLERANCE)


# -- by hand ---------------------------------------------------------------------------------------

BF16 = StepSettings(num_tokens=2048, num_labels=2047, chunk_tokens=1024, checkpointing="full")


@pytest.mark.quick
def test_gradients_of_a_first_micro_batch_stay_for_the_second() -> None:
    step = replace(BF16, num_tokens=65536, num_labels=65535, checkpointing="none")
    one, two = (
        estimate_memory(
            LLAMA_405B, MeshShape(z=128), replace(step, num_micro_batches=number), seq_len=2048
        )
        for number in (1, 2)
    )
    # With so many activations the peak is at the head, where only the head has gradients yet.
    assert one.peak.activations > one.peak.weights
    assert one.peak.gradients < one.gradient_bytes / 10
    assert two.peak.gradients == two.gradient_bytes


def test_405b_on_128_ranks_stores_51_gb_each() -> None:
    block = 2 * 16384 * 16384  # q, o
    block += 2 * 16384 * (8 * 128)  # k, v
    block += 3 * 16384 * 53248  # gate, up, down
    block += 2 * 16384  # norms
    num_parameters = 126 * block + 2 * 128256 * 16384 + 16384
    assert num_parameters == count_parameters(LLAMA_405B) == 405_853_388_800
    # 16 bytes: weight, gradient and two moments in fp32. 128 divides the rows of every matrix.
    memory = estimate_memory(LLAMA_405B, MeshShape(z=128), BF16, seq_len=2048)
    stored = memory.peak.weights + memory.gradient_bytes + memory.peak.optimizer
    assert stored == 16 * num_parameters // 128 == 50_731_673_600
    # Over x and y only the norms are stored more than once.
    memory = estimate_memory(LLAMA_405B, MeshShape(z=8, y=2, x=8), BF16, seq_len=2048)
    stored = memory.peak.weights + memory.gradient_bytes + memory.peak.optimizer
    num_norms = 2 * 126 + 1
    assert stored == 50_731_673_600 + 16 * num_norms * 16384 * 7 // 128


def test_a_block_of_fp32_on_one_process() -> None:
    """Every tensor of a step whose peak is the update, counted by hand."""
    sizes = replace(
        LLAMA_405B,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=100_000,
        num_layers=1,
    )
    step = StepSettings(num_tokens=2, num_labels=1, chunk_tokens=1, compute_bytes=4)
    memory = estimate_memory(sizes, MeshShape(), step, seq_len=2)
    table, block = 100_000 * 64, 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    num_parameters = 2 * table + block + 64
    assert memory.peak.weights == memory.gradient_bytes == 4 * num_parameters
    assert memory.peak.optimizer == 8 * num_parameters
    # A few activations of two tokens, when the embedding's gradient is made, come on top.
    assert 0 <= memory.peak.total - 16 * num_parameters < 2048
    assert memory.moment == "backward of the embedding"


# -- what must hold for any sizes ------------------------------------------------------------------

_POWERS = st.sampled_from([1, 2, 4, 8])


@st.composite
def draw_sizes(draw: st.DrawFn) -> ModelSizes:
    """Sizes in proportions that models have; any degree up to 8 divides them."""
    num_kv_heads = draw(st.sampled_from([8, 16]))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2, 4]))
    head_dim = draw(st.sampled_from([64, 128]))
    hidden_size = num_heads * head_dim
    return ModelSizes(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=hidden_size * draw(st.sampled_from([2, 3, 4])),
        vocab_size=draw(st.integers(1000, 200_000)),
        num_layers=draw(st.integers(1, 100)),
        is_tied=draw(st.booleans()),
        has_qkv_bias=draw(st.booleans()),
        has_head_norms=draw(st.booleans()),
    )


@st.composite
def draw_meshes(draw: st.DrawFn) -> MeshShape:
    return MeshShape(data=draw(_POWERS), z=draw(_POWERS), y=draw(_POWERS), x=draw(_POWERS))


@st.composite
def draw_steps(draw: st.DrawFn) -> StepSettings:
    num_tokens = 1024 * draw(st.integers(1, 16))
    return StepSettings(
        num_tokens=num_tokens,
        num_labels=num_tokens - 1,
        num_micro_batches=draw(st.integers(1, 3)),
        chunk_tokens=1024,
        compute_bytes=draw(st.sampled_from([2, 4])),
        checkpointing=draw(st.sampled_from(MODES)),
        reshard_after_forward=draw(st.booleans()),
    )


def total(sizes: ModelSizes, mesh: MeshShape, step: StepSettings, seq_len: int = 1024) -> int:
    return estimate_memory(sizes, mesh, step, seq_len=seq_len).peak.total


@settings(max_examples=50)
@given(draw_sizes(), draw_meshes(), draw_steps(), st.integers(1, 5000))
def test_larger_inputs_need_no_less_memory(
    sizes: ModelSizes, mesh: MeshShape, step: StepSettings, more: int
) -> None:
    least = total(sizes, mesh, step)
    tokens = {"num_tokens": step.num_tokens + more, "num_labels": step.num_labels + more}
    assert least <= total(sizes, mesh, replace(step, **tokens))
    assert least <= total(sizes, mesh, step, seq_len=1024 + more)
    assert least <= total(replace(sizes, vocab_size=sizes.vocab_size + more), mesh, step)
    assert least <= total(replace(sizes, num_layers=sizes.num_layers + more), mesh, step)
    assert least <= total(sizes, mesh, replace(step, num_micro_batches=4))
    assert least <= total(sizes, mesh, replace(step, reshard_after_forward=False))


@settings(max_examples=50)
@given(draw_sizes(), draw_meshes(), draw_steps())
def test_sharding_over_more_ranks_needs_no_more_memory(
    sizes: ModelSizes, mesh: MeshShape, step: StepSettings
) -> None:
    # Two ranks at least: one process has no gathered weights and other activations.
    mesh = replace(mesh, x=max(2, mesh.x))
    assert total(sizes, replace(mesh, z=2 * mesh.z), step) <= total(sizes, mesh, step)


@settings(max_examples=50)
@given(draw_sizes(), draw_meshes(), draw_steps())
def test_recomputing_more_needs_no_more_memory(
    sizes: ModelSizes, mesh: MeshShape, step: StepSettings
) -> None:
    # One block is computed again while what it began with is there: others must gain that, and
    # their activations be more than gradients, which are most when no activations are left.
    sizes = replace(sizes, num_layers=max(8, sizes.num_layers))
    step = replace(step, num_tokens=65536, num_labels=65535)
    none, selective, full = (
        total(sizes, mesh, replace(step, checkpointing=mode)) for mode in MODES
    )
    assert full <= selective
    assert full <= none
    if mesh.y == 1:
        assert selective <= none
    # Over y what matmuls give is kept before and after its all-reduce: no less than everything.


@settings(max_examples=50)
@given(draw_sizes(), draw_meshes(), draw_steps())
def test_the_peak_is_the_sum_of_its_kinds_and_contains_stored_memory(
    sizes: ModelSizes, mesh: MeshShape, step: StepSettings
) -> None:
    memory = estimate_memory(sizes, mesh, step, seq_len=1024)
    peak = memory.peak
    assert peak.weights == memory.peak.weights == memory.gradient_bytes
    assert peak.optimizer == memory.peak.optimizer == 2 * memory.peak.weights
    assert 0 <= peak.gradients <= memory.gradient_bytes
    assert min(peak.activations, peak.nll_chunk, peak.buffers) >= 0
    # The update comes after everything and needs all four.
    assert peak.total >= 4 * memory.peak.weights


# -- without torch ---------------------------------------------------------------------------------


def test_planning_loads_no_torch() -> None:
    modules = [
        "memguard.planner.memory",
        "memguard.planner.fit",
        "memguard.planner.plan",
        "memguard.workflows.training.checks",
        "memguard.workflows.plan",
        "memguard.cli.plan_screen",
        "memguard.cli.dry_run_screen",
    ]
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
