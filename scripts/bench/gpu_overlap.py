"""Overlap of each mesh axis' collectives with computation, from a trace of torch.profiler.

A collective of an axis is a NCCL kernel whose process group is that of the axis; computation is
every other kernel of the same GPU. For each axis

    total     length of the union of its collectives' intervals
    hidden    length of that union's intersection with the union of the intervals of computation

A share of 100 % means that the step never waits for this axis alone. On the CPU the trace has no
process groups: gloo's collectives are of the axis "gloo", and computation is matmuls.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_MATMULS = ("aten::mm", "aten::addmm", "aten::bmm")
OTHER = "other"

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Time of the collectives of one axis in a trace."""

    total_ms: float
    hidden_ms: float
    """Part of it during which the GPU also computes."""

    @property
    def share(self) -> float:
        """Share of the time that computation hides; 1 if there is no collective."""
        return self.hidden_ms / self.total_ms if self.total_ms else 1.0


def measure_overlap(trace: Mapping[str, Any], axes: Mapping[str, str]) -> dict[str, Overlap]:
    """Return the overlap of each axis that has collectives in a trace.

    Args:
        trace: a Chrome trace, as `torch.profiler` exports it.
        axes: name of the axis by name of its process group.
    """
    collectives: dict[str, list[Interval]] = {}
    computation: list[Interval] = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        begin_us = float(event["ts"])
        interval = (begin_us, begin_us + float(event["dur"]))
        name, is_kernel = event["name"], event.get("cat") == "kernel"
        if is_kernel and name.startswith("nccl"):
            collectives.setdefault(_find_axis(event.get("args", {}), axes), []).append(interval)
        elif name.startswith("gloo:"):
            collectives.setdefault("gloo", []).append(interval)
        elif is_kernel or name in _MATMULS:
            computation.append(interval)
    compute = _unite(computation)
    return {
        axis: Overlap(
            total_ms=_length(united) / 1e3, hidden_ms=_length(_intersect(united, compute)) / 1e3
        )
        for axis, united in ((axis, _unite(times)) for axis, times in collectives.items())
    }


def profile_step(work: Callable[[], object], folder: Path) -> dict[str, Any]:
    """Run a function under the profiler and return its Chrome trace."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        work()
    file = folder / "trace.json"
    profiler.export_chrome_trace(str(file))
    trace: dict[str, Any] = json.loads(file.read_text())
    return trace


def _find_axis(arguments: Mapping[str, Any], axes: Mapping[str, str]) -> str:
    by_name = axes.get(str(arguments.get("Process Group Name")))
    # The description that DeviceMesh gives to the group of an axis.
    description = str(arguments.get("Process Group Description", ""))
    return by_name or (description.removeprefix("mesh_") if "mesh_" in description else OTHER)


def _unite(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals in order that cover the same times."""
    united: list[Interval] = []
    for begin, end in sorted(intervals):
        if united and begin <= united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((begin, end))
    return united


def _intersect(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Return the times that two lists of disjoint, ordered intervals have in common."""
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            common.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
