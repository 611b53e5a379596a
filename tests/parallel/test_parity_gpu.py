"""Meshes of two GPUs give the numbers of one: tests/parallel/test_parity.py over NCCL."""

import itertools
from dataclasses import replace

import pytest
import torch
from parity import Case, compare
from ranks import RankPool

from memguard.parallel.lora import LoraSpec

_TIED = (("tie_word_embeddings", True), ("vocab_size", 131))
_UNTIED = (("tie_word_embeddings", False), ("vocab_size", 97))
# As in test_parity.py: a unit in the last place of float64 is 1e-16; AdamW magnifies what differs
# where a gradient is nearly zero; bf16 has 8 bits.
_EXACT, _EXACT_WEIGHTS = 1e-10, 1e-9

_TWO = [each for each in itertools.product((1, 2), repeat=4) if sum(each) == 5]

# On the CPU these are other cases of what test_parity.py has; here to run what a GPU runs.
pytestmark = pytest.mark.long


@pytest.fixture
def pool(device: torch.device, ranks: RankPool) -> RankPool:
    """Two ranks on the device's kind: processes with gloo, or GPUs with NCCL."""
    if device.type == "cpu":
        return ranks
    if torch.cuda.device_count() < 2:
        pytest.skip(f"two GPUs are needed; torch sees {torch.cuda.device_count()}")
    return RankPool("cuda")


@pytest.mark.parametrize("degrees", _TWO, ids=str)
def test_two_ranks_equal_one(
    device: torch.device, pool: RankPool, degrees: tuple[int, int, int, int]
) -> None:
    """Tied and untied, with accumulation; z over FSDP2's gathers and reduce-scatters."""
    cases = [
        Case(changes=_TIED, device=device.type, num_steps=2),
        Case(changes=_UNTIED, device=device.type, num_steps=2, micro_batch_size=2),
    ]
    for worst in pool(compare, 2, degrees, cases, timeout_s=280)[0]:
        assert worst.loss <= _EXACT, worst
        assert worst.gradient <= _EXACT, worst
        assert worst.norm <= _EXACT, worst
        assert worst.weight <= _EXACT_WEIGHTS, worst


@pytest.mark.parametrize("degrees", _TWO, ids=str)
def test_adapters_on_two_ranks_equal_peft_on_one(
    device: torch.device, pool: RankPool, degrees: tuple[int, int, int, int]
) -> None:
    lora = LoraSpec(r=3, alpha=5, use_rslora=True)
    dora = LoraSpec(r=3, alpha=5, use_dora=True)
    cases = [
        Case(changes=_TIED, device=device.type, num_steps=2, adapter=lora),
        Case(changes=_UNTIED, device=device.type, num_steps=2, adapter=dora, micro_batch_size=2),
    ]
    for worst in pool(compare, 2, degrees, cases, timeout_s=280)[0]:
        assert worst.loss <= _EXACT, worst
        assert worst.gradient <= _EXACT, worst
        assert worst.norm <= _EXACT, worst
        assert worst.weight <= _EXACT_WEIGHTS, worst


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_two_ranks_in_bf16_stay_near_one_in_fp32(
    device: torch.device, pool: RankPool, checkpointing: str
) -> None:
    # Head dimension 16, the least that flash attention's kernels take.
    sizes = (("hidden_size", 64), ("intermediate_size", 96))
    case = Case(
        changes=(*_UNTIED, *sizes),
        dtype=torch.float32,
        compute_dtype=torch.bfloat16,
        num_steps=1,
        checkpointing=checkpointing,
        device=device.type,
    )
    for worst in pool(compare, 2, (1, 2, 1, 1), [case, replace(case, changes=_TIED + sizes)])[0]:
        assert worst.loss < 5e-3
        assert worst.norm < 3e-2
        assert worst.gradient < 0.15, worst
