"""Profiles some steps: `RUN/profile/rank-N.json`, torch's traces, and `axes.json`, a table.

    total     time in which a collective over the axis is in flight
    hidden    of that, time in which the rank computes: kernels, on a CPU torch's operations
    slowest   the rank with most time outside collectives that are not hidden: others wait for it

NCCL's kernels name their process group. gloo's collectives do not: those of one kind begin in the
order in which they were started, in a range of `collectives` or by FSDP2 (over z, sums over data).
"""

import json
import os
from collections import defaultdict, deque
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np
from torch.profiler import profile, record_function

from memguard.config import ProfileConfig
from memguard.parallel.collectives import RANGE
from memguard.parallel.mesh import Mesh4D
from memguard.parallel.mesh_shape import AXES
from memguard.train.run_state import RunState

_STEP = "memguard step"


class StepProfile:
    """Profiles steps, from the first to the last of a pair; every rank has one."""

    def __init__(self, config: ProfileConfig | None, run: RunState, mesh: Mesh4D | None) -> None:
        axes = [] if mesh is None else [mesh.axis(name) for name in AXES]
        self._groups = {axis.group_name: axis.name for axis in axes if axis.degree > 1}
        self._steps = (1, 0) if config is None else config.steps
        self._run, self._profiler = run, profile()
        self._done: list[int] = []

    def step(self, number: int) -> AbstractContextManager[Any]:
        """Return the context of a step."""
        if not self._steps[0] <= number <= self._steps[1]:
            return nullcontext()
        if not self._done:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # Its lines on standard error.
            self._profiler.start()
        self._done.append(number)
        return record_function(_STEP)

    def stop(self) -> None:
        """Stop if it runs."""
        if self._done:
            self._profiler.stop()
            self._done = []

    def write_after(self, number: float) -> None:
        """Write and show the profile, if this was its last step; every rank calls this."""
        done, runtime, folder = self._done, self._run.runtime, self._run.folder / "profile"
        if not done or number < self._steps[1]:
            return
        self.stop()
        path, own, lost = folder / f"rank-{runtime.rank}.json", None, ""
        try:
            folder.mkdir(exist_ok=True)
            self._profiler.export_chrome_trace(str(path))
            own = read_trace(json.loads(path.read_bytes())["traceEvents"], self._groups)
        except (OSError, ValueError, RuntimeError) as error:
            lost = f"profile: the trace of rank {runtime.rank} is lost ({type(error).__name__})"
        ranks = runtime.gather_objects((own, lost))
        if any(errors := [error for _, error in ranks]):
            self._run.console.warn(max(errors))
        read = {rank: own for rank, (own, _) in enumerate(ranks) if own is not None}
        if runtime.is_main and read:
            own_s = {rank: seconds for rank, (seconds, _) in read.items()}
            slowest = max(own_s, key=lambda rank: own_s[rank])
            axes = {
                axis: np.mean([of.get(axis, [0, 0, 0]) for _, of in read.values()], 0).tolist()
                for axis in sorted({axis for _, of in read.values() for axis in of})
            }
            lines = [f"profile of steps {done[0]} to {done[-1]}, a step, mean over ranks:"]
            for axis, (calls, total, hidden) in axes.items():
                lines += [f"  {axis:<12}{calls:5.0f} calls {total:8.4f} s, hidden {hidden:8.4f} s"]
            mean = sum(own_s.values()) / len(own_s)
            own_text = f"{own_s[slowest]:.4f} s of its own, all ranks {mean:.4f} s"
            lines += [f"  slowest: rank {slowest}, {own_text}"]
            self._run.console.info("\n".join(lines))
            table = {"steps": done, "slowest_rank": slowest, "own_s": own_s}
            table["axes"] = {"columns": ["calls", "total_s", "hidden_s"], **axes}
            with suppress(OSError):  # The lines above have it.
                (folder / "axes.json").write_text(json.dumps(table, indent=2))


def read_trace(events: list[Any], groups: dict[str, str]) -> tuple[float, dict[str, list[float]]]:
    """Return a rank's own seconds a step, and calls, total and hidden seconds of each axis.

    ``groups`` has the axis of each process group's name.
    """
    timed = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: e["ts"])
    steps = [e for e in timed if e["name"] == _STEP and e["cat"] == "user_annotation"]
    first, main, each_s = steps[0]["ts"], steps[0]["tid"], 1e-6 / len(steps)

    def cover(chosen: list[Any]) -> Any:
        moments = np.zeros(round(steps[-1]["ts"] + steps[-1]["dur"] - first), dtype=bool)
        for begin, end in ((e["ts"] - first, e["ts"] + e["dur"] - first) for e in chosen):
            moments[max(0, round(begin)) : max(0, round(end))] = True
        return moments

    flights: dict[str, list[Any]] = defaultdict(list)
    started: tuple[deque[str], deque[str]] = (deque(), deque())
    axis, until = "", 0.0
    for e in timed:
        name, queue = e["name"], started["gather" in e["name"]]
        if name.startswith(RANGE):
            axis, until = name.removeprefix(RANGE), e["ts"] + e["dur"]
        elif name.startswith("c10d::"):
            by_fsdp = "data" if "allreduce" in name else "z"
            of_main = axis if e["ts"] < until else by_fsdp
            queue.append(of_main if e["tid"] == main else "other")
        elif name.startswith("gloo:") and queue:
            flights[queue.popleft()].append(e)
        elif name.startswith("nccl") and e["cat"] == "kernel":
            flights[groups.get(e["args"].get("Process Group Name"), "world")].append(e)
    kernels = [e for e in timed if e["cat"] == "kernel" and not e["name"].startswith("nccl")]
    on_cpu = [e for e in timed if e["name"].startswith("aten::") and e["tid"] == main]
    busy, in_step = cover(kernels or on_cpu), cover(steps)
    sent = {axis: cover(chosen) & in_step for axis, chosen in flights.items()}
    own = in_step & (busy | ~np.any([~in_step, *sent.values()], axis=0))
    axes = {}
    for axis, time in sent.items():
        seconds = (float(chosen.sum()) * each_s for chosen in (time, time & busy))
        axes[axis] = [len(flights[axis]) / len(steps), *seconds]
    return float(own.sum() * each_s), axes
