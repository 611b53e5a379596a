"""Profiled steps: traces, the table by axis, the slowest rank, and what they leave as it is."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import RankPool
from run_examples import (
    QUIET,
    assert_same_weights,
    kill_after,
    make_run,
    run_folder,
    train_checked,
)

from memguard.config import RunConfig
from memguard.train import profile
from memguard.train.profile import read_trace
from memguard.train.step import TrainStep


def on_mesh(folder: Path, name: str, **train: Any) -> RunConfig:
    config = make_run(folder, name=name, train={"max_steps": 7, **train}, **QUIET)
    parallel = config.parallel.model_copy(update={"x": 2, "z": 2, "data": 1})
    return config.model_copy(update={"parallel": parallel})


def train_slowed(config: RunConfig, slow: int) -> None:
    """Train on a mesh on which one rank is late by 50 ms in each step."""
    run = TrainStep.run

    def late(self: TrainStep, *arguments: Any, **settings: Any) -> Any:
        if self.runtime.rank == slow:
            time.sleep(0.05)
        return run(self, *arguments, **settings)

    # For this process only, which ends with the test.
    TrainStep.run = late  # type: ignore[method-assign]
    train_checked(config)


def read_table(config: RunConfig) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((run_folder(config) / "profile/axes.json").read_bytes())
    return table


@pytest.mark.mesh
def test_a_profile_of_four_ranks_names_the_slowest(tmp_path: Path, ranks: RankPool) -> None:
    plain = on_mesh(tmp_path, "plain")
    ranks(train_checked, 4, plain)
    config = on_mesh(tmp_path, "slow", profile={"steps": [3, 6]})
    ranks(train_slowed, 4, config, 2)
    table = read_table(config)
    assert table["slowest_rank"] == 2, table
    others = [own_s for rank, own_s in table["own_s"].items() if rank != "2"]
    assert 0.03 < table["own_s"]["2"] - sum(others) / 3 < 0.15
    assert table["steps"] == [3, 4, 5, 6]
    axes = table["axes"]
    # Of two layers: sums in forward and backward.
    assert set(axes) >= {"z", "x", "world"}
    for calls, total_s, hidden_s in (axes["z"], axes["x"]):
        assert calls >= 4
        assert total_s > hidden_s >= 0
    names = {f"rank-{rank}.json" for rank in range(4)} | {"axes.json"}
    assert {path.name for path in (run_folder(config) / "profile").iterdir()} == names
    assert_same_weights(plain, config)


@pytest.mark.slow
def test_a_resumed_run_profiles_the_steps_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = {"max_steps": 5, "checkpoint_every_steps": 1}
    plain = train_checked(make_run(tmp_path, name="plain", train=train, **QUIET))
    config = make_run(tmp_path, train={**train, "profile": {"steps": [2, 9]}}, **QUIET)
    kill_after(3, config)
    assert not (run_folder(config) / "profile").exists()
    capsys.readouterr()
    train_checked(config)
    assert read_table(config)["steps"] == [3, 4, 5], "the run's last step ends it"
    assert "profile of steps 3 to 5" in "".join(capsys.readouterr())
    assert_same_weights(plain, config)
    # A file in place of the folder: the trace cannot be written.
    config = make_run(tmp_path, name="full", train={**train, "profile": {"steps": [2, 2]}}, **QUIET)
    monkeypatch.setattr(profile.profile, "export_chrome_trace", lambda *_: None)
    train_checked(config)
    lines = "".join(capsys.readouterr())
    assert lines.count("warning: profile: the trace of rank 0 is lost (FileNotFoundError)") == 1
    assert_same_weights(plain, config)


def make_event(name: str, ts: float, dur: float, *, tid: int = 1, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": tid, **more}


def test_a_trace_of_gloo_by_hand() -> None:
    """One step of 1,000 us: x waits 100 us, z is hidden by 200 of 300 us, a save does not count."""
    events = [
        {"ph": "M", "name": "process_name"},
        make_event("memguard step", 5000, 1000, cat="user_annotation"),
        make_event("memguard over x", 5100, 20),
        make_event("c10d::allreduce_", 5105, 10),
        make_event("gloo:all_reduce", 5120, 100, tid=7),
        make_event("FSDP::all_gather (1)", 5300, 40),
        make_event("c10d::_allgather_base_", 5310, 10),
        make_event("c10d::_allgather_base_", 5315, 10, tid=9),
        make_event("gloo:all_gather", 5400, 300, tid=8),
        make_event("gloo:all_gather", 5450, 500, tid=8),
        make_event("aten::mm", 5450, 200),
        # Of another thread.
        make_event("aten::copy_", 5100, 900, tid=9),
        # After the step.
        make_event("c10d::allreduce_", 5990, 1),
        make_event("gloo:all_reduce", 6050, 100, tid=7),
    ]
    own_s, axes = read_trace(events, {})
    seconds = {axis: [round(value * 1e6) for value in row[1:]] for axis, row in axes.items()}
    assert seconds == {"x": [100, 0], "z": [300, 200], "other": [500, 200], "data": [0, 0]}
    assert round(own_s * 1e6) == 1000 - 100 - 50 - 300


def test_a_trace_of_nccl_by_hand() -> None:
    def kernel(name: str, ts: float, dur: float, group: str | None = None) -> dict[str, Any]:
        arguments = {} if group is None else {"Process Group Name": group}
        return make_event(name, ts, dur, tid=20, cat="kernel", args=arguments)

    events = [
        make_event("memguard step", 0, 1000, cat="user_annotation"),
        make_event("aten::mm", 0, 1000),
        kernel("gemm", 100, 300),
        kernel("ncclDevKernel_AllGather", 200, 400, "17"),
        kernel("ncclDevKernel_AllReduce", 700, 100, "18"),
        kernel("ncclDevKernel_AllReduce", 900, 100, "0"),
    ]
    own_s, axes = read_trace(events, {"17": "z", "18": "x"})
    seconds = {axis: [round(value * 1e6) for value in row[1:]] for axis, row in axes.items()}
    assert seconds == {"z": [400, 200], "x": [100, 0], "world": [100, 0]}
    assert round(own_s * 1e6) == 1000 - 200 - 100 - 100
