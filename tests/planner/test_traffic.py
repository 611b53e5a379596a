"""The formula of what a step sends, against steps that were recorded: every call, to the byte."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_mesh import Calls, simulated_mesh
from fake_step import list_collectives
from planner_models import sum_by_axis
from published_sizes import LLAMA_405B as SIZES_405B
from ranks import RankPool
from recorded import record_forward_backward
from step_cases import MODES, Case, check_traffic, count_calls, simulate_all
from tiny_families import FAMILIES

from memguard.hf.assembly import Assembly, build_meta_layer
from memguard.parallel.linear import Linear4D
from memguard.parallel.mesh_shape import MeshShape
from memguard.planner.step_settings import StepSettings, stores_parts

pytestmark = pytest.mark.slow

# Published configuration of meta-llama/Llama-3.1-405B, all widths, two of its 126 blocks.
LLAMA_405B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 2,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
# 32 heads, so that x may be 32; a vocabulary and rows of weights that neither x nor z divides.
MANY_HEADS: dict[str, Any] = {
    **FAMILIES["llama"],
    "vocab_size": 157,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 4,
}


def make_case(mesh: tuple[int, int, int, int], *, family: str = "llama", **fields: Any) -> Case:
    """A forward and a backward pass of two short rows, in fp32 if not said otherwise."""
    values = {"fields": FAMILIES[family], "is_bf16": False, "seq_len": 12, "chunk_tokens": 16}
    rows = {"num_rows": 2, "micro_batch_size": 2}
    return Case(mesh=mesh, family=family, **{**values, **rows, **fields})


_WHOLE = (2, 2, 2, 2)
TIED = {**FAMILIES["llama"], "tie_word_embeddings": True}
_405B: dict[str, Any] = {
    "fields": LLAMA_405B,
    "is_bf16": True,
    "num_rows": 1,
    "micro_batch_size": 1,
    "seq_len": 2048,
    "chunk_tokens": 1024,
}
_MANY: dict[str, Any] = {"fields": MANY_HEADS, "is_bf16": True}

QUICK = [
    make_case((1, 1, 1, 2)),
    make_case((1, 1, 2, 1), checkpointing="full"),
    make_case((1, 2, 1, 1)),
    *(make_case(_WHOLE, checkpointing=mode) for mode in MODES),
    # With x = 4 two ranks share a key/value head.
    make_case((1, 1, 2, 4), checkpointing="full"),
    make_case((2, 3, 2, 16), checkpointing="full", **_MANY),
    make_case(_WHOLE, family="qwen2"),
    make_case(_WHOLE, family="qwen3", checkpointing="full"),
    make_case(_WHOLE, fields=TIED, reshard=False),
    make_case(_WHOLE, sums_nll=False),
    make_case((1, 1, 4, 8), **_405B),
]
MORE = [
    *(make_case((1, 1, 2, 4), checkpointing=mode) for mode in MODES),
    *(
        make_case(mesh, checkpointing=mode)
        for mode in MODES
        for mesh in ((1, 1, 1, 2), (1, 1, 2, 1), (1, 1, 2, 2), (1, 2, 1, 1), (2, 1, 1, 1))
    ),
    *(
        make_case(mesh, checkpointing=mode, **_MANY)
        for mode in MODES
        for mesh in ((1, 1, 1, 32), (1, 1, 4, 8), (2, 3, 2, 16))
    ),
    *(
        make_case(_WHOLE, family=family, checkpointing=mode)
        for mode in MODES
        for family in ("mistral", "qwen2", "qwen3")
    ),
    make_case(_WHOLE, fields=TIED),
    make_case(_WHOLE, reshard=False),
    make_case(_WHOLE, fields=TIED, reshard=False, checkpointing="full"),
    make_case(_WHOLE, sums_nll=False, is_bf16=True, checkpointing="full"),
    *(
        make_case(mesh, checkpointing=mode, **_405B)
        for mode in MODES
        for mesh in ((1, 1, 1, 8), (1, 1, 1, 32), (1, 1, 4, 8), (1, 16, 2, 8))
    ),
]


def record(case: Case, share: bool = True) -> Calls:
    """Record a case; ``share`` False computes q, k, v, gate and up one by one."""
    with simulated_mesh(case.shape) as mesh:
        sharding = Assembly(
            mesh=mesh,
            device=torch.device("cpu"),
            compute_dtype=torch.bfloat16 if case.is_bf16 else None,
            chunk_tokens=case.chunk_tokens,
            checkpointing=case.checkpointing,
            reshard_after_forward=case.reshard,
        )
        layer = build_meta_layer(case.config, sharding)
        for module in layer.lm.modules():
            if isinstance(module, Linear4D) and not share:
                module.group = None
        return record_forward_backward(
            layer, num_rows=case.num_rows, seq_len=case.seq_len, sums_nll=case.sums_nll
        )


def record_all(cases: Sequence[Case]) -> list[Calls]:
    return [record(case) for case in cases]


@pytest.fixture(scope="module")
def quick(ranks: RankPool) -> dict[str, Calls]:
    return dict(zip(map(str, QUICK), ranks(record_all, 1, QUICK)[0], strict=True))


@pytest.fixture(scope="module")
def more(ranks: RankPool) -> dict[str, Calls]:
    return dict(zip(map(str, MORE), ranks(record_all, 1, MORE, timeout_s=280)[0], strict=True))


def check_formula(case: Case, calls: Calls) -> None:
    expected = list_collectives(case.sizes, case.shape, case.settings)
    assert calls == count_calls(each for each in expected if each.phase != "update")


def check_selective(cases: list[Case], recorded: dict[str, Calls]) -> int:
    """Compare selective recomputation with none and full; return the number of comparisons."""
    compared = [case for case in cases if case.checkpointing == "selective"]
    for case in compared:
        plain, full = (recorded[str(replace(case, checkpointing=c))] for c in ("none", "full"))
        again = recorded[str(case)] - plain
        assert plain <= recorded[str(case)]
        # All that it sends more is the input of each block, gathered where x stores it in parts.
        gathered = {
            key: number
            for key, number in again.items()
            if key[:3] == ("backward", "x", "all_gather")
        }
        assert again == gathered
        num_blocks = case.config.num_hidden_layers
        assert again.total() == (num_blocks if stores_parts(case.shape, case.settings) else 0)
        assert (full != plain) == (case.shape.x > 1 or case.shape.y > 1)
    return len(compared)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_the_formula_gives_every_collective(quick: dict[str, Calls], case: Case) -> None:
    check_formula(case, quick[str(case)])


def test_selective_recomputation_sends_nothing_twice(quick: dict[str, Calls]) -> None:
    assert check_selective(QUICK, quick) == 1


@pytest.mark.mesh
@pytest.mark.parametrize("case", MORE, ids=str)
def test_the_formula_on_more_meshes(more: dict[str, Calls], case: Case) -> None:
    check_formula(case, more[str(case)])


@pytest.mark.mesh
def test_selective_recomputation_on_more_meshes(more: dict[str, Calls]) -> None:
    assert check_selective(MORE, more) > 10


# -- one whole step, with the update ---------------------------------------------------------------


def test_a_whole_step_with_two_micro_batches(ranks: RankPool) -> None:
    """Qwen2 has biases and Qwen3 head norms, of which all ranks along y have copies."""
    families = ("llama", "qwen2", "qwen3")
    cases = [make_case(_WHOLE, family=family, num_rows=4) for family in families]
    steps = simulate_all(ranks, cases)
    for case in cases:
        check_traffic(case, steps[str(case)])


# -- the figures the engine was built for ----------------------------------------------------------

_ONE_TOKEN = StepSettings(num_tokens=1, num_labels=0, compute_bytes=2)


def block_traffic(x: int, y: int) -> dict[Any, tuple[float, float]]:
    """Payload and ring traffic of one token in one block, in elements of bf16, by axis."""
    # What a second block adds: nothing of the embedding, the head and the update.
    one, two = (
        sum_by_axis(list_collectives(sizes, MeshShape(x=x, y=y), _ONE_TOKEN))
        for sizes in (replace(SIZES_405B, num_layers=num_layers) for num_layers in (1, 2))
    )
    added = {axis: [b - a for a, b in zip(one[axis], two[axis], strict=True)] for axis in two}
    return {axis: (payload / 2, ring / 2) for axis, (_, payload, ring) in added.items() if payload}


def test_a_block_of_405b_over_eight_ranks() -> None:
    assert block_traffic(x=8, y=1) == {"x": (65_536, 114_688)}


def record_shared_and_single(case: Case) -> tuple[Calls, Calls]:
    return record(case), record(case, share=False)


def test_shared_all_reduces_save_three_sevenths(ranks: RankPool) -> None:
    case = make_case((1, 1, 1, 8), **{**_405B, "seq_len": 512, "chunk_tokens": 16})
    stream_bytes = case.settings.num_tokens * LLAMA_405B["hidden_size"] * 2
    num_elements = []
    for calls in ranks(record_shared_and_single, 1, case)[0]:
        # One is the embedding's; the head's are of chunks, and smaller. Two blocks have the rest.
        num_calls = sum(n for key, n in calls.items() if key[3] == stream_bytes) - 1
        num_elements.append(num_calls / 2 * LLAMA_405B["hidden_size"])
    assert num_elements == [65_536, 114_688]
    assert [payload * 2 * 7 / 8 for payload in num_elements] == [114_688, 200_704]


def test_two_axes_send_almost_half_of_one_at_32_ranks() -> None:
    one, two = (
        sum(ring for _, ring in block_traffic(x=x, y=y).values()) for x, y in ((32, 1), (8, 4))
    )
    assert two <= 0.55 * one
