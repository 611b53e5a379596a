"""Measure how much memory loading a checkpoint onto four ranks takes, beside its peers.

python scripts/bench_load.py                         a random 1 GB Llama, five runs; minutes
python scripts/bench_load.py --stored bfloat16       stored as most published ones are
python scripts/bench_load.py --size-mb 4 --runs 1    to see that it works; seconds

Every side loads the same folder of safetensors, as fp32, onto 4 processes that shard it; then each
writes its shard once, as an optimizer does: until then it may be the mapped file. What is shown for
each rank is the most anonymous memory (RssAnon, which leaves out mapped files) above its level just
before, sampled from outside every few milliseconds: medians of the runs, in MB (10^6 bytes).
`ratio` is to memguard. The last line is a verdict; exit 1 where memguard's worst rank is above its
shard + 150 MB. Linux only.
"""

import argparse
import functools
import multiprocessing
import os
import re
import shutil
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_RANKS = 4
ALLOWANCE_MB = 150
SAMPLE_EVERY_S = 0.002
TIMEOUT_S = 240
# What loading would import is there before: code is not what is measured.
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.distributed",
    "transformers.integrations.tensor_parallel",
    "transformers.models.llama.modeling_llama",
    "accelerate.utils.fsdp_utils",
    "memguard.hf.load",
]


# -- sides: each returns the bytes that this rank stores ---------------------------------------


def load_memguard(folder: str) -> int:
    """`load_sharded` at (z=4) without the forward that checks the model: no peer runs one."""
    import torch

    from memguard.hf.load import load_sharded
    from memguard.hf.sharded import Sharding
    from memguard.parallel.mesh import build_mesh
    from memguard.parallel.mesh_shape import MeshShape

    mesh = build_mesh(MeshShape(z=NUM_RANKS), "cpu")
    layer = load_sharded(folder, Sharding(mesh=mesh, device=torch.device("cpu")), check=False)
    return touch_shards(layer.vocab.model)


def load_fully_shard(folder: str) -> int:
    """`from_pretrained` on every rank, then FSDP2."""
    import torch
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return touch_shards(model)


def load_native(folder: str, **sizes: int) -> int:
    """Transformers' own sharded loading."""
    import torch
    import transformers
    from transformers.distributed import DistributedConfig

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=DistributedConfig(**sizes)
    )
    return touch_shards(model)


def load_accelerate(folder: str) -> int:
    """What Accelerate does for FSDP2 with `cpu_ram_efficient_loading`, by its own function.

    Rank 0 reads everything, then each tensor is broadcast. Its `prepare` cannot be called: without
    a GPU it leaves the model whole on every rank.
    """
    import torch
    import transformers
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

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
    "memguard load_sharded": load_memguard,
    "transformers fsdp_size=4": functools.partial(load_native, fsdp_size=NUM_RANKS),
    "transformers tp_size=4": functools.partial(load_native, tp_size=NUM_RANKS),
    "from_pretrained + fully_shard": load_fully_shard,
    "accelerate rank 0 + broadcast": load_accelerate,
}


def touch_shards(model: Any) -> int:
    """Write this rank's pieces once, as the first optimizer step does; return their bytes.

    A piece may still be the mapped file, which is no memory of its own until it is written.
    """
    pieces = [getattr(each, "_local_tensor", each).detach() for each in model.parameters()]
    for piece in pieces:
        piece.mul_(0.5)
    return sum(piece.numel() * piece.element_size() for piece in pieces)


# -- one run -----------------------------------------------------------------------------------


def run_rank(load: Callable[[str], int], folder: str, rank: int, port: int, pipe: Any) -> None:
    """In a process of its own: say when everything but loading is done, load, say so."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(NUM_RANKS),
        LOCAL_WORLD_SIZE=str(NUM_RANKS),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
    )
    import torch
    import transformers
    from torch import distributed as dist

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        dist.barrier()
        pipe.send(("ready", None))
        pipe.recv()
        stored = load(folder)
        dist.barrier()
        pipe.send(("done", stored))
    except BaseException as error:
        last = traceback.format_exception_only(error)[-1]
        pipe.send(("failed", " ".join(last.split())[:160]))
    pipe.recv()


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One run of one side."""

    peak_mb: list[float]
    """Of each rank, above its level before loading."""
    stored_mb: float
    """Largest shard of a rank."""
    seconds: float


def measure(load: Callable[[str], int], folder: str) -> Measured | str:
    """Load once; return why where it does not work."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    try:
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_rank, args=(load, folder, rank, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            kind, answer = receive(pipe, TIMEOUT_S)
            if kind != "ready":
                return str(answer)
        pids = [process.pid or 0 for process in processes]
        before = [read_anonymous_mb(pid) for pid in pids]
        peaks, stored = list(before), [0] * NUM_RANKS
        begin = time.monotonic()
        for pipe in pipes:
            pipe.send("go")
        waiting = set(range(NUM_RANKS))
        while waiting:
            for rank, pid in enumerate(pids):
                peaks[rank] = max(peaks[rank], read_anonymous_mb(pid))
                if rank in waiting and pipes[rank].poll():
                    kind, answer = receive(pipes[rank], 0)
                    if kind != "done":
                        return str(answer)
                    waiting.discard(rank)
                    stored[rank] = answer
            if time.monotonic() - begin > TIMEOUT_S:
                return f"ranks {sorted(waiting)} were not done after {TIMEOUT_S} s"
            time.sleep(SAMPLE_EVERY_S)
        return Measured(
            peak_mb=[peak - level for peak, level in zip(peaks, before, strict=True)],
            stored_mb=max(stored) / 1e6,
            seconds=time.monotonic() - begin,
        )
    finally:
        for process in processes:
            process.kill()
            process.join()


def receive(pipe: Any, timeout_s: float) -> tuple[str, Any]:
    """Return what a rank says, or that it died."""
    try:
        if not pipe.poll(timeout_s):
            return "failed", "no answer"
        message: tuple[str, Any] = pipe.recv()
        return message
    except EOFError:
        return "failed", "a rank died without a word"


def read_anonymous_mb(pid: int) -> float:
    """Return RssAnon of a process; 0 once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) * 1024 / 1e6 if found else 0.0


# -- all of it ---------------------------------------------------------------------------------


def write_checkpoint(folder: Path, size_mb: int, stored: str) -> float:
    """Write a random Llama of about this size in fp32; return the MB of its files."""
    import torch
    import transformers

    width = 1024 if size_mb >= 400 else 64
    vocabulary, inner = 32 * width, 11 * width // 4
    in_layer = 4 * width * width + 3 * width * inner
    layers = max(1, round((size_mb * 1e6 / 4 - 2 * vocabulary * width) / in_layer))
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(getattr(torch, stored)).save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


def print_table(rows: dict[str, list[Measured | str]]) -> tuple[float, float]:
    """Print medians; return the peak and the shard of memguard's worst rank."""
    ranks = "".join(f"{f'rank {rank}':>9}" for rank in range(NUM_RANKS))
    print(f"{'peak above before, MB':<32}{ranks}{'worst':>9}{'ratio':>8}{'shard':>8}{'s':>7}")
    ours = (float("inf"), 0.0)
    for side, runs in rows.items():
        good = [run for run in runs if isinstance(run, Measured)]
        if not good:
            print(f"{side:<32} does not run: {next(run for run in runs if isinstance(run, str))}")
            continue
        peaks = [statistics.median(run.peak_mb[rank] for run in good) for rank in range(NUM_RANKS)]
        worst = statistics.median(max(run.peak_mb) for run in good)
        if side == next(iter(SIDES)):
            ours = worst, good[0].stored_mb
        cells = "".join(f"{peak:>9,.0f}" for peak in peaks)
        ratio = f"{worst / ours[0]:.1f}x" if ours[0] else "-"
        took = statistics.median(run.seconds for run in good)
        failed = f"  ({len(runs) - len(good)} of {len(runs)} runs failed)" * (len(good) < len(runs))
        print(
            f"{side:<32}{cells}{worst:>9,.0f}{ratio:>8}{good[0].stored_mb:>8,.0f}{took:>7.1f}"
            f"{failed}"
        )
    return ours


def main() -> int:
    """Measure every side in turn; return 1 where the bar is missed."""
    summary, _, usage = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-mb", type=int, default=1000, help="of the weights in fp32")
    parser.add_argument("--stored", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--runs", type=int, default=5, help="loads of each side; medians count")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written meanwhile")
    asked = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="")
    checkpoint = Path(tempfile.mkdtemp(dir=asked.folder, prefix="bench_load."))
    rows: dict[str, list[Measured | str]] = {side: [] for side in SIDES}
    try:
        size_mb = write_checkpoint(checkpoint, asked.size_mb, asked.stored)
        print(
            f"{size_mb:,.0f} MB of {asked.stored} onto {NUM_RANKS} ranks in fp32, medians of "
            f"{asked.runs} runs",
            flush=True,
        )
        for _ in range(asked.runs):
            for side, load in SIDES.items():
                # What failed once is not tried again: it may have waited for its timeout.
                if not any(isinstance(run, str) for run in rows[side]):
                    rows[side].append(measure(load, str(checkpoint)))
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
    worst, shard = print_table(rows)
    bar = shard + ALLOWANCE_MB
    met = worst <= bar
    print(
        f"{'PASS' if met else 'FAIL'}: memguard's worst rank takes {worst:,.0f} MB; at most "
        f"{bar:,.0f} MB, its shard + {ALLOWANCE_MB} MB"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
