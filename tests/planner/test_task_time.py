"""The time of benchmark tasks on a mesh, compared with sums by hand."""

import pytest

from memguard.audit.benchmarks.work import TaskWork
from memguard.parallel.mesh_shape import MeshShape
from memguard.planner.compute import MATMUL_SHARE
from memguard.planner.generation import GenerationPlan
from memguard.planner.machine import load_machine
from memguard.planner.task_time import estimate_task, knows_speed

PARAMETERS = 8_000_000_000
SCORED = TaskWork(
    task="choice", num_items=100, num_forwards=400, num_tokens=40_000_000, num_decoded_tokens=0
)
WRITTEN = TaskWork(
    task="written",
    num_items=64,
    num_forwards=64,
    num_tokens=64 * 100,
    num_decoded_tokens=64 * 156,
    num_new=156,
)


def estimate(work: TaskWork, mesh: MeshShape, *, fits: bool = True, num_models: int = 1) -> float:
    generation = GenerationPlan(
        num_documents=1,
        is_assumed=False,
        fits=fits,
        gathered_gb=16.0,
        token_s=0.5,
        probes=(),
        minutes=0.0,
    )
    return estimate_task(
        work,
        num_models=num_models,
        num_parameters=PARAMETERS,
        element_bytes=2.0,
        mesh=mesh,
        machine=load_machine("dgx-h100"),
        generation=generation,
    )


def test_long_tasks_take_the_time_of_their_matmuls() -> None:
    machine = load_machine("dgx-h100")
    speed = 1e12 * machine.peak_tflops * machine.matmul_share * MATMUL_SHARE
    expected = 2 * PARAMETERS * SCORED.num_tokens / speed / 60
    assert estimate(SCORED, MeshShape()) == pytest.approx(expected)
    # Two models on eight ranks.
    assert estimate(SCORED, MeshShape(z=2, x=4), num_models=2) == pytest.approx(expected / 4)


def test_generation_reads_the_weights_for_each_token_of_a_batch() -> None:
    machine = load_machine("dgx-h100")
    read_s = 2 * PARAMETERS / (1e9 * machine.memory_gb_per_s)
    speed = 1e12 * machine.peak_tflops * machine.matmul_share * MATMUL_SHARE
    prompts_s = 2 * PARAMETERS * WRITTEN.num_tokens / speed
    assert prompts_s > read_s
    # 64 rows of 256 tokens are one batch of 16,384.
    assert estimate(WRITTEN, MeshShape()) * 60 == pytest.approx(prompts_s + 156 * read_s)
    # Each half of the rows is a batch of one of two ranks, which gather the weights.
    gathered = estimate(WRITTEN, MeshShape(z=2), fits=False) * 60
    assert gathered == pytest.approx((1 + 156) * 0.5)


def test_the_speed_of_some_machines_is_not_known() -> None:
    machine = load_machine("dgx-h100")
    assert knows_speed(machine)
    assert not knows_speed(machine.model_copy(update={"has_gpus": False}))
