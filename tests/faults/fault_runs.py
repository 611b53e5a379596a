"""Runs of a second that the faults are put into, and what such a run must end with.

write_settings    `run.yaml` and documents; all paths are relative, so that copies are alike
read_result       weights, scores, rows and card of a run that has ended
check_ended       the same as the run that nothing happened to, whole, with nothing left over
start_command     `memguard ...` as a fork of a process that has torch already
said_once         one line in the end, and never a traceback
"""

import contextlib
import ctypes
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NoReturn
from unittest import mock

import pyarrow.parquet as pq
from cli_examples import (
    Outcome,
    make_texts,
    read_json,
    run_cli,
    save_tiny_model,
    write_jsonl,
    write_texts,
)
from ranks import RankPool
from tiny_llama import TINY_LLAMA

RUN = Path("runs") / "run"
Variant = Literal["scratch", "tuned", "private"]
# The time, how long things took and on how many processes: what may differ between two runs.
_PASSING = {"created", "command", "wall_s", "train_s", "environment", "audit_s", "starts"}
# What is being done, said before a wait; and what goes on all the same.
_PROGRESS = re.compile(
    r"(plan|prepare|train|audit|compare|documents|tokenizer|model|verify|canaries|time): "
    r"|held-out loss|step \d|resuming after|(memguard: )?warning: "
)


def write_settings(folder: Path, variant: Variant = "scratch") -> None:
    """Write `run.yaml` and what it reads: six steps, saved after every other one.

    Args:
        folder: where.
        variant: a model from nothing; one that is tuned, watched and compared with what it was; or
            one that is trained with noise, which is derived from the identity key.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder / "documents.jsonl", 27, words=30)
    changes: dict[str, Any] = {"model": {"scratch": {"config": TINY_LLAMA, "vocab_size": 300}}}
    train = {"epochs": 2, "batch_size": 8, "checkpoint_every_steps": 2}
    data = {"train": "documents.jsonl", "seq_len": 128}
    if variant == "tuned":
        save_tiny_model(folder / "model")
        changes = {"model": {"path": "model"}, "mitigations": [{"name": "npo"}]}
        train |= {"audit_every_steps": 3}
        for seed, name in enumerate(("forget", "control"), 1):
            texts = make_texts(4, words=30, seed=seed)
            rows = [{"id": f"{name}-{n}", "text": text} for n, text in enumerate(texts)]
            write_jsonl(folder / f"{name}.jsonl", rows)
        data |= {"forget": "forget.jsonl", "control": "control.jsonl"}
    if variant == "private":
        changes["mitigations"] = [{"name": "dp_sgd", "noise_multiplier": 0.5}]
    values = {
        "name": "run",
        "output_dir": "runs",
        "seed": 3,
        "data": data,
        "optim": {"lr": 3e-3},
        "train": train,
        "audit": {"suite": "extraction", "continuation_tokens": 8},
        **changes,
    }
    (folder / "run.yaml").write_text(json.dumps(values, indent=2))


def say(folder: Path, *arguments: object) -> Outcome:
    """Run `memguard ARGUMENTS` in this process, in a folder whose `cache/` keeps the scores."""
    with contextlib.chdir(folder), mock.patch.dict(os.environ, environment(folder)):
        return run_cli(*arguments)


def environment(folder: Path) -> dict[str, str]:
    """Return what commands in `folder` are given: a cache of their own, and a fixed time."""
    # A card tells the moment of its audit.
    return {"MEMGUARD_CACHE": str(folder / "cache"), "SOURCE_DATE_EPOCH": "1700000000"}


def start_command(
    ranks: RankPool,
    folder: Path,
    log: Path,
    arguments: Sequence[object],
    prepare: Callable[..., None] | None = None,
    *given: Any,
) -> BaseProcess:
    """Start `memguard ARGUMENTS` as a fork in a process group of its own; the caller waits.

    Args:
        ranks: whose server is forked.
        folder: where it runs.
        log: takes what it says.
        arguments: of the command.
        prepare: called first, in the new process, with what is ``given``.
        given: for ``prepare``.
    """
    words = [str(argument) for argument in arguments]
    process = ranks.start(_run_command, folder, log, words, prepare, given)
    assert process.pid is not None
    return process


def _run_command(
    folder: Path,
    log: Path,
    arguments: list[str],
    prepare: Callable[..., None] | None,
    given: Sequence[Any],
) -> None:
    os.setpgid(0, 0)
    # The tests' process may be killed itself.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.chdir(folder)
    os.environ.update(environment(folder))
    _write_to(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    if prepare is not None:
        prepare(*given)
    from memguard.runtime import children

    children.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=ForkedRank, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    run_main(arguments)


def _write_to(handle: int) -> None:
    for standard in (1, 2):
        os.dup2(handle, standard)


def run_main(arguments: Sequence[str]) -> None:
    """Be `memguard ARGUMENTS`; ends this process."""
    sys.argv = ["memguard", *arguments]
    from memguard.cli import main

    main()


def exit_as_main(arguments: Sequence[str]) -> NoReturn:
    """Be `memguard ARGUMENTS` in a fork, which then does nothing of what its parent ends with."""
    try:
        run_main(arguments)
    except SystemExit as stop:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(stop.code if isinstance(stop.code, int) else 1)
    finally:
        os._exit(1)


class ForkedRank:
    """What the launcher uses of `subprocess.Popen`: a rank that is a fork of the launcher."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        preexec_fn: Callable[[], None],
        stdout: Any,
        pass_fds: Sequence[int],
        stdin: int | None = None,
        stderr: Any = None,
    ) -> None:
        """Fork; everything open is passed on, and nobody looks at what stands in ``pass_fds``."""
        assert command[1:3] == ["-m", "memguard"]
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            preexec_fn()
            os.environ.clear()
            os.environ.update(env)
            if stdout is not None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if stderr is not None:
                os.dup2(stderr.fileno(), 2)
            exit_as_main(command[3:])
        finally:
            os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("memguard", timeout)
            time.sleep(0.001)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What must not depend on what happened on the way."""

    weights: str
    report: Any
    rows: list[dict[str, Any]]
    card: str
    tally: list[Any]


def read_result(run: Path) -> Result:
    """Read what a run has ended with."""
    rows = pq.read_table(run / "audit" / "records.parquet").to_pylist()
    report = read_json(run / "audit" / "report.json")
    # The end of an absolute path, which is another one for each copy.
    report["model"]["base"] = report["model"]["base"] and Path(report["model"]["base"]).name
    lines = (run / "manifest.jsonl").read_text().splitlines()
    return Result(
        weights=hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest(),
        report=_lasting(report, _PASSING),
        rows=_lasting(rows, _PASSING),
        card=(run / "model" / "README.md").read_text(),
        tally=_lasting([json.loads(line) for line in lines], _PASSING),
    )


def _lasting(value: Any, passing: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(each, passing) for key, each in value.items() if key not in passing}
    return [_lasting(each, passing) for each in value] if isinstance(value, list) else value


def check_ended(folder: Path, expected: Result) -> None:
    """Fail unless the run of `folder` is whole and ended as ``expected``."""
    run = folder / RUN
    found = read_result(run)
    for part in ("weights", "tally", "rows", "report", "card"):
        assert getattr(found, part) == getattr(expected, part), f"{part} differ"
    assert (run / "audit" / "report.html").read_text().rstrip().endswith("</html>")
    assert find_leftovers(run) == []
    verified = say(folder, "verify", RUN)
    assert verified.code == 0, verified


def find_leftovers(run: Path) -> list[str]:
    """Return what begins with a dot and is neither the lock nor torch's own."""
    return [
        str(path.relative_to(run))
        for path in run.rglob(".*")
        if path.name not in (".lock", ".metadata")
    ]


def list_refusals(said: str) -> list[str]:
    """Return the lines of standard error that neither tell of progress nor warn."""
    return [line for line in said.splitlines() if not _PROGRESS.match(line)]


def said_once(said: str, code: int) -> bool:
    """Tell whether a command that failed said why in one line, with an exit code that fits."""
    lines = list_refusals(said)
    return 1 <= code <= 3 and len(lines) == 1 and "bug in memguard" not in lines[0]


def find_group(group: int) -> list[int]:
    """Return the processes of a group that still run; those that are dead but not buried do not.

    A process runs as long as one of its threads does: until then it keeps its files, and so a lock.
    """
    running = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                _, _, pgrp = _read_status(entry)
                if int(pgrp) != group:
                    continue
                states = [_read_status(thread)[0] for thread in (entry / "task").iterdir()]
            except OSError:
                continue
            if any(state not in "ZX" for state in states):
                running.append(int(entry.name))
    return running


def _read_status(entry: Path) -> list[str]:
    """Return state, parent and process group."""
    # After the name, which may hold anything.
    return (entry / "stat").read_text().rpartition(")")[2].split()[:3]
