"""Inputs of blocks that ranks along x store in parts: what a rank keeps, and what backward sends.

test_memory and test_traffic compare both with the engine's own step.
"""

from dataclasses import replace
from typing import Any

import pytest
from fake_step import list_collectives
from published_sizes import LLAMA_405B

from memguard.parallel.mesh_shape import MeshShape
from memguard.planner.activations import BlockActivations
from memguard.planner.memory import estimate_memory
from memguard.planner.parameters import find_trained
from memguard.planner.step_settings import AdapterSizes, StepSettings, count_part, stores_parts
from memguard.planner.traffic import Collective

STEP = StepSettings(
    num_tokens=8193, num_labels=8192, checkpointing="full", has_mask=False, has_streams=True
)
HIDDEN, NUM_LAYERS = 16384, 126


def activations(mesh: MeshShape, **changes: Any) -> BlockActivations:
    typical = find_trained(LLAMA_405B, mesh).typical
    return BlockActivations(LLAMA_405B, mesh, replace(STEP, **changes), typical, seq_len=8193)


def list_gathers(mesh: MeshShape, **changes: Any) -> list[Collective]:
    calls = list_collectives(LLAMA_405B, mesh, replace(STEP, **changes))
    return [call for call in calls if call.axis == "x" and call.operation == "all_gather"]


@pytest.mark.parametrize(
    ("mesh", "checkpointing", "is_split"),
    [
        (MeshShape(x=8), "full", True),
        (MeshShape(x=8), "selective", True),
        (MeshShape(x=2, y=4, z=8), "full", True),
        # All activations are stored, or all ranks have other inputs.
        (MeshShape(x=8), "none", False),
        (MeshShape(y=8), "full", False),
        (MeshShape(z=8), "full", False),
        (MeshShape(), "full", False),
    ],
)
def test_inputs_are_split_where_x_recomputes(
    mesh: MeshShape, checkpointing: Any, is_split: bool
) -> None:
    step = replace(STEP, checkpointing=checkpointing)
    assert stores_parts(mesh, step) == is_split
    assert bool(list_gathers(mesh, checkpointing=checkpointing)) == is_split


def test_a_rank_stores_an_eighth_and_a_padded_token_at_most() -> None:
    mesh = MeshShape(x=8, y=2)
    features = HIDDEN // 2
    assert count_part(mesh, STEP) == 1025
    kept = activations(mesh).kept()
    assert kept == 1025 * features * 2
    assert kept <= (8193 / 8 + 1) * features * 2
    # Of what selective recomputation keeps only the input is split.
    both = [activations(mesh, checkpointing=mode) for mode in ("selective", "full")]
    assert both[0].kept() - both[1].kept() == both[0].outputs()


def test_backward_gathers_the_input_beside_the_part() -> None:
    split = activations(MeshShape(x=8))
    whole = split.whole()
    assert split.in_backward() - whole == (8 + 1) * 1025 * HIDDEN * 2
    together = activations(MeshShape(y=8))
    assert together.in_backward() - together.whole() == 8193 * HIDDEN // 8 * 2


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_one_gather_a_block_and_micro_batch(num_micro_batches: int) -> None:
    mesh = MeshShape(x=8, y=2)
    (gather,) = list_gathers(mesh, num_micro_batches=num_micro_batches)
    assert gather.phase == "backward"
    assert gather.num_calls == NUM_LAYERS * num_micro_batches
    # [t, F/y], with the padding of the last part.
    assert gather.num_bytes == 8 * 1025 * HIDDEN // 2 * 2


def test_blocks_that_backward_does_not_reach_gather_nothing() -> None:
    names = ("layers.120.self_attn.q_proj", "layers.125.self_attn.q_proj")
    adapter = AdapterSizes(r=16, targets=names)
    (gather,) = list_gathers(MeshShape(x=8), adapter=adapter)
    assert gather.num_calls == 6


def test_405b_over_eight_ranks_needs_far_less() -> None:
    """Inputs of 126 blocks for four rows of 2,048: 32 GiB whole, 4 GiB in parts."""
    step = replace(STEP, num_tokens=8192, num_labels=8188)
    parts = estimate_memory(LLAMA_405B, MeshShape(z=32, x=8), step, seq_len=2048)
    inputs = NUM_LAYERS * 8192 * HIDDEN * 2
    assert inputs / 2**30 == 31.5
    assert parts.peak.activations < inputs / 8 + 10 * 2**30
