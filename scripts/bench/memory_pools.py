"""Compare the planned memory of a step on GPUs with the pools that CUDA's allocator would fill.

python scripts/bench/memory_pools.py             nine cases at full depth; half an hour on two cores
python scripts/bench/memory_pools.py --quick     eight layers of each, to check it; two minutes
python scripts/bench/memory_pools.py --only 1 3  some cases

CUDA's caching allocator reuses freed memory only for the stream on which it was allocated. The
engine's own step of rank 0 runs on fake tensors, and each tensor is counted in the pool of the
stream that is current when it is allocated: FSDP2 selects the same streams on a CPU, where they do
nothing. What the allocator reserves is at least the sum of the peaks of these pools; it cannot be
less without freeing all cached memory, which costs a retry (`num_alloc_retries`). Not counted are
the rounding of sizes, holes in a pool and memory of the communication library.

`plan` is what `memguard plan` calls "needed", with its allowance for fragmentation, which covers
these; `tensors` is without. `before` is a plan without pools, whose gradients count only in phases
that follow them. Attention reads a mask on both sides, as on CPUs.

The last line is a verdict; exit 1 if a plan is not between 2 % less and 10 % more than the pools.
"""

import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import quieted  # noqa: F401  Silences the libraries that are imported next.
import torch
from harness import Table, Verdict, build_parser
from plan import PUBLISHED, Case
from workload import describe_step

from memguard.parallel.lora import LoraSpec
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.machine import load_machine
from memguard.planner.memory import MemoryUse, estimate_memory
from memguard.planner.step_settings import AdapterSizes, StepSettings

# The folder above has them.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import fake_step as simulation
from fake_mesh import Allocations

AT_LEAST, AT_MOST = 0.98, 1.10
GIB = 2**30
LORA = LoraSpec(r=16, alpha=16)
QUICK_LAYERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """Peaks of the pools of one rank in a step (bytes)."""

    computation: int
    """Of the default stream."""
    transfers: int
    """Sum of the pools of FSDP2's streams."""
    together: int
    """Peak of all tensors together, as if there was one pool."""

    @property
    def total(self) -> int:
        """What the allocator reserves at least (bytes)."""
        return self.computation + self.transfers


class PoolAllocations(Allocations):
    """Tracks the memory of tensors by the stream that is current at their allocation."""

    def __init__(self) -> None:
        """Start with empty pools."""
        super().__init__()
        self.pool_peaks: Counter[Any] = Counter()
        self._pools: Counter[Any] = Counter()
        self._pool_of: dict[int, Any] = {}

    def reset_peak(self) -> None:
        """Reset the peaks to the current state."""
        super().reset_peak()
        self.pool_peaks = self._pools.copy()

    def summarise(self) -> Pools:
        """Return the peaks."""
        default = torch.cpu.current_stream()
        peaks = self.pool_peaks.copy()
        computation = peaks.pop(default)
        return Pools(computation=computation, transfers=peaks.total(), together=self.peak_bytes)

    def _resize(self, key: int, size: int) -> None:
        before = self._sizes[key]
        if before == 0 and size:
            self._pool_of[key] = torch.cpu.current_stream()
        if size != before:
            pool = self._pool_of[key]
            self._pools[pool] += size - before
            self.pool_peaks[pool] = max(self.pool_peaks[pool], self._pools[pool])
        super()._resize(key, size)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolCase:
    """A step, and whether it trains adapters."""

    model: str
    step: Case
    has_adapters: bool = False

    def __str__(self) -> str:
        what = "LoRA" if self.has_adapters else ""
        return f"{self.model:<5}{self.step} {what}"


def list_cases() -> list[PoolCase]:
    """Return nine cases: three sizes, one and four micro-batches, meshes of z and x, adapters."""
    four = {"num_rows": 4, "num_micro_batches": 4}
    two_rows = {"num_rows": 2}
    cases: list[tuple[str, dict[str, Any], bool]] = [
        ("8B", {"mesh": (1, 8, 1, 1)}, False),
        ("8B", {"mesh": (1, 8, 1, 1), **four}, False),
        ("8B", {"mesh": (1, 2, 1, 4), "checkpointing": "none"}, False),
        ("8B", {"mesh": (1, 8, 1, 1)}, True),
        ("70B", {"mesh": (1, 32, 1, 1), **two_rows}, False),
        ("70B", {"mesh": (1, 4, 1, 8), "checkpointing": "selective", **four}, False),
        ("70B", {"mesh": (1, 8, 1, 1), **four}, True),
        ("405B", {"mesh": (1, 32, 1, 8), **two_rows}, False),
        ("405B", {"mesh": (1, 64, 1, 8), **four}, False),
    ]
    return [
        PoolCase(
            model=model,
            step=Case(
                fields=PUBLISHED[f"meta-llama/Llama-3.1-{model}"],
                **{"checkpointing": "full", **settings},
            ),
            has_adapters=has_adapters,
        )
        for model, settings, has_adapters in cases
    ]


def measure_pools(case: PoolCase) -> Pools:
    """Return the pools of the engine's own step on fake tensors.

    An existing process group is destroyed.
    """
    step, made = case.step, []

    def make() -> PoolAllocations:
        made.append(PoolAllocations())
        return made[-1]

    with mock.patch.object(simulation, "Allocations", make):
        simulation.simulate_step(
            step.config,
            step.shape,
            train=step.train,
            seq_len=step.seq_len,
            adapter=LORA if case.has_adapters else None,
        )
    (allocations,) = made
    return allocations.summarise()


def describe(case: PoolCase) -> StepSettings:
    """Return the settings of a case's step on a GPU."""
    settings = describe_step(case.step.train, case.step.shape, seq_len=case.step.seq_len)
    adapter = AdapterSizes(r=LORA.r) if case.has_adapters else None
    return replace(settings, adapter=adapter, has_streams=True)


def plan_step(case: PoolCase, settings: StepSettings) -> MemoryUse:
    """Return the planned memory at its peak."""
    step = case.step
    sizes = ModelSizes.from_json(step.config_fields)
    return estimate_memory(sizes, step.shape, settings, seq_len=step.seq_len).peak


def compare(number: int, case: PoolCase, table: Table, verdict: Verdict) -> None:
    """Print a case's row."""
    pools = measure_pools(case)
    settings, share = describe(case), load_machine("dgx-h100").fragmentation
    now = plan_step(case, settings)
    before = plan_step(case, replace(settings, has_streams=False))
    needed, needed_before = (use.total + share * use.transient for use in (now, before))
    ratio = needed / pools.total
    name = f"{number} {case}"
    end = verdict.check(" ".join(name.split()), ratio, at_least=AT_LEAST, at_most=AT_MOST)
    sizes = (pools.together, pools.computation, pools.transfers, pools.total, now.total, needed)
    table.row(
        name,
        *(f"{size / GIB:.2f}" for size in sizes),
        f"{ratio - 1:+.1%}",
        f"{needed_before / pools.total - 1:+.1%}",
        end="" if end.endswith("ok") else "MISSED",
    )


def main() -> int:
    """Run the cases; return 1 if a limit is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="eight layers of each model")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of cases")
    options = parser.parse_args()
    verdict = Verdict()
    print(
        "GiB; rank 0 of (data, z, y, x), layers, recomputation, precision, micro-batches x rows of "
        "4,096 tokens"
    )
    columns = ("  together", " | computation", "  transfers", "  pools", " | tensors", "   plan")
    table = Table(57, *columns, "    plan", "  before")
    for number, case in enumerate(list_cases(), start=1):
        if options.only and number not in options.only:
            continue
        if options.quick:
            case = replace(case, step=replace(case.step, num_layers=QUICK_LAYERS))
        compare(number, case, table, verdict)
    return verdict.end(f": each plan is {AT_LEAST:.2f} to {AT_MOST:.2f} of the sum of the pools")


if __name__ == "__main__":
    sys.exit(main())
