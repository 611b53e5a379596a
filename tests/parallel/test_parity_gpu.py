"""Meshes of two GPUs give the numbers of one: tests/parallel/test_parity.py over NCCL."""

import itertools
from dataclasses import replace

import pytest
import torch
from parity import TIED, UNTIED, Case, Degrees, check, compare
from ranks import RankPool

from memguard.parallel.lora import LoraSpec

_DORA = LoraSpec(r=3, alpha=5, use_dora=True)
_TWO = [each for each in itertools.product((1, 2), repeat=4) if sum(each) == 5]

# On the CPU these are other cases of what test_parity.py has; here to run what a GPU runs.
pytestmark = pytest.mark.long


@pytest.fixture
def pool(device: torch.device, request: pytest.FixtureRequest) -> RankPool:
    """Two ranks on the device's kind: processes with gloo, or GPUs with NCCL."""
    if device.type == "cpu":
        ranks: RankPool = request.getfixturevalue("ranks")
        return ranks
    if torch.cuda.device_count() < 2:
        pytest.skip(f"two GPUs are needed; torch sees {torch.cuda.device_count()}")
    return RankPool("cuda")


@pytest.mark.parametrize(
    "adapters",
    [(None, None), (LoraSpec(r=3, alpha=5, use_rslora=True), _DORA)],
    ids=["all", "peft"],
)
@pytest.mark.parametrize("degrees", _TWO, ids=str)
def test_two_ranks_equal_one(
    device: torch.device, pool: RankPool, degrees: Degrees, adapters: tuple[LoraSpec | None, ...]
) -> None:
    """Tied and untied, with accumulation; z over FSDP2's gathers and reduce-scatters."""
    tied, untied = (Case(device=device.type, num_steps=2, adapter=spec) for spec in adapters)
    cases = [replace(tied, changes=TIED), replace(untied, changes=UNTIED, micro_batch_size=2)]
    check(pool, degrees, cases)


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_two_ranks_in_bf16_stay_near_one_in_fp32(
    device: torch.device, pool: RankPool, checkpointing: str
) -> None:
    # Head dimension 16, the least that flash attention's kernels take.
    sizes = (("hidden_size", 64), ("intermediate_size", 96))
    case = Case(
        changes=(*UNTIED, *sizes),
        dtype=torch.float32,
        compute_dtype=torch.bfloat16,
        num_steps=1,
        checkpointing=checkpointing,
        device=device.type,
    )
    for worst in pool(compare, 2, (1, 2, 1, 1), [case, replace(case, changes=TIED + sizes)])[0]:
        assert worst.loss < 5e-3
        assert worst.norm < 3e-2
        assert worst.gradient < 0.15, worst
