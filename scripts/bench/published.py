"""Compare the planner's estimates with published training runs.

python scripts/bench/published.py                   a second; arithmetic, nothing is measured
python scripts/bench/published.py --fit             also fits the two constants again

The published runs are torchtitan's, of Llama 3 in bf16 with rows of 8,192 tokens. Two runs of the
8B model on 8 H100s, with and without torch.compile, determined the two fitted constants of
memguard/planner/compute.py. The other H100 runs check the model on other numbers of GPUs, sizes and
degrees of tensor parallelism. The runs on A100s have no limit: they show how far constants of one
GPU hold for another.

The estimate is that of memguard on the mesh with the same degrees: FSDP of torchtitan is z, its
tensor parallelism is x. Their tensor parallelism also splits norms and residuals over the ranks,
which memguard does not. Of their selective checkpointing, which computes every second matmul again,
the estimate is the mean of memguard's selective (no matmul again) and full (all but the last): half
of the matmuls, by number of operations.

The last line is a verdict; exit 1 if a run that was not fitted differs by more than 25 %.
"""

import math
import sys
from dataclasses import dataclass, replace

from harness import Table, Verdict, build_parser

from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner import compute
from memguard.planner.cost import estimate_step
from memguard.planner.machine import Machine
from memguard.planner.step_settings import Checkpointing, StepSettings

SEQ_LEN = 8192
TOLERANCE = 0.25
FITTED_TOLERANCE = 0.02

DECEMBER = (
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
)
JUNE = (
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
    "asyncTP_llama3_h100_2025-06_torchtitan.md"
)
AUGUST = "https://github.com/pytorch/torchtitan/blob/3faaa1a0d/docs/performance.md"

# As these pages describe it. 400 Gb/s of network for each GPU; its peak at 500 W is not published.
GRAND_TETON = Machine(
    name="grand-teton",
    gpu="H100 SXM 96 GB",
    memory_gib=96,
    gpus_per_node=8,
    link_gb_per_s=450,
    network_gb_per_s=400,
    memory_gb_per_s=2400,
    peak_tflops=989,
    sources=(DECEMBER, JUNE, AUGUST),
)
# Not described; the network is an assumption.
A100 = GRAND_TETON.model_copy(
    update={
        "name": "a100",
        "gpu": "A100 80 GB",
        "memory_gib": 80,
        "link_gb_per_s": 300,
        "network_gb_per_s": 200,
        "memory_gb_per_s": 2039,
        "peak_tflops": 312,
        "sources": (AUGUST,),
    }
)

# From the config.json published with each model; equal for Llama 3 and 3.1.
LLAMA_8B = ModelSizes(
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    num_layers=32,
)
LLAMA_70B = replace(
    LLAMA_8B, hidden_size=8192, num_heads=64, intermediate_size=28672, num_layers=80
)
LLAMA_405B = replace(
    LLAMA_8B, hidden_size=16384, num_heads=128, intermediate_size=53248, num_layers=126
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A published training run."""

    name: str
    sizes: ModelSizes
    z: int
    x: int
    rows: int
    """Rows of a step on the ranks of one group along x."""
    tokens_per_s: float
    """Published, for each GPU."""
    is_compiled: bool
    checkpointing: Checkpointing
    source: str
    machine: Machine = GRAND_TETON
    is_fitted: bool = False

    @property
    def mesh(self) -> MeshShape:
        """The mesh with the same degrees."""
        return MeshShape(z=self.z, x=self.x)

    def estimate(self) -> float:
        """Return the planner's tokens a second for each GPU."""
        modes: tuple[Checkpointing, ...] = ("full",)
        if self.checkpointing == "selective":
            modes = ("selective", "full")
        tokens = self.rows * SEQ_LEN
        seconds = 0.0
        for mode in modes:
            settings = StepSettings(
                num_tokens=tokens,
                num_labels=tokens,
                checkpointing=mode,
                has_mask=False,
                is_compiled=self.is_compiled,
            )
            step = estimate_step(self.sizes, self.mesh, settings, self.machine, seq_len=SEQ_LEN)
            seconds += step.step_s / len(modes)
        return tokens / self.x / seconds


_EAGER_8B = Run(
    name="8B",
    sizes=LLAMA_8B,
    z=8,
    x=1,
    rows=2,
    tokens_per_s=5762,
    is_compiled=False,
    checkpointing="selective",
    source=DECEMBER,
    is_fitted=True,
)
# Pages, tables: December: 1 and 3, batch size 2 a GPU, "op" selective checkpointing. June: the rows
# without quantization and without asynchronous tensor parallelism; their batch size is that of a
# tensor-parallel group. August: 405B without Float8, batch size 2 a group; its settings of that day
# (train_configs/llama3_405b.toml) compile the model; those of the A100 runs do not.
RUNS = (
    replace(_EAGER_8B, tokens_per_s=6667, is_compiled=True),
    _EAGER_8B,
    replace(_EAGER_8B, z=128, tokens_per_s=6514, is_compiled=True, is_fitted=False),
    replace(_EAGER_8B, z=128, tokens_per_s=5605, is_fitted=False),
    Run(
        name="8B",
        sizes=LLAMA_8B,
        z=8,
        x=8,
        rows=12,
        tokens_per_s=4378,
        is_compiled=True,
        checkpointing="selective",
        source=JUNE,
    ),
    Run(
        name="70B",
        sizes=LLAMA_70B,
        z=32,
        x=8,
        rows=16,
        tokens_per_s=597.3,
        is_compiled=True,
        checkpointing="full",
        source=JUNE,
    ),
    Run(
        name="405B",
        sizes=LLAMA_405B,
        z=16,
        x=8,
        rows=2,
        tokens_per_s=109,
        is_compiled=True,
        checkpointing="full",
        source=AUGUST,
    ),
    Run(
        name="8B",
        sizes=LLAMA_8B,
        z=64,
        x=1,
        rows=1,
        tokens_per_s=2973,
        is_compiled=False,
        checkpointing="selective",
        source=AUGUST,
        machine=A100,
    ),
    Run(
        name="70B",
        sizes=LLAMA_70B,
        z=64,
        x=1,
        rows=1,
        tokens_per_s=331,
        is_compiled=False,
        checkpointing="full",
        source=AUGUST,
        machine=A100,
    ),
)


def fit_constants() -> tuple[float, float]:
    """Return MATMUL_SHARE and EAGER_PASSES for which the two fitted runs are estimated exactly."""
    compiled, eager = (run for run in RUNS if run.is_fitted)
    before = compute.MATMUL_SHARE, compute.EAGER_PASSES
    try:
        # A larger share is faster; a compiled run does not depend on EAGER_PASSES.
        compute.MATMUL_SHARE = bisect(0.1, 1.0, "MATMUL_SHARE", compiled)
        share = compute.MATMUL_SHARE
        return share, bisect(20.0, 1.0, "EAGER_PASSES", eager)
    finally:
        compute.MATMUL_SHARE, compute.EAGER_PASSES = before


def bisect(slow: float, fast: float, name: str, run: Run) -> float:
    """Return the value of a constant between two at which a run's estimate is as published."""
    for _ in range(40):
        middle = math.sqrt(slow * fast)
        setattr(compute, name, middle)
        slow, fast = (middle, fast) if run.estimate() < run.tokens_per_s else (slow, middle)
    return middle


def main() -> int:
    """Print the table; return 1 if a limit is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the two constants again")
    options = parser.parse_args()
    verdict = Verdict()
    print("tokens a second for each GPU, rows of 8,192 tokens")
    columns = ("  GPUs", "  FSDP", "  TP", "  rows", f"{'checkpointing':>15}", "  compile")
    table = Table(6, *columns, "  estimated", "  published", "  ratio")
    for run in RUNS:
        estimate = run.estimate()
        ratio = estimate / run.tokens_per_s
        end = f"no limit, {run.machine.gpu}"
        if run.machine is GRAND_TETON:
            tolerance = FITTED_TOLERANCE if run.is_fitted else TOLERANCE
            label = f"{run.name} on {run.z * run.x} GPUs"
            end = verdict.check(label, ratio, at_least=1 - tolerance, at_most=1 + tolerance)
            end = f"fitted, {end}" if run.is_fitted else end
        cells = (run.z * run.x, run.z, run.x, run.rows, run.checkpointing)
        table.row(
            run.name,
            *map(str, cells),
            "yes" if run.is_compiled else "no",
            f"{estimate:,.0f}",
            f"{run.tokens_per_s:,.0f}",
            f"{ratio:.3f}",
            end=end,
        )
    print("\npublished at:", *sorted({run.source for run in RUNS}), sep="\n  ")
    if options.fit:
        share, passes = fit_constants()
        print(f"\nfitted again: MATMUL_SHARE {share:.3f}, EAGER_PASSES {passes:.2f}")
    return verdict.end()


if __name__ == "__main__":
    sys.exit(main())
