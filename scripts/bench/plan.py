"""Compare the predicted memory of a training step with simulated and measured memory.

python scripts/bench/plan.py                        everything; about ten minutes
python scripts/bench/plan.py --model config.json    also another model
python scripts/bench/plan.py --quick                tiny sizes, to check the script; seconds

Predicted memory is `estimate_memory`, arithmetic on a model's sizes. Simulated memory is the peak
of all fake tensors in the engine's own step of rank 0. Every simulation runs in a separate process.
Both count tensors.

Measured memory is anonymous memory (RssAnon) of the worst of four processes that train on random
rows, sampled from outside every few milliseconds: the peak in the steps after the first, above the
level before the model is built. At that level everything is imported, all process groups are
connected, and a tiny model has run a step. The figure is the median of the runs, with default
malloc settings. In addition to tensors it includes memory of kernels and collectives, and
fragmentation of malloc's heap: glibc's posix_memalign, which torch uses for tensors, requests a
little more than their size, so that the hole of a freed tensor is too small for a new tensor of the
same size. `predicted` is the memory that `memguard plan` predicts for a CPU process: tensors and an
allowance for fragmentation, a share that was measured with this script on the first and third rows.
The second row has no limit: with recomputation, fragmentation is the same but tensors are fewer.
The column `no holes` is a run in which malloc maps each tensor separately, and so frees it
immediately, for comparison with the tensors alone.

The last line is a verdict; exit 1 if a limit is missed. Linux with glibc only.
"""

import argparse
import ctypes
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from harness import Failed, Rank, Ranks, Table, Verdict, build_parser
from workload import (
    PEAK_TOLERANCE,
    STATE_TOLERANCE,
    build_step,
    describe_step,
    draw_batches,
    pair_memory,
)

from memguard.config import TrainConfig
from memguard.errors import MemguardError
from memguard.hf.assembly import Assembly, allocate, build_meta_layer
from memguard.parallel.linear import to_local
from memguard.parallel.mesh import Mesh4D, build_mesh
from memguard.parallel.mesh_shape import MeshShape, nearest_meshes
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.machine import FRAGMENTATION_CPU
from memguard.planner.memory import MemoryEstimate, estimate_memory

# The folder above has them.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from fake_step import SimulatedStep, simulate_step

NUM_STEPS = 3
GIB = 2**30
# Constant of malloc.h, and the size above which an allocation is mapped separately.
M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 2**16

# Sizes as in the config.json of each model's repository on the Hugging Face hub.
PUBLISHED: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "meta-llama/Llama-3.1-70B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "meta-llama/Llama-3.1-405B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-32B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
# Like the model of bench/engine.py, with key/value heads that two ranks can split.
RANDOM_30M: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 10,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A step of a model on a mesh."""

    fields: dict[str, Any]
    """Fields of the model's configuration."""
    mesh: tuple[int, int, int, int]
    """Degrees of data, z, y, x."""
    num_layers: int | None = None
    """None uses all layers of the model."""
    checkpointing: str = "none"
    precision: str = "bf16"
    num_rows: int = 1
    """Rows of a step on one rank."""
    num_micro_batches: int = 1
    seq_len: int = 4096

    @property
    def config_fields(self) -> dict[str, Any]:
        """Fields of the configuration with `num_layers` layers and `seq_len` positions."""
        layers = self.num_layers or self.fields["num_hidden_layers"]
        limit = {"num_hidden_layers": layers, "max_position_embeddings": self.seq_len}
        return {"tie_word_embeddings": False, **self.fields, **limit}

    @property
    def config(self) -> Any:
        """The model's transformers configuration."""
        return transformers.AutoConfig.for_model(**self.config_fields)

    @property
    def shape(self) -> MeshShape:
        """The mesh as a `MeshShape`."""
        return MeshShape(**dict(zip(("data", "z", "y", "x"), self.mesh, strict=True)))

    @property
    def train(self) -> TrainConfig:
        """The settings of training."""
        settings = {
            "batch_size": self.num_rows * self.shape.num_batch_ways,
            "micro_batch_size": self.num_rows // self.num_micro_batches,
            "precision": self.precision,
            "activation_checkpointing": self.checkpointing,
        }
        return TrainConfig.model_validate(settings)

    def __str__(self) -> str:
        layers = f"{self.num_layers or self.fields['num_hidden_layers']}"
        mesh = f"({', '.join(map(str, self.mesh))})"
        rows = f"{self.num_micro_batches} x {self.num_rows // self.num_micro_batches}"
        return f"  {mesh:<15}{layers:>4} {self.checkpointing:<10}{self.precision:<5}{rows}"


MEASURED = Case(fields=RANDOM_30M, mesh=(1, 2, 1, 2), num_rows=4, seq_len=512)


# -- predicted, simulated, measured ------------------------------------------------------------


def predict(case: Case) -> MemoryEstimate:
    """Return the planner's estimate, from sizes alone."""
    settings = describe_step(case.train, case.shape, seq_len=case.seq_len)
    sizes = ModelSizes.from_json(case.config_fields)
    return estimate_memory(sizes, case.shape, settings, seq_len=case.seq_len)


def simulate(case: Case) -> SimulatedStep:
    """Return the memory of the engine's own step on fake tensors.

    Raises:
        Failed: the simulation fails.
    """
    with Ranks(run_simulation, case) as ranks:
        step: SimulatedStep = ranks.hear()[0]
    return step


def run_simulation(case: Case, rank: Rank) -> SimulatedStep:
    """Simulate in a separate process, because the fake process group is not cleaned up."""
    return simulate_step(case.config, case.shape, train=case.train, seq_len=case.seq_len)


def measure(case: Case, *, maps_all: bool = False) -> int:
    """Return the worst rank's growth in memory to its peak in steps 2 and later (bytes).

    Args:
        case: the training case.
        maps_all: whether malloc maps each tensor separately.

    Raises:
        Failed: a rank fails.
    """
    with Ranks(run_rank, case, maps_all, num_ranks=case.shape.num_ranks) as ranks:
        ranks.hear()
        before = ranks.anonymous_bytes()
        ranks.go()
        _, peaks = ranks.monitor()
    return max(peak - level for peak, level in zip(peaks, before, strict=True))


def run_rank(case: Case, maps_all: bool, rank: Rank) -> None:
    """Train on one rank."""
    if maps_all:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    mesh = build_mesh(case.shape, "cpu")
    mesh.connect(torch.device("cpu"))
    # A first step allocates resources that stay: threads, socket buffers, kernel code.
    take_step = make_step(replace(case, fields=TINY, num_layers=None, seq_len=32), mesh)
    take_step(1)
    del take_step
    gc.collect()
    rank.report()
    take_step = make_step(case, mesh)
    take_step(1)
    rank.report()
    for number in range(2, NUM_STEPS + 1):
        take_step(number)


def make_step(case: Case, mesh: Mesh4D) -> Callable[[int], object]:
    """Build a random model on this rank; return a function that runs a step on random rows."""
    train = case.train
    sharding = Assembly(
        mesh=mesh,
        device=torch.device("cpu"),
        compute_dtype=torch.bfloat16 if case.precision == "bf16" else None,
        chunk_tokens=train.nll_chunk_tokens,
        checkpointing=train.checkpointing,
    )
    layer = build_meta_layer(case.config, sharding)
    allocate(layer.lm, layer.assembly.device)
    torch.manual_seed(torch.distributed.get_rank())
    for parameter in layer.lm.model.parameters():
        piece = to_local(parameter.data)
        # Vectors are norm weights, which must be equal on ranks that replicate them.
        piece.normal_(std=0.02) if piece.ndim > 1 else piece.fill_(1.0)
    step = build_step(layer.lm, train)
    batches = draw_batches(
        case.fields["vocab_size"],
        (case.num_rows, case.seq_len),
        document_tokens=(case.seq_len // 4, case.seq_len),
        num_batches=NUM_STEPS,
        # Ranks along y and x use the same rows.
        part=layer.lm.batch_rank,
    )

    def take_step(number: int) -> None:
        first = number * train.batch_size
        step.run(batches[number - 1], lr=1e-4, step=number, first_sample=first)

    return take_step


# -- cases -------------------------------------------------------------------------------------


def list_cases() -> dict[str, list[Case]]:
    """Return each published model at full depth on one mesh, and a few layers of it on others."""
    few, twice = {"num_layers": 4}, {"num_rows": 2, "num_micro_batches": 2}
    cases: dict[str, list[dict[str, Any]]] = {
        "meta-llama/Llama-3.1-8B": [
            {"mesh": (1, 8, 1, 1), "checkpointing": "full"},
            {"mesh": (1, 2, 1, 2), **few},
            # Rows of weights that z does not divide.
            {"mesh": (1, 3, 2, 2), "checkpointing": "full", **few},
            # Two ranks share a key/value head.
            {"mesh": (1, 2, 1, 16), "num_rows": 2, **few},
            {"mesh": (2, 2, 1, 2), "checkpointing": "selective", **few, **twice},
            {"mesh": (1, 2, 2, 2), "precision": "fp32", **few},
            {"mesh": (1, 1, 1, 1), **few},
        ],
        "meta-llama/Llama-3.1-70B": [
            {"mesh": (1, 16, 1, 8), "checkpointing": "selective"},
            {"mesh": (1, 8, 2, 4), **few},
            {"mesh": (2, 4, 2, 16), "checkpointing": "full", **few, **twice},
        ],
        "meta-llama/Llama-3.1-405B": [
            {"mesh": (8, 128, 2, 8), "checkpointing": "full"},
            {"mesh": (1, 16, 4, 8), **few},
            {"mesh": (1, 24, 1, 8), "checkpointing": "selective", **few},
        ],
        "Qwen/Qwen3-32B": [
            {"mesh": (1, 16, 1, 4), "checkpointing": "full"},
            {"mesh": (1, 8, 2, 4), **few},
            {"mesh": (2, 4, 1, 8), "checkpointing": "selective", **few},
        ],
    }
    return {
        model: [Case(fields=PUBLISHED[model], **settings) for settings in many]
        for model, many in cases.items()
    }


def list_cases_of(fields: dict[str, Any]) -> list[Case]:
    """Return cases of any model, on meshes on which it can run.

    Raises:
        MemguardError: the model's family is not supported, or a size is missing.
    """
    sizes = ModelSizes.from_json(fields)
    shapes = [MeshShape(z=4, x=2), MeshShape(z=2, y=2, x=2), MeshShape(x=8)]
    meshes = []
    for shape in shapes:
        near, *_ = nearest_meshes(shape, shape.num_ranks, sizes)
        meshes.append((near.data, near.z, near.y, near.x))
    few = min(4, sizes.num_layers)
    return [
        Case(fields=fields, mesh=meshes[0], checkpointing="full"),
        *(
            Case(fields=fields, mesh=mesh, num_layers=few, checkpointing=mode)
            for mesh, mode in zip(meshes, ("selective", "none", "full"), strict=True)
        ),
    ]


# -- tables ------------------------------------------------------------------------------------

CAPTION = (
    "rank 0 of (data, z, y, x), layers, recomputation, precision, micro-batches x rows of 4096 "
    "tokens"
)


def mark(words: list[str]) -> str:
    """Return the end of a row: MISSED if any limit is missed."""
    return "MISSED" if any("MISSED" in text for text in words) else ""


def check_near(verdict: Verdict, name: str, ratio: float, tolerance: float) -> str:
    """Check that a ratio is near 1."""
    return verdict.check(name, ratio, at_least=1 - tolerance, at_most=1 + tolerance)


def compare_simulated(name: str, case: Case, table: Table, verdict: Verdict) -> None:
    """Print a case's row: predicted and simulated memory.

    Raises:
        Failed: the simulation fails.
    """
    begin_s = time.monotonic()
    pairs = pair_memory(simulate(case), predict(case))
    took_s = time.monotonic() - begin_s
    cells, words = [], []
    for kind, (simulated, predicted, tolerance) in pairs.items():
        ratio = predicted / simulated
        cells += [f"{predicted / GIB:.2f}", f"{simulated / GIB:.2f}", f"{ratio:.3f}"]
        words.append(check_near(verdict, f"{name}, {kind}", ratio, tolerance))
    table.row(str(case), *cells, f"{took_s:.0f}", end=mark(words))


def compare_measured(name: str, case: Case, table: Table, verdict: Verdict, num_runs: int) -> None:
    """Print a measured case's row.

    Raises:
        Failed: the simulation or the measurement fails.
    """
    peak = predict(case).peak
    # The prediction of `memguard plan` for a CPU process: tensors, and fragmentation of the heap.
    needed = peak.total + FRAGMENTATION_CPU * peak.transient
    simulated = simulate(case).peak_bytes
    runs = [measure(case) for _ in range(num_runs)]
    without_holes = measure(case, maps_all=True)
    measured = statistics.median(runs)
    ratio = needed / measured
    end = "no limit"
    if case.checkpointing == "none":
        end = mark([check_near(verdict, name, ratio, PEAK_TOLERANCE)])
    table.row(
        str(case),
        *(f"{size / 1e6:,.0f}" for size in (peak.total, simulated, needed, measured)),
        f"{ratio:.3f}",
        f"{min(runs) / 1e6:,.0f} - {max(runs) / 1e6:,.0f}",
        f"{without_holes / 1e6:,.0f}",
        f"{peak.total / without_holes:.3f}",
        end=end,
    )


def load_fields(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Read a model's config.json; exit with a message if it cannot be read."""
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--model {path}: {error}")
    return fields


def main() -> int:
    """Run all comparisons; return 1 if a limit is missed."""
    parser = build_parser(__doc__)
    parser.add_argument(
        "--model", type=Path, action="append", default=[], help="config.json of another model"
    )
    parser.add_argument("--runs", type=int, help="measured runs; default 3; medians are printed")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; figures are meaningless")
    options = parser.parse_args()
    num_runs = options.runs or (1 if options.quick else 3)
    models = {"tiny": list_cases_of(TINY)} if options.quick else list_cases()
    for path in options.model:
        try:
            models[str(path)] = list_cases_of(load_fields(path, parser))
        except MemguardError as error:
            parser.error(f"--model {path}: {error}")
    cases = [
        replace(MEASURED, precision="fp32"),
        replace(MEASURED, precision="fp32", checkpointing="full"),
        replace(MEASURED, num_rows=2),
    ]
    if options.quick:
        cases = [replace(case, fields=TINY, seq_len=64) for case in cases]
    verdict = Verdict()

    def attempt(compare: Callable[..., None], model: str, case: Case, *rest: Any) -> None:
        name = " ".join(f"{model} {case}".split())
        try:
            compare(name, case, *rest)
        except Failed as failure:
            verdict.fail(f"{name} does not run")
            print(f"  {name} does not run: {failure}", flush=True)

    kinds = "".join(
        f"{f'{kind}, GiB':>24}" for kind in ("weights", "gradients", "optimizer", "peak")
    )
    print(f"{CAPTION}\n{'':<38}{kinds}")
    table = Table(38, *[" predicted", "   sim.", "  ratio"] * 4, "    s")
    for model, many in models.items():
        print(model, flush=True)
        for case in many:
            attempt(compare_simulated, model, case, table, verdict)
    print(
        f"\nfour processes, rows of {cases[0].seq_len} tokens, tensors and RssAnon, MB (10^6 "
        f"bytes); runs: {num_runs}"
    )
    columns = ("   tensors", "      sim.", " predicted", "  measured", "  ratio")
    table = Table(38, *columns, f"{'runs':>16}", "  no holes", "  ratio")
    for case in cases:
        attempt(compare_measured, "measured", case, table, verdict, num_runs)
    return verdict.end(
        f": within {STATE_TOLERANCE:.0%} (weights, gradients, optimizer) and {PEAK_TOLERANCE:.0%} "
        "(peak)"
    )


if __name__ == "__main__":
    sys.exit(main())
