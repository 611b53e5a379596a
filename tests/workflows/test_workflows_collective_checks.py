"""Collectives of real ranks, and how their reports are read."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import distributed as dist

from memguard.runtime import Runtime
from memguard.workflows import collective_checks
from memguard.workflows.collective_checks import (
    DTYPES,
    OPERATIONS,
    check_backend,
    merge_states,
    run_check,
)

pytestmark = pytest.mark.slow


def check_all(broken: str | None = None) -> dict[str, str]:
    """Run on each rank: every check of this rank's group."""
    runtime = Runtime(rank=dist.get_rank(), world_size=dist.get_world_size())
    if broken is not None and runtime.rank == 1:
        run, expected = OPERATIONS[broken]
        OPERATIONS[broken] = (lambda *given: run(*given) + 1), expected
    results = {}
    for operation in OPERATIONS:
        for dtype in DTYPES:
            name = f"{operation}:{dtype}"
            try:
                results[name] = run_check(name, runtime)
            except RuntimeError as error:
                results[name] = str(error)
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_gloo_does_what_memguard_needs(ranks: RankPool, size: int) -> None:
    for results in ranks(check_all, size):
        for operation, dtypes in collective_checks._NEEDED.items():
            for dtype in dtypes:
                assert results[f"{operation}:{dtype}"] == "", (operation, dtype)
        # A mean of whole numbers does not exist.
        assert "can't be cast" in results["reduce-scatter mean:int64"]


@pytest.mark.quick
def test_a_wrong_result_is_noticed(ranks: RankPool) -> None:
    first, second = ranks(check_all, 2, "all-gather")
    assert second["all-gather:fp32"] == "the result is wrong"
    assert first["all-gather:fp32"] == second["all-reduce:fp32"] == ""


def test_what_is_needed_is_checked() -> None:
    for needed in collective_checks._NEEDED_OF.values():
        assert {*needed} <= {*OPERATIONS}
        assert {dtype for dtypes in needed.values() for dtype in dtypes} <= {*DTYPES}


def line(state: str, reason: str = "") -> dict[str, Any]:
    return {"state": state, "reason": reason}


@pytest.mark.parametrize(
    ("lines", "result"),
    [
        ([line("ok"), line("ok")], ("ok", "")),
        ([line("ok"), line("wrong", "the result is wrong")], ("wrong", "the result is wrong")),
        (
            [line("failed", "[x.cpp:1] Invalid scalar type"), line("failed", "Invalid")],
            ("not supported", "Invalid scalar type"),
        ),
        ([line("hung", "no answer in 9 s"), line("ok")], ("hung", "no answer in 9 s")),
        # One rank refused, so that the other waited.
        ([line("hung", "no answer"), line("failed", "no bf16")], ("hung", "no bf16")),
        ([line("begun"), line("ok")], ("hung", "a process ended before its answer")),
        ([None, line("begun")], ("hung", "a process ended before its answer")),
    ],
)
def test_the_worst_rank_decides(lines: list[Any], result: tuple[str, str]) -> None:
    assert merge_states(lines) == result


_FAULTY_RANK = """
import os, sys, time
from pathlib import Path
from memguard.workflows import collective_checks as checks

def hang(piece, rank, size):
    time.sleep(600)

def end(piece, rank, size):
    os._exit(7)

if os.environ["RANK"] == "1":
    for name, fault in (("broadcast", hang), ("all-gather", end)):
        checks.OPERATIONS[name] = fault, checks.OPERATIONS[name][1]
_, folder, limit_s, *names = sys.argv
checks._run_checks(Path(folder), float(limit_s), names)
os._exit(0)
"""


@pytest.mark.long
def test_a_collective_that_hangs_or_ends_a_rank_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(_FAULTY_RANK)
    monkeypatch.setattr(collective_checks, "_COMMAND", (sys.executable, str(script)))
    kept = {"all-reduce", "all-gather", "broadcast", "send/recv"}
    monkeypatch.setattr(
        collective_checks,
        "OPERATIONS",
        {name: each for name, each in OPERATIONS.items() if name in kept},
    )
    monkeypatch.setattr(collective_checks, "DTYPES", {"fp32": torch.float32})
    backend = check_backend("gloo", 2, limit_s=6)
    assert backend.reason is None
    states = {check.operation: check.state for check in backend.checks}
    # New ranks have run what was left.
    assert states == {
        "all-reduce": "ok",
        "all-gather": "hung",
        "broadcast": "hung",
        "send/recv": "ok",
    }
    reasons = {check.operation: check.reason for check in backend.checks}
    assert reasons["broadcast"] == "no answer in 6 s"


def test_why_ranks_do_not_connect_is_reported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    backend = check_backend("gloo", 2, limit_s=6)
    assert backend.reason == (
        "the processes did not connect: Unable to find address for: nope0. GLOO_SOCKET_IFNAME may "
        "name the network interface to use, such as lo"
    )
    assert "Traceback" not in capfd.readouterr().err


def test_a_report_has_a_line_before_and_after_a_check(tmp_path: Path) -> None:
    report = collective_checks._Report(tmp_path / "0.jsonl")
    report.begin("a", 60)
    report.end("a", "ok")
    report.begin("b", 60)
    assert report._timer is not None
    report._timer.cancel()
    lines = [json.loads(text) for text in (tmp_path / "0.jsonl").read_text().splitlines()]
    assert [(each["check"], each["state"]) for each in lines] == [
        ("a", "begun"),
        ("a", "ok"),
        ("b", "begun"),
    ]
