"""The load-balancing loss of experts: on every mesh that of one process with the rows of all ranks.

The coefficients are those of tiny configurations times a thousand: at 0.001 the gradient of the
loss would be a share of the whole that hides errors of a few percent of it.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from parity import SINGLE, Case, Degrees, check, needs_compiler
from ranks import RankPool
from tiny_families import LEAKING

pytestmark = pytest.mark.slow

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss")


def case_of(family: str, **settings: Any) -> Case:
    changes = (
        ("experts_implementation", "eager"),
        ("output_router_logits", True),
        ("router_aux_loss_coef", 1.0),
    )
    return Case(
        family=family, changes=changes, packed=family not in LEAKING, num_steps=2, **settings
    )


def test_a_sample_equals_one_process(ranks: RankPool) -> None:
    cases = [
        case_of("mixtral", checkpointing="full", micro_batch_size=2),
        case_of("gpt_oss", padded=True),
    ]
    check(ranks, (1, 2, 1, 2), cases)


@pytest.mark.mesh
@pytest.mark.parametrize("degrees", [(2, 2, 1, 1), (1, 1, 2, 2), (1, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_meshes_equal_one_process(ranks: RankPool, degrees: Degrees, mode: str) -> None:
    cases = [case_of(family, checkpointing=mode, padded=True) for family in FAMILIES]
    cases += [case_of(family, checkpointing=mode, micro_batch_size=1) for family in FAMILIES]
    check(ranks, degrees, cases)


@pytest.mark.long
@needs_compiler
def test_compiled_blocks_have_it_too(fresh_ranks: RankPool) -> None:
    """In fp32: patched upcasts to float64 do not reach compiled code."""
    cases = [
        replace(case_of("mixtral", checkpointing=mode, compile=True), dtype=torch.float32)
        for mode in ("none", "selective")
    ]
    check(fresh_ranks, (1, 2, 1, 2), [replace(case, num_steps=1) for case in cases], SINGLE)
