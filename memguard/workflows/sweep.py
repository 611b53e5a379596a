"""A sweep: its unfinished runs as child processes, then the comparison and its page.

Some run at a time, and they end as one:

    terminal      a run alone has it; of several at a time each has a train.log in its folder
    threads       the machine's cores are shared out, unless OMP_NUM_THREADS is set
    error         told at once; no other run starts, those in flight come to their end
    Ctrl-C, TERM  all in flight save and end, and have the time they need
    a failure     of this process: the same, within two minutes

A child process for each run frees its memory and threads, and one that dies leaves the others.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memguard.compare import (
    Sweep,
    SweepRun,
    build_comparison,
    describe_sweep,
    is_finished,
    mark_finished,
    prepare_folder,
)
from memguard.config import dump_yaml
from memguard.errors import ConfigError, Interrupted, MemguardError
from memguard.records import Comparison, write_atomically
from memguard.runtime import Console, detect_runtime, format_duration
from memguard.workflows.compare_runs import publish
from memguard.workflows.requests import make_command

LOG = "train.log"
_STOPS = (signal.SIGINT, signal.SIGTERM)
_LOOK_EVERY_S = 0.1
_SAVE_WITHIN_S = 120.0
"""What a run may take, once asked to, for the step in hand and its checkpoint."""


class ChildFailed(MemguardError):
    """A setting's process ended with an error; it has said why."""

    def __init__(self, run: SweepRun, code: int, said_in: str) -> None:
        how = f"ended with exit code {code}; {said_in} why"
        if code < 0:
            why = " (out of memory?)" if code == -signal.SIGKILL else ""
            how = f"was ended by {signal.Signals(-code).name}{why}"
        super().__init__(f"{run.name} {how}. Run the same command again: what is finished is kept")
        self.exit_code = code if code > 0 else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Child:
    """A run that was started."""

    run: SweepRun
    title: str
    """Which of how many, and its name."""
    process: "subprocess.Popen[bytes]"
    log: Path | None
    """Where it speaks; None where it has the terminal."""
    start_s: float

    @property
    def stopped_by(self) -> int | None:
        """The signal that ended it, whether it has saved or not."""
        code = self.process.returncode
        return next((number for number in _STOPS if code in (128 + number, -number)), None)


def train_runs(sweep: Sweep, runs: Sequence[SweepRun], *, num_jobs: int, console: Console) -> None:
    """Train and audit some runs of a sweep, and mark each as finished when it is.

    Args:
        sweep: for which of how many a run is.
        runs: in the order in which they start.
        num_jobs: most of them at a time.
        console: says when a run starts and ends.

    Raises:
        ChildFailed: a run did not end well; the first, where several did not.
        Interrupted: a signal stopped them; run the same command again.
    """
    num_jobs = min(num_jobs, len(runs))
    waiting, running, ended = list(runs), list[_Child](), list[_Child]()
    with _passed_on(running) as signals:

        def may_start() -> bool:
            failed = any(child.process.returncode for child in ended)
            return bool(waiting) and not failed and not signals

        try:
            while running or may_start():
                while len(running) < num_jobs and may_start():
                    running.append(_start(sweep, waiting.pop(0), num_jobs, console))
                    # One that came before the child was in the list has not reached it.
                    _pass_on(signals, running[-1:])
                time.sleep(_LOOK_EVERY_S)
                for child in [one for one in running if one.process.poll() is not None]:
                    running.remove(child)
                    ended.append(child)
                    _tell_end(child, console)
        finally:
            _end(running, were_asked=bool(signals))
    _raise_what_happened(ended, waiting, signals)


def _start(sweep: Sweep, run: SweepRun, num_jobs: int, console: Console) -> _Child:
    prepare_folder(run)
    settings = run.folder / "requested.yaml"
    write_atomically(settings, dump_yaml(run.config).encode())
    number, count = 1 + sweep.in_order.index(run), len(sweep.in_order)
    log = run.folder / LOG if num_jobs > 1 else None
    console.info(f"-- {number} of {count}: {run.name} ({log or run.folder})")
    command = [sys.executable, "-m", "memguard", "train", str(settings)]
    if log is None:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    else:
        cores = len(os.sched_getaffinity(0))
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                env={"OMP_NUM_THREADS": str(max(1, cores // num_jobs)), **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
            )
    return _Child(
        run=run,
        title=f"{number} of {count}: {run.name}",
        process=process,
        log=log,
        start_s=time.monotonic(),
    )


@contextmanager
def _passed_on(running: list[_Child]) -> Iterator[list[int]]:
    """Pass signals on to those in flight; yield the list of what came."""
    signals: list[int] = []

    def handle(number: int, _frame: object) -> None:
        signals.append(number)
        _pass_on([number], running)

    before = {number: signal.signal(number, handle) for number in _STOPS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(signals: Sequence[int], children: Sequence[_Child]) -> None:
    # A terminal's Ctrl-C reaches the children by itself; a signal sent to this process does not.
    for number in signals:
        if number == signal.SIGTERM or not _is_in_foreground():
            for child in children:
                child.process.send_signal(number)


def _is_in_foreground() -> bool:
    """Tell whether a terminal sends its Ctrl-C to this process and its children."""
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _end(children: Sequence[_Child], *, were_asked: bool) -> None:
    """Let those save that are still at work though this process has failed.

    Args:
        children: in flight.
        were_asked: whether a signal was passed on to them; a second one would end them at once.
    """
    if not were_asked:
        for child in children:
            child.process.terminate()
    deadline_s = time.monotonic() + _SAVE_WITHIN_S
    for child in children:
        try:
            child.process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def _tell_end(child: _Child, console: Console) -> None:
    code = child.process.returncode
    if code == 0:
        mark_finished(child.run.folder, child.run.key)
    if child.log is None:  # It has said so itself.
        return
    took = format_duration(time.monotonic() - child.start_s)
    if code == 0:
        console.info(f"-- {child.title} is finished ({took})")
    elif child.stopped_by:
        console.info(f"-- {child.title} has stopped ({took})")
    else:
        console.warn(f"{child.title} has failed ({took}; {child.log}); those in flight go on")


def _raise_what_happened(
    ended: Sequence[_Child], waiting: Sequence[SweepRun], signals: Sequence[int]
) -> None:
    stopped = [child for child in ended if child.stopped_by]
    for child in ended:
        if child.process.returncode and not child.stopped_by:
            said_in = "the lines above say" if child.log is None else f"'{child.log}' says"
            raise ChildFailed(child.run, child.process.returncode, said_in)
    again = "run the same command again to go on"
    if stopped:
        names = ", ".join(child.run.name for child in stopped)
        number = stopped[0].stopped_by
        assert number is not None, "a child that was stopped has the signal"
        raise Interrupted(number, f"stopped in {names}; {again}")
    if waiting:
        raise Interrupted(signals[-1], f"stopped before {waiting[0].name}; {again}")


def run_sweep(sweep: Sweep, *, num_jobs: int) -> tuple[Path, Comparison]:
    """Train and audit what is not finished, then compare.

    Args:
        sweep: what to train.
        num_jobs: runs at a time; 'pretrain' is always alone.

    Returns:
        The comparison's page, and the comparison.

    Raises:
        ConfigError: several jobs where there is a GPU.
        ChildFailed: a run did not end well.
        Interrupted: a signal stopped it; run the same command again.
        RecordError: the runs cannot be compared.
    """
    if num_jobs > 1 and detect_runtime().device.type == "cuda":
        raise ConfigError(
            f"'--jobs' must be 1 where there is a GPU, which all runs would share; got {num_jobs}. "
            "Leave it out, or train on the CPU: CUDA_VISIBLE_DEVICES= memguard compare ..."
        )
    console = Console()
    for line in describe_sweep(sweep):
        console.info(line)
    for stage in (sweep.in_order[: -len(sweep.runs)], sweep.runs):
        left = [run for run in stage if not is_finished(run)]
        train_runs(sweep, left, num_jobs=num_jobs, console=console)
    comparison = build_comparison(sweep, command=make_command())
    return publish(comparison, sweep.folder, console), comparison
