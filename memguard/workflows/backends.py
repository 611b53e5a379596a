"""Which collectives each backend really does here: starts ranks, and reads what they report.

    gloo    ranks of the CPU
    nccl    one rank for each GPU, if there are at least two

`collective_checks` runs in the ranks. Where a collective hangs or ends a rank, it is reported and
new ranks are started for the checks that are left.
"""

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from memguard.records.record import Record
from memguard.workflows.collective_checks import DTYPES, OPERATIONS, START, name_check
from memguard.workflows.common.launch import launch

State = Literal["ok", "not supported", "wrong", "hung", "not tested"]

LIMIT_S = 15.0
"""Longest wait for a collective (seconds)."""
_COMMAND = (sys.executable, "-m", "memguard.workflows.collective_checks")
_WAYS_OUT = {
    "gloo": ". GLOO_SOCKET_IFNAME may name the network interface to use, such as lo",
    "nccl": ". NCCL_DEBUG=INFO shows what NCCL tried",
}
_MAX_STARTS = 4
_MAX_REASON = 160
_WORST_FIRST = ("hung", "wrong", "failed", "ok")

# What training and audits send. Weights and gradients are in fp32, or on GPUs in bf16; counts and
# norms in fp64 and int64; objects as uint8.
_NEEDED: dict[str, tuple[str, ...]] = {
    "all-reduce": ("fp32", "fp64", "int64"),
    "all-reduce max": ("fp32", "int64"),
    "all-gather": ("fp32", "int64", "uint8"),
    "reduce-scatter": ("fp32",),
    "broadcast": ("int64", "uint8"),
    "send/recv": ("fp32",),
}
_NEEDED_ON_GPUS: dict[str, tuple[str, ...]] = {
    "all-reduce": ("fp32", "fp64", "bf16"),
    "all-reduce max": ("fp32",),
    "all-gather": ("fp32", "bf16"),
    "reduce-scatter": ("fp32", "bf16"),
    "reduce-scatter mean": ("fp32",),
    "send/recv": ("fp32", "bf16"),
}
_NEEDED_OF: dict[str, dict[str, tuple[str, ...]]] = {"gloo": _NEEDED, "nccl": _NEEDED_ON_GPUS}


class Check(Record):
    """One collective with one dtype."""

    operation: str
    dtype: str
    state: State
    reason: str | None
    """null if it is ok."""
    is_needed: bool
    """Whether memguard uses it."""


class Backend(Record):
    """A backend, and its collectives."""

    name: Literal["gloo", "nccl"]
    num_ranks: int
    """0 if no ranks were started."""
    reason: str | None
    """Why nothing could be tested; null if the ranks have connected."""
    checks: tuple[Check, ...]


def check_backend(name: Literal["gloo", "nccl"], num_ranks: int, *, limit_s: float) -> Backend:
    """Run all checks on new ranks.

    Args:
        name: the backend; ranks of gloo see no GPU.
        num_ranks: number of processes, at least 2.
        limit_s: longest wait for one collective.
    """
    checks = [(operation, dtype) for operation in OPERATIONS for dtype in DTYPES]
    states: dict[str, tuple[State, str]] = {}
    left = [name_check(*check) for check in checks]
    reason: str | None = None
    for _ in range(_MAX_STARTS):
        ranks = _run_ranks(name, num_ranks, left, limit_s)
        start = merge_states([rank.get(START) for rank in ranks])
        if start[0] != "ok":
            reason = f"the processes did not connect: {start[1]}{_WAYS_OUT[name]}"
            break
        for check in left:
            lines = [rank.get(check) for rank in ranks]
            if any(line is not None for line in lines):
                states[check] = merge_states(lines)
        left = [check for check in left if check not in states]
        if not left:
            break
    untested = reason or f"ranks were started {_MAX_STARTS} times, and hung or ended before it"
    return Backend(
        name=name,
        num_ranks=num_ranks,
        # Later ranks may fail to connect after a collective that hung.
        reason=None if states else reason,
        checks=tuple(
            _make_check(name, check, states.get(name_check(*check), ("not tested", untested)))
            for check in checks
        ),
    )


def skip_backend(name: Literal["gloo", "nccl"], reason: str) -> Backend:
    """Return a backend that cannot be tested on this machine."""
    return Backend(name=name, num_ranks=0, reason=reason, checks=())


def _make_check(backend: str, check: tuple[str, str], result: tuple[State, str]) -> Check:
    operation, dtype = check
    state, reason = result
    return Check(
        operation=operation,
        dtype=dtype,
        state=state,
        reason=reason or None,
        is_needed=dtype in _NEEDED_OF[backend].get(operation, ()),
    )


_Line = Mapping[str, Any]


def _run_ranks(
    name: str, num_ranks: int, checks: Sequence[str], limit_s: float
) -> list[dict[str, _Line]]:
    """Start ranks and return the last line of each check, for each rank."""
    with tempfile.TemporaryDirectory(prefix="memguard-doctor-") as folder:
        command = [*_COMMAND, folder, str(limit_s), *checks]
        if name == "gloo":
            command = ["env", "CUDA_VISIBLE_DEVICES=", *command]
        launch(command, num_ranks)
        return [_read_lines(Path(folder) / f"{rank}.jsonl") for rank in range(num_ranks)]


def _read_lines(path: Path) -> dict[str, _Line]:
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["check"]: line for line in lines}


def merge_states(lines: Sequence[_Line | None]) -> tuple[State, str]:
    """Return the result of a check from the last line of each rank; None for a rank without one."""
    ended = [line for line in lines if line is not None and line["state"] != "begun"]
    if not ended or (len(ended) < len(lines) and all(line["state"] == "ok" for line in ended)):
        return "hung", "a process ended before its answer"
    worst = min(ended, key=lambda line: _WORST_FIRST.index(line["state"]))
    if worst["state"] == "hung":
        # A rank that refused lets the others wait; its reason says more.
        refused = next((line for line in ended if line["state"] == "failed"), None)
        return "hung", _shorten((refused or worst)["reason"])
    if worst["state"] == "failed":
        return "not supported", _shorten(worst["reason"])
    return worst["state"], worst["reason"]


def _shorten(reason: str) -> str:
    """Return a backend's message without its source line and its list of symbols."""
    text = re.sub(r"^\[[^\]]*\]\s*(\w+ != nullptr\. )?", "", reason)
    return text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON - 3]}..."
