"""Which collectives gloo and NCCL really do here: each with each dtype, compared exactly.

    gloo    ranks of the CPU
    nccl    one rank for each GPU, if there are at least two

`check_backend` starts ranks, which run this module, and reads what they report:

    python -m memguard.workflows.collective_checks FOLDER LIMIT_S CHECK...

Each rank appends one line of JSON to FOLDER/RANK.jsonl before a check and
one after it, so that the last line tells what a rank that ends was doing. A rank without an answer
within the limit ends itself. All ranks agree on the result of each check before the next one: after
a lost message the process group is not used again, and new ranks are started for the checks that
are left.

Values are small whole numbers, exact in every dtype: results are equal or wrong.
"""

import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from memguard.parallel.collectives import all_gather, all_reduce, wait
from memguard.parallel.mesh import world_axis
from memguard.records.record import Record
from memguard.runtime import Runtime, start_runtime
from memguard.workflows.common.launch import launch

_ops = torch.ops._c10d_functional

START = "start"
"""Name of the first check: the ranks connect."""
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
_NUM_ELEMENTS = 6
"""Elements of each rank's piece."""
_START_LIMIT_S = 120.0
_GRACE_S = 3.0
"""The backend's own limit is this much shorter: its message says what was lost."""


def _reduce_scatter(piece: Tensor, rank: int, size: int, op: str = "sum") -> Tensor:
    started = _ops.reduce_scatter_tensor(piece.repeat(size), op, size, world_axis().group_name)
    return wait(started)


def _reduce_scatter_mean(piece: Tensor, rank: int, size: int) -> Tensor:
    # The mean of multiples of the number of ranks is a whole number.
    return _reduce_scatter(piece * size, rank, size, "avg")


def _broadcast(piece: Tensor, rank: int, size: int) -> Tensor:
    received = piece.clone()
    dist.broadcast(received, src=size - 1)
    return received


def _send_receive(piece: Tensor, rank: int, size: int) -> Tensor:
    received = torch.zeros_like(piece)
    # Rank 0 sends first, so that a send that waits for its receiver ends.
    if rank > 0:
        dist.recv(received, src=rank - 1)
    dist.send(piece, dst=(rank + 1) % size)
    if rank == 0:
        dist.recv(received, src=size - 1)
    return received


_Operation = Callable[[Tensor, int, int], Tensor]
_Expected = Callable[[list[Tensor], int], Tensor]
OPERATIONS: dict[str, tuple[_Operation, _Expected]] = {
    "all-reduce": (
        lambda piece, *_: all_reduce(piece, world_axis()),
        lambda pieces, rank: _sum(pieces),
    ),
    "all-reduce max": (
        lambda piece, *_: all_reduce(piece, world_axis(), "max"),
        lambda pieces, rank: pieces[-1],
    ),
    "all-gather": (
        lambda piece, *_: all_gather(piece, world_axis()),
        lambda pieces, rank: torch.cat(pieces),
    ),
    "reduce-scatter": (_reduce_scatter, lambda pieces, rank: _sum(pieces)),
    "reduce-scatter mean": (_reduce_scatter_mean, lambda pieces, rank: _sum(pieces)),
    "broadcast": (_broadcast, lambda pieces, rank: pieces[-1]),
    "send/recv": (_send_receive, lambda pieces, rank: pieces[rank - 1]),
}
"""The collectives that memguard uses, and their results from the pieces of all ranks."""


def _sum(pieces: list[Tensor]) -> Tensor:
    return torch.stack([piece.to(torch.int64) for piece in pieces]).sum(0)


def run_check(name: str, runtime: Runtime) -> str:
    """Run a check, ``OPERATION:DTYPE``, on this rank; return what is wrong, "" if nothing."""
    operation, _, dtype = name.partition(":")
    run, expect = OPERATIONS[operation]
    size, rank = runtime.world_size, runtime.rank
    # The piece of a rank is 1, 2, ... plus three times its rank.
    numbers = torch.arange(1, _NUM_ELEMENTS + 1)
    pieces = [(numbers + 3 * each).to(runtime.device, DTYPES[dtype]) for each in range(size)]
    result = run(pieces[rank], rank, size).cpu()
    expected = expect([piece.cpu() for piece in pieces], rank)
    # Reading the result waits for the device.
    return "" if torch.equal(result, expected.to(result.dtype)) else "the result is wrong"


def say_first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class _Report:
    """The lines of one rank, and the limit of the check that runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._timer: threading.Timer | None = None

    def begin(self, check: str, limit_s: float) -> None:
        """Write that a check begins; end this process if it takes longer than the limit."""
        self._write({"check": check, "state": "begun"})
        self._timer = threading.Timer(limit_s, self._give_up, [check, limit_s])
        self._timer.daemon = True
        self._timer.start()

    def end(self, check: str, state: str, reason: str = "") -> None:
        """Write the result of a check."""
        assert self._timer is not None, "a check ends after it has begun"
        self._timer.cancel()
        self._write({"check": check, "state": state, "reason": reason})

    def _give_up(self, check: str, limit_s: float) -> None:
        self._write({"check": check, "state": "hung", "reason": f"no answer in {limit_s:g} s"})
        os._exit(0)  # Threads of the backend may wait forever.

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _run_checks(folder: Path, limit_s: float, names: list[str]) -> None:
    report = _Report(folder / f"{os.environ['RANK']}.jsonl")
    report.begin(START, _START_LIMIT_S)
    backend_limit_s = max(1.0, limit_s - _GRACE_S)
    with ExitStack() as stack:
        try:
            runtime = stack.enter_context(start_runtime(timedelta(seconds=backend_limit_s)))
            runtime.barrier()
        except Exception as error:
            report.end(START, "failed", say_first_line(error))
            os._exit(1)  # The launcher ends the others, which wait for this rank.
        report.end(START, "ok")
        for name in names:
            report.begin(name, limit_s)
            begun_s = time.monotonic()
            try:
                reason = run_check(name, runtime)
                state = "wrong" if reason else "ok"
            except Exception as error:
                is_late = time.monotonic() - begun_s >= 0.9 * backend_limit_s
                state, reason = "hung" if is_late else "failed", say_first_line(error)
            is_over = runtime.agree_any(state == "hung")
            report.end(name, state, reason)
            if is_over:
                os._exit(0)  # The group lost a message, so that the next one would be misread.


# -- what starts the ranks ------------------------------------------------------------------------

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
    """Run all checks on new ranks, at least 2; those of gloo see no GPU."""
    checks = [(operation, dtype) for operation in OPERATIONS for dtype in DTYPES]
    states: dict[str, tuple[State, str]] = {}
    left = [f"{operation}:{dtype}" for operation, dtype in checks]
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
            Check(
                operation=operation,
                dtype=dtype,
                state=state,
                reason=why or None,
                is_needed=dtype in _NEEDED_OF[name].get(operation, ()),
            )
            for operation, dtype in checks
            for state, why in [states.get(f"{operation}:{dtype}", ("not tested", untested))]
        ),
    )


def skip_backend(name: Literal["gloo", "nccl"], reason: str) -> Backend:
    """Return a backend that cannot be tested on this machine."""
    return Backend(name=name, num_ranks=0, reason=reason, checks=())


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


if __name__ == "__main__":
    _, folder, limit_s, *names = sys.argv
    _run_checks(Path(folder), float(limit_s), names)
    sys.stdout.flush()
    # As in `memguard.cli`: the threads of gloo outlive their groups.
    os._exit(0)
