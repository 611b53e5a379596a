"""Trains the unfinished runs of a sweep as child processes, then writes the comparison.

Up to `num_jobs` runs are trained at the same time:

    terminal      a single run writes to it; each of several runs writes to its own train.log, and
                  has a row, or without a terminal a line now and then, of what it does
    threads       the cores are divided among the runs, unless OMP_NUM_THREADS is set
    error         reported immediately; no other run starts, and running ones finish
    Ctrl-C, TERM  all running ones save a checkpoint and exit; there is no time limit
    own failure   if this process fails, the same, within two minutes

Each run is a child process, so that its memory and threads are released at its end, and a crash
does not affect the others.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from memguard.compare import (
    Sweep,
    SweepRun,
    compare_runs,
    describe_sweep,
    is_finished,
    list_finished,
    mark_finished,
    prepare_folder,
)
from memguard.config import dump_yaml
from memguard.errors import ConfigError, Interrupted, MemguardError
from memguard.records import Comparison, write_atomically
from memguard.runtime import Console, detect_runtime, format_duration
from memguard.runtime.children import (
    describe_kill,
    end_children,
    find_stop_signal,
    share_cores,
    signals_handled,
    start_child,
)
from memguard.runtime.console import Rows
from memguard.train.metrics import StepMetrics
from memguard.workflows.auditing.pages import link_reports
from memguard.workflows.common.checks import make_command
from memguard.workflows.compare_runs import publish

LOG = "train.log"
_LOOK_EVERY_S = 0.1
_SHOW_EVERY_S = 0.5
_SAVE_WITHIN_S = 120.0
"""Time for a run to finish its step and save a checkpoint after it was told to stop."""
_TAIL_BYTES = 16_384
_WIDE = 110
"""Columns of a terminal that has room for all numbers of a step."""
_MOST_OF_NAME = 22


def run_sweep(sweep: Sweep, *, num_jobs: int) -> tuple[Path, Comparison]:
    """Train and audit the unfinished runs, then compare all runs."""
    if num_jobs > 1 and detect_runtime().device.type == "cuda":
        raise ConfigError(
            f"'--jobs' must be 1 on a machine with a GPU, which all runs would share; got "
            f"{num_jobs}. Leave it out, or train on the CPU: CUDA_VISIBLE_DEVICES= memguard "
            "compare ..."
        )
    console = Console()
    for line in describe_sweep(sweep):
        console.info(line)
    for stage in (sweep.in_order[: -len(sweep.runs)], sweep.runs):
        left = [run for run in stage if not is_finished(run)]
        train_runs(sweep, left, num_jobs=num_jobs, console=console)
    with console.phase("comparison"):
        runs, command, utility = list_finished(sweep), make_command(), sweep.config.utility
        comparison = compare_runs(runs, name=sweep.name, command=command, utility=utility)
        published = publish(comparison, runs, sweep.folder, console)
        link_reports((run.folder for run in sweep.in_order), console.warn)
    return published


class ChildFailed(MemguardError):
    """The process of a run failed; it has reported the reason."""

    def __init__(self, run: SweepRun, code: int, reported_in: str) -> None:
        how = f"failed with exit code {code}; see {reported_in} for the reason"
        if code < 0:
            how = describe_kill(code)
        super().__init__(f"{run.name} {how}. Run the same command again: finished runs are kept")
        self.exit_code = code if code > 0 else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Child:
    """A started run."""

    run: SweepRun
    title: str
    """Number of the run, total number of runs, and its name."""
    process: "subprocess.Popen[bytes]"
    log: Path | None
    """File of its output; None if it writes to the terminal."""
    log_start: int
    """Size of that file when the run was started (bytes)."""
    start_s: float

    @property
    def stopped_by(self) -> int | None:
        """The signal that ended it, whether or not it saved a checkpoint."""
        return find_stop_signal(self.process.returncode)


def train_runs(sweep: Sweep, runs: Sequence[SweepRun], *, num_jobs: int, console: Console) -> None:
    """Train and audit some runs of a sweep, and mark each as finished at its end."""
    num_jobs = min(num_jobs, len(runs))
    waiting, running, ended = list(runs), list[_Child](), list[_Child]()
    shown = console.rows() if _has_logs(num_jobs, console) else nullcontext()
    shown_s = time.monotonic()
    with _passed_on(running) as signals, shown as rows:

        def may_start() -> bool:
            failed = any(child.process.returncode for child in ended)
            return bool(waiting) and not failed and not signals

        try:
            while running or may_start():
                while len(running) < num_jobs and may_start():
                    running.append(_start(sweep, waiting.pop(0), num_jobs, console))
                    # Signals that arrived before the child was in the list have not reached it.
                    _pass_on(signals, running[-1:])
                time.sleep(_LOOK_EVERY_S)
                for child in [child for child in running if child.process.poll() is not None]:
                    running.remove(child)
                    ended.append(child)
                    if rows is not None:
                        rows.remove(child.run.name)
                    _report_end(child, console)
                if rows is not None and time.monotonic() - shown_s >= _SHOW_EVERY_S:
                    shown_s = time.monotonic()
                    _show(running, rows, console)
        finally:
            # Children still run only if this process failed. They save a checkpoint; a second
            # signal would end them immediately.
            processes = [child.process for child in running]
            end_children(processes, terminate=not signals, within_s=_SAVE_WITHIN_S)
    _raise_what_happened(ended, waiting, signals)


def _start(sweep: Sweep, run: SweepRun, num_jobs: int, console: Console) -> _Child:
    prepare_folder(run)
    settings = run.folder / "requested.yaml"
    write_atomically(settings, dump_yaml(run.config).encode())
    title = f"{1 + sweep.in_order.index(run)} of {len(sweep.in_order)}: {run.name}"
    log = run.folder / LOG if _has_logs(num_jobs, console) else None
    console.info(f"-- {title} ({log or run.folder})")
    log_start = log.stat().st_size if log is not None and log.exists() else 0
    command = [sys.executable, "-m", "memguard", "train", str(settings)]
    shared = None if num_jobs == 1 else {**share_cores(num_jobs), **os.environ}
    process = start_child(command, log, environment=shared)
    return _Child(
        run=run,
        title=title,
        process=process,
        log=log,
        log_start=log_start,
        start_s=time.monotonic(),
    )


def _has_logs(num_jobs: int, console: Console) -> bool:
    """Return whether runs write to files: several at a time, or in a notebook."""
    return num_jobs > 1 or console.in_notebook


def _show(running: Sequence[_Child], rows: Rows, console: Console) -> None:
    """Show what each run does."""
    for child in running:
        assert child.log is not None, "runs with rows have logs"
        progress = read_progress(child.run.folder, child.log, child.log_start)
        show_run(rows, child.run.name, progress, console.width)


@contextmanager
def _passed_on(running: list[_Child]) -> Iterator[list[int]]:
    """Forward signals to the running children; yield the list of received signals."""
    signals: list[int] = []

    def handle(number: int, _frame: object) -> None:
        signals.append(number)
        _pass_on([number], running)

    with signals_handled(handle):
        yield signals


def _pass_on(signals: Sequence[int], children: Sequence[_Child]) -> None:
    # A terminal's Ctrl-C reaches the children by itself; a signal sent to this process does not.
    for number in signals:
        if number == signal.SIGTERM or not _is_in_foreground():
            for child in children:
                child.process.send_signal(number)


def _is_in_foreground() -> bool:
    """Return whether a terminal sends its Ctrl-C to this process and its children."""
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _report_end(child: _Child, console: Console) -> None:
    code = child.process.returncode
    if code == 0:
        mark_finished(child.run.folder, child.run.key)
    if child.log is None:  # It has reported its end itself.
        return
    took = format_duration(time.monotonic() - child.start_s)
    if code == 0:
        console.info(f"-- {child.title} is finished ({took})")
    elif child.stopped_by:
        console.info(f"-- {child.title} has stopped ({took})")
    else:
        console.warn(f"{child.title} has failed ({took}; {child.log}); the other runs continue")


def _raise_what_happened(
    ended: Sequence[_Child], waiting: Sequence[SweepRun], signals: Sequence[int]
) -> None:
    stopped = sorted((each for each in ended if each.stopped_by), key=lambda each: each.start_s)
    for child in ended:
        if child.process.returncode and not child.stopped_by:
            reported_in = "the lines above" if child.log is None else f"'{child.log}'"
            raise ChildFailed(child.run, child.process.returncode, reported_in)
    again = "run the same command again to resume"
    if stopped:
        names = ", ".join(child.run.name for child in stopped)
        number = stopped[0].stopped_by
        assert number is not None, "a child that was stopped has the signal"
        raise Interrupted(number, f"stopped in {names}; {again}")
    if waiting:
        raise Interrupted(signals[-1], f"stopped before {waiting[0].name}; {again}")


# -- what a run does at present ------------------------------------------------------------------
#
#     metrics.jsonl   the newest step
#     train.log       the newest line of all else: documents, held-out loss, audit


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProgress:
    """What a run does."""

    step: StepMetrics | None
    """The newest step; None before the first one."""
    tokens_per_s: float
    """Mean of the newest steps; 0 before the first one."""
    line: str
    """The newest line of its log; empty before the first one."""

    @property
    def is_training(self) -> bool:
        """Whether the newest line is that of a step."""
        return self.step is not None and self.line.startswith("step ")

    def describe(self, width: int | None) -> str:
        """Return a line for a log."""
        if self.step is None or not self.is_training:
            return self.line[:width]
        line = self.step.describe(self.tokens_per_s, width=width)
        if width is None or len(line) <= width:
            return line
        step = f"step {self.step.step}/{self.step.num_steps}"
        return f"{step} {self.describe_briefly(width)}"[:width]

    def describe_briefly(self, width: int | None) -> str:
        """Return the text next to the bar of its steps."""
        if self.step is None or not self.is_training:
            return self.line
        left_s = self.step.elapsed_s / self.step.step * (self.step.num_steps - self.step.step)
        left = f"{format_duration(left_s)} left"
        if width is None or width >= _WIDE:
            return f"{self.step.describe_briefly(self.tokens_per_s, width=80)} {left}"
        loss = "none" if self.step.loss is None else f"{self.step.loss:.4f}"
        return f"loss {loss} lr {self.step.lr:.1e} {left}"


def show_run(rows: Rows, name: str, progress: RunProgress, width: int | None) -> None:
    """Show what a run does in its row."""
    if not rows.is_live:
        if width is not None and len(name) > _MOST_OF_NAME:
            name = f"{name[: _MOST_OF_NAME - 1]}…"
        rows.show(name, progress.describe(None if width is None else width - len(name) - 2))
    elif progress.step is None:
        rows.show(name, progress.line)
    else:
        done, total = progress.step.step, progress.step.num_steps
        rows.show(name, progress.describe_briefly(width), done=done, total=total)


def read_progress(run_folder: Path, log: Path, log_start: int) -> RunProgress:
    """Read what a run does; files that are missing or half-written count as empty.

    ``log_start`` is the size of the log when the process was started (bytes).
    """
    steps = []
    for line in _read_tail(run_folder / "metrics.jsonl"):
        if '"event":"step"' in line:
            try:
                steps.append(StepMetrics.model_validate_json(line))
            except ValidationError:  # A line that is being written, or whose start is cut off.
                continue
    lines = [line.strip() for line in _read_tail(log, log_start) if line.strip()]
    return RunProgress(
        step=steps[-1] if steps else None,
        tokens_per_s=sum(step.tokens_per_s for step in steps) / max(1, len(steps)),
        line=lines[-1] if lines else "",
    )


def _read_tail(path: Path, start: int = 0) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
