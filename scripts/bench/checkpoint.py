"""Measure how long training stops for a save in the background, compared with other ways.

python scripts/bench/checkpoint.py                       1 GB of state, medians of 5 rounds; minutes
python scripts/bench/checkpoint.py --size-mb 8 --runs 1  to check that the script works; seconds

The state is fp32 weights with two moments each, of 100 matrices: of one process, and over 4
processes (z=4). Sides take turns in each round; of several ranks the slowest counts.

    copy into warm buffers     the least that any save needs before the state may change
    save in the background     until training goes on; `its thread`: until it is complete
    save in the foreground     the same save, for which training waits
    dcp.async_save             torch's, until training goes on; no limit

A step is one matmul a rank, timed alone and while a save is written; this needs a core more for
each rank and is only printed. The last line is a verdict; exit 1 if a save in the background takes
more than 1.5 times the copy, or more than 0.1 times a save in the foreground.
"""

import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Rank, Ranks, Table, Verdict, build_parser
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from memguard.parallel.local_parameters import find_local_parameters
from memguard.records.run_files import CheckpointManifest
from memguard.runtime import Console, Runtime, quiet_libraries
from memguard.runtime.stalls import SAVE_THREAD
from memguard.train.checkpoint import TrainState, save_checkpoint, to_stored
from memguard.train.resume import BackgroundSave

NUM_MATRICES = 100
MOST_OF_COPY, MOST_OF_FOREGROUND = 1.5, 0.1
LARGE_MB = 400
"""Below, what takes a save as long for any size is not small beside the copy."""
COPY, INSIDE, THREAD = "copy into warm buffers", "save in the background", "its thread"
FOREGROUND, ASYNC = "save in the foreground", "dcp.async_save"
ALONE, BESIDE = "a step", "a step while a save is written"


def build_state(size_mb: int, num_ranks: int) -> TrainState:
    """Return this rank's part of a random state."""
    side = int((size_mb * 1e6 / 12 / NUM_MATRICES) ** 0.5) // 4 * 4
    model = nn.Module()
    model.matrices = nn.ParameterList(torch.randn(side, side) for _ in range(NUM_MATRICES))
    if num_ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("z",)))
    parameters = find_local_parameters(model)
    optimizer = torch.optim.AdamW([each.local for each in parameters])
    state = TrainState(parameters=parameters, optimizer=optimizer, buffers={}, arrays={})
    state.make_room()
    return state


def make_progress(step: int) -> CheckpointManifest:
    """Return the manifest of a step, without files."""
    return CheckpointManifest(
        step=step,
        run_key="",
        sample_sha256=None,
        num_supervised_tokens=0,
        num_kept_tokens=0,
        num_rows=0,
        train_s=0.0,
        torch_version=torch.__version__,
        files={},
    )


def find_dtensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Return the state as torch's own functions take it."""
    tensors = {}
    for part in state.parts():
        source = None if part.parameter is None else part.parameter.source
        tensors[part.name] = part.value
        if isinstance(source, DTensor) and part.value.ndim:
            tensors[part.name] = DTensor.from_local(
                part.value, source.device_mesh, source.placements, run_check=False
            )
    return tensors


def time_steps(goes_on: Callable[[float], bool]) -> float:
    """Return the mean seconds of a step."""
    matrix = torch.randn(512, 512)
    begin_s, num_steps = time.perf_counter(), 0
    while goes_on(begin_s) or not num_steps:
        matrix @ matrix
        num_steps += 1
    return (time.perf_counter() - begin_s) / num_steps


def is_saving() -> bool:
    """Return whether a save is in flight."""
    return any(thread.name == SAVE_THREAD for thread in threading.enumerate())


def measure(size_mb: int, runs: int, folder: Path, rank: Rank) -> dict[str, list[float]]:
    """On a rank: the seconds of each side, one value a round."""
    quiet_libraries()
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    runtime = Runtime(rank=int(os.environ.get("RANK", "0")), world_size=num_ranks)
    state = build_state(size_mb, num_ranks)
    saves = BackgroundSave(runtime, Console(), timeout=timedelta(minutes=5))
    log = folder / "metrics.jsonl"
    log.write_text("a line\n")
    buffers = {part.name: torch.empty_like(part.value) for part in state.parts()}
    seconds: dict[str, list[float]] = {}

    def copy() -> None:
        for part in state.parts():
            buffers[part.name].copy_(part.value)

    def timed(name: str, work: Callable[[], Any]) -> Any:
        runtime.barrier()
        begin_s = time.perf_counter()
        result = work()
        seconds.setdefault(name, []).append(time.perf_counter() - begin_s)
        return result

    # The first round allocates buffers and fills caches; it is not counted.
    for number in range(1, runs + 2):
        given: dict[str, Any] = {"progress": make_progress(number), "log": log}
        given |= {"log_bytes": 7, "keep": 1}
        background = partial(save_checkpoint, folder / "background", **given)
        timed(COPY, copy)
        timed(INSIDE, partial(saves.start, state, background))
        timed(THREAD, saves.wait)
        tensors = to_stored(state.parts())
        foreground = partial(save_checkpoint, folder / "foreground", tensors, runtime, **given)
        timed(FOREGROUND, foreground)
        path = folder / f"async-{number}"
        save = partial(async_save, find_dtensors(state), checkpoint_id=str(path))
        timed(ASYNC, partial(save, no_dist=num_ranks == 1)).result()
        runtime.barrier()
        shutil.rmtree(path, ignore_errors=True)
        alone_s = time_steps(lambda begin_s: time.perf_counter() < begin_s + 1)
        seconds.setdefault(ALONE, []).append(alone_s)
        saves.start(state, background)
        seconds.setdefault(BESIDE, []).append(time_steps(lambda _: is_saving()))
        saves.wait()
    return seconds


def main() -> int:
    """Run all sides and print a table for each number of processes."""
    parser = build_parser(__doc__)
    parser.add_argument(
        "--size-mb", type=int, default=1000, help="weights and moments (10^6 bytes)"
    )
    parser.add_argument("--runs", type=int, default=5, help="rounds that count")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; default: a temporary one"
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4], metavar="N")
    arguments = parser.parse_args()
    verdict = Verdict()
    for num_ranks in arguments.processes:
        with (
            tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
            Ranks(
                measure, arguments.size_mb, arguments.runs, Path(folder), num_ranks=num_ranks
            ) as ranks,
        ):
            answers = ranks.hear()
        report(answers, num_ranks, verdict, is_large=arguments.size_mb >= LARGE_MB)
    return verdict.end()


def report(
    answers: list[dict[str, list[float]]], num_ranks: int, verdict: Verdict, *, is_large: bool
) -> None:
    """Print the medians of the slowest rank's seconds, and check the limits of a large state."""
    plural = "" if num_ranks == 1 else "es"
    print(f"\n{num_ranks} process{plural} on {len(os.sched_getaffinity(0))} cores")
    sides: dict[str, list[float]] = {}
    for name in answers[0]:
        rows = zip(*(answer[name] for answer in answers), strict=True)
        sides[name] = [max(row) for row in rows][1:]
    table = Table(34, "     seconds", "  of copy", "  of foreground")
    for name, seconds in sides.items():
        cells = [f"{statistics.median(seconds):.5f}"]
        limits = []
        for other, most in ((COPY, MOST_OF_COPY), (FOREGROUND, MOST_OF_FOREGROUND)):
            if name in (ALONE, BESIDE, ASYNC, THREAD):
                continue
            ratio = statistics.median(a / b for a, b in zip(seconds, sides[other], strict=True))
            cells.append(f"{ratio:.3f}")
            if name == INSIDE and is_large:
                limits.append(verdict.check(f"{name}, {num_ranks} ranks", ratio, at_most=most))
        table.row(name, *cells, end=", ".join(limits))


if __name__ == "__main__":
    sys.exit(main())
