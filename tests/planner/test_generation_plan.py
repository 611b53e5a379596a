"""The time in which an audit generates text, before training; figures by hand from its formula."""

import pytest

from memguard.parallel.mesh_shape import MeshShape
from memguard.planner.generation import (
    GenerationPlan,
    GenerationWork,
    describe_generation,
    estimate_generation,
    explain_limit,
)
from memguard.planner.machine import load_machine


def estimate(
    parameters: float,
    mesh: MeshShape,
    *,
    element_bytes: float = 2.0,
    num_documents: int = 1000,
    machine: str = "dgx-h100",
) -> GenerationPlan:
    """Two models generate 50 tokens for each document; rows of 4,096 tokens."""
    work = GenerationWork(
        probe="extraction", num_tokens=2 * 50 * num_documents, num_new=50, num_models=2
    )
    return estimate_generation(
        num_parameters=int(parameters),
        num_units=83,
        element_bytes=element_bytes,
        mesh=mesh,
        machine=load_machine(machine),
        works=[work, GenerationWork(probe="membership", num_tokens=0, num_new=50)],
        row_tokens=4096,
        num_documents=num_documents,
    )


@pytest.mark.parametrize(
    ("parameters", "mesh", "gathered_gb", "token_s"),
    [
        # 450 GB/s within a node, 50 GB/s a GPU between nodes, 82 % of both; 3,350 GB/s of memory.
        (14.8e9, MeshShape(z=8), 29.6, 29.6 * 7 / 8 / (450 * 0.82) + 29.6 / 3350),
        (70.6e9, MeshShape(z=32), 141.2, 141.2 * 31 / 32 / (400 * 0.82) + 141.2 / 3350),
        (405e9, MeshShape(z=64, x=8), 101.25, 101.25 * 63 / 64 / (50 * 0.82) + 101.25 / 3350),
    ],
)
def test_a_token_takes_its_gathers(
    parameters: float, mesh: MeshShape, gathered_gb: float, token_s: float
) -> None:
    plan = estimate(parameters, mesh)
    assert plan.gathered_gb == pytest.approx(gathered_gb)
    # 83 calls and their rounds add at most 83 (20 + 63 x 5) us.
    assert token_s < plan.token_s < token_s + 0.03


def test_weights_that_fit_take_no_time() -> None:
    assert estimate(14.8e9, MeshShape(z=8)).fits
    assert estimate(14.8e9, MeshShape(z=8)).minutes == 0
    assert not estimate(14.8e9, MeshShape(z=8), element_bytes=4.0).fits
    assert estimate(405e9, MeshShape(z=1, x=8, y=64)).fits
    (line,) = describe_generation(estimate(14.8e9, MeshShape(z=8)))
    assert line == "the audit of 1,000 documents generates text with all weights in memory at once"


def test_a_batch_shares_its_steps() -> None:
    def count(num_documents: int) -> int:
        (probe,) = estimate(
            70.6e9, MeshShape(z=32), num_documents=num_documents
        ).probes  # Membership generates nothing.
        return probe.num_steps

    # 32 ranks x 16,384 tokens are 128 rows of 4,096; ten more forwards check the cache of a model.
    assert count(1) == count(128) == 2 * (50 + 10)
    assert count(129) == 2 * (100 + 10)


def test_the_limit_is_explained_with_the_figure_and_the_way_out() -> None:
    plan = estimate(405e9, MeshShape(z=64, x=8), element_bytes=4.0)
    assert explain_limit(plan, None) is None
    assert explain_limit(plan, plan.minutes) is None
    text = explain_limit(plan, 30)
    assert text is not None
    assert text.startswith(
        "the audit would generate text for 35 minutes, and 'audit.max_generation"
    )
    assert "gathers 202 GB for each token" in text
    assert "Use a larger 'parallel.x', audit fewer documents" in text
    lines = describe_generation(plan)
    assert lines[0] == (
        "the audit of 1,000 documents gathers 202 GB for each token of all rows: 5 s a token"
    )
    assert lines[1].startswith("extraction: at most 420 tokens one after the other, 35 minutes")
    # One probe is its own sum.
    assert len(lines) == 2
