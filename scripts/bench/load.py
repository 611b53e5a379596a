"""Measure the memory of loading a checkpoint onto four ranks, compared with other libraries.

python scripts/bench/load.py                         a random 1 GB Llama, five runs; minutes
python scripts/bench/load.py --stored bfloat16       stored in bf16, like most published models
python scripts/bench/load.py --size-mb 4 --runs 1    to check that the script works; seconds

Every side loads the same folder of safetensors, as fp32, onto 4 processes that shard it. Each
process then writes its shard once, like an optimizer, because until then it may be the mapped file.
The figure for each rank is its peak anonymous memory (RssAnon, which excludes mapped files) above
the level before loading, sampled from outside every few milliseconds: medians of the runs, in MB
(10^6 bytes). `ratio` is relative to memguard. The last line is a verdict; exit 1 if memguard's
worst rank is above its shard + 150 MB. Linux only.
"""

import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
from harness import Failed, Rank, Ranks, Table, Verdict, build_parser
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.distributed import DistributedConfig
from workload import build_llama, write_checkpoint

from memguard.hf.assembly import Assembly
from memguard.hf.load import load_assembled
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape

NUM_RANKS = 4
ALLOWANCE_MB = 150


# -- sides: each returns the bytes that this rank stores ---------------------------------------


def load_memguard(folder: str) -> int:
    """`load_assembled` at (z=4), without the check of the model, which no other side runs."""
    mesh = build_mesh(MeshShape(z=NUM_RANKS), "cpu")
    layer = load_assembled(folder, Assembly(mesh=mesh, device=torch.device("cpu")), check=False)
    return touch_shards(layer.lm.model)


def load_fully_shard(folder: str) -> int:
    """`from_pretrained` on every rank, then FSDP2."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return touch_shards(model)


def load_native(folder: str, **sizes: int) -> int:
    """Transformers' own sharded loading."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=DistributedConfig(**sizes)
    )
    return touch_shards(model)


def load_accelerate(folder: str) -> int:
    """Accelerate's function for FSDP2 with `cpu_ram_efficient_loading`.

    Rank 0 reads everything, then each tensor is broadcast. Accelerate's `prepare` cannot be used:
    without a GPU it keeps the whole model on every rank.
    """

    class FirstRank:
        is_main_process = os.environ["RANK"] == "0"

    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    state = {}
    if FirstRank.is_main_process:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        state = model.state_dict()
        model = model.to("meta")
    else:
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp2_load_full_state_dict(FirstRank, model, state)
    return touch_shards(model)


SIDES: dict[str, Callable[[str], int]] = {
    "memguard load_assembled": load_memguard,
    "transformers fsdp_size=4": functools.partial(load_native, fsdp_size=NUM_RANKS),
    "transformers tp_size=4": functools.partial(load_native, tp_size=NUM_RANKS),
    "from_pretrained + fully_shard": load_fully_shard,
    "accelerate rank 0 + broadcast": load_accelerate,
}


def touch_shards(model: Any) -> int:
    """Write this rank's pieces once, like the first optimizer step; return their bytes.

    A piece may still be the mapped file, which takes no anonymous memory until it is written.
    """
    pieces = [getattr(p, "_local_tensor", p).detach() for p in model.parameters()]
    for piece in pieces:
        piece.mul_(0.5)
    return sum(piece.numel() * piece.element_size() for piece in pieces)


# -- one run -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One run of one side."""

    peak_mb: list[float]
    """Peak of each rank, above its level before loading."""
    stored_mb: float
    """Largest shard of a rank."""
    seconds: float


def run_rank(load: Callable[[str], int], folder: str, rank: Rank) -> int:
    """Load the checkpoint, once all preparations are done."""
    rank.report()
    return load(folder)


def measure(load: Callable[[str], int], folder: str) -> Measured | str:
    """Load once; return the reason if it fails."""
    try:
        with Ranks(run_rank, load, folder, num_ranks=NUM_RANKS) as ranks:
            ranks.hear()
            before, begin_s = ranks.anonymous_bytes(), time.monotonic()
            stored, peaks = ranks.monitor()
            took_s = time.monotonic() - begin_s
    except Failed as failure:
        return str(failure)
    return Measured(
        peak_mb=[(peak - level) / 1e6 for peak, level in zip(peaks, before, strict=True)],
        stored_mb=max(stored) / 1e6,
        seconds=took_s,
    )


# -- table -------------------------------------------------------------------------------------


def choose_llama(size_mb: int) -> transformers.LlamaConfig:
    """Return a Llama of about this size in fp32."""
    width = 1024 if size_mb >= 400 else 64
    vocabulary, inner = 32 * width, 11 * width // 4
    in_layer = 4 * width * width + 3 * width * inner
    layers = max(1, round((size_mb * 1e6 / 4 - 2 * vocabulary * width) / in_layer))
    return build_llama(vocabulary, width, inner, layers, width // 16, is_tied=False)


def print_table(rows: dict[str, list[Measured | str]]) -> tuple[float, float]:
    """Print medians; return the peak and the shard of memguard's worst rank (MB)."""
    headings = [f"{f'rank {rank}':>9}" for rank in range(NUM_RANKS)]
    headings += ["    worst", "   ratio", "   shard", "      s"]
    table = Table(32, *headings, corner="peak above before, MB")
    ours = (float("inf"), 0.0)
    for side, runs in rows.items():
        good = [run for run in runs if isinstance(run, Measured)]
        if not good:
            table.failure(side, str(runs[0]))
            continue
        peaks = [statistics.median(run.peak_mb[rank] for run in good) for rank in range(NUM_RANKS)]
        worst = statistics.median(max(run.peak_mb) for run in good)
        if side == next(iter(SIDES)):
            ours = worst, good[0].stored_mb
        table.row(
            side,
            *(f"{peak:,.0f}" for peak in (*peaks, worst)),
            f"{worst / ours[0]:.1f}x" if ours[0] else "-",
            f"{good[0].stored_mb:,.0f}",
            f"{statistics.median(run.seconds for run in good):.1f}",
            end="" if len(good) == len(runs) else f"after {len(good)} runs: {runs[-1]}",
        )
    return ours


def main() -> int:
    """Measure every side in turn; return 1 if the limit is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("--size-mb", type=int, default=1000, help="size of the weights in fp32")
    parser.add_argument("--stored", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--runs", type=int, default=5, help="loads per side; medians are printed")
    parser.add_argument("--folder", type=Path, help="folder for the temporary checkpoint")
    options = parser.parse_args()
    rows: dict[str, list[Measured | str]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench_load.") as folder:
        dtype = getattr(torch, options.stored)
        write_checkpoint(Path(folder), choose_llama(options.size_mb), dtype=dtype)
        num_bytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        print(
            f"{num_bytes / 1e6:,.0f} MB of {options.stored} onto {NUM_RANKS} ranks in fp32, "
            f"medians of {options.runs} runs",
            flush=True,
        )
        for _ in range(options.runs):
            for side, load in SIDES.items():
                # A side that failed is not run again, because it may wait for its timeout.
                if not any(isinstance(run, str) for run in rows[side]):
                    rows[side].append(measure(load, folder))
    worst, shard = print_table(rows)
    verdict = Verdict()
    verdict.check("memguard's worst rank", worst, at_most=shard + ALLOWANCE_MB, unit=" MB")
    return verdict.end(
        f": memguard's worst rank takes {worst:,.0f} MB; at most {shard + ALLOWANCE_MB:,.0f} MB, "
        f"its shard + {ALLOWANCE_MB} MB"
    )


if __name__ == "__main__":
    sys.exit(main())
