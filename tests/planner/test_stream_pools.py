"""Memory by stream: what the pools of a step on GPUs have, by hand.

tests/scripts/test_bench_memory_pools.py compares the plan with the pools that the engine fills.
"""

from dataclasses import replace
from typing import Any

import pytest
from published_sizes import LLAMA_8B

from memguard.parallel.mesh_shape import MeshShape
from memguard.planner.fit import find_fit
from memguard.planner.machine import detect_machine, load_machine
from memguard.planner.memory import count_gathers, count_reductions, estimate_memory
from memguard.planner.parameters import Unit
from memguard.planner.step_settings import StepSettings, Work

STEP = StepSettings(
    num_tokens=65536, num_labels=65535, checkpointing="none", has_mask=False, has_streams=True
)


def test_stored_gradients_count_in_every_phase_and_for_any_number_of_micro_batches() -> None:
    memories = [
        estimate_memory(
            LLAMA_8B, MeshShape(z=8), replace(STEP, num_micro_batches=number), seq_len=2048
        )
        for number in (1, 4)
    ]
    for memory in memories:
        assert memory.moment == "the head's losses", "long before the last gradient is stored"
        assert memory.peak.gradients == memory.gradient_bytes
    # Added to the stored gradients of one unit at a time, the largest of which is the embedding.
    one, four = (memory.peak.buffers for memory in memories)
    assert four - one == 4 * 128256 * 4096 // 8
    plain = estimate_memory(LLAMA_8B, MeshShape(), STEP, seq_len=2048)
    assert plain == estimate_memory(
        LLAMA_8B, MeshShape(), replace(STEP, has_streams=False), seq_len=2048
    ), "one process has one pool"


def test_two_units_are_gathered_and_the_own_part_of_the_second_is_rounded() -> None:
    block = Unit(name="a block", shapes=((800, 1),), z=8)
    embedding, head, norm = (
        Unit(name=name, shapes=((rows, 1),), z=8)
        for name, rows in (("embedding", 2000), ("head", 4000), ("last norm", 8))
    )
    sizes: dict[str, Any] = {"num_layers": 3, "element_bytes": 2, "is_rounded": True}
    # The last block, then the head.
    others = (embedding, head, norm)
    assert count_gathers(block, others, **sizes) == 2 * (800 + 4000 + 500)
    assert count_gathers(block, others, **{**sizes, "is_rounded": False}) == 2 * 4800
    # Tied weights come first; then blocks.
    tied = Unit(name="embedding = head, last norm", shapes=((8, 1), (2000, 1)), z=8)
    assert count_gathers(block, (tied,), **sizes) == 2 * (2008 + 800 + 100)
    assert count_gathers(replace(block, z=1), others, **sizes) == 0


@pytest.mark.parametrize(
    ("weight_bytes", "num_micro_batches", "expected"), [(4, 1, 0), (4, 2, 4), (2, 1, 4), (2, 2, 6)]
)
def test_one_unit_of_gradients_is_added_or_rounded_at_a_time(
    weight_bytes: int, num_micro_batches: int, expected: int
) -> None:
    settings = StepSettings(
        num_tokens=8,
        num_labels=8,
        weight_bytes=weight_bytes,
        num_micro_batches=num_micro_batches,
    )
    assert count_reductions(100, settings) == 100 * expected
    assert count_reductions(0, settings) == 0


def test_gpus_have_streams_and_cpus_have_not() -> None:
    work = Work(seq_len=2048, batch_size=8)
    h200 = load_machine("h200")
    # What decides whether a run is refused: the least that a step needs.
    least = h200.model_copy(update={"fragmentation": 0.0})
    for machine, has_streams in ((h200, True), (detect_machine(gpus=[]), False), (least, False)):
        fit = find_fit(LLAMA_8B, MeshShape(z=8), work, machine)
        assert fit.settings.has_streams == has_streams
