"""A sweep: each setting as a child process, then the comparison and its page."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from memguard.cli.comparing import make_command, publish
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
from memguard.errors import Interrupted, MemguardError
from memguard.records import Comparison, write_atomically
from memguard.runtime import Console


class ChildFailed(MemguardError):
    """A setting's process ended with an error; it has said why."""

    def __init__(self, run: SweepRun, code: int) -> None:
        how = f"ended with exit code {code}; the lines above say why"
        if code < 0:
            why = " (out of memory?)" if code == -signal.SIGKILL else ""
            how = f"was ended by {signal.Signals(-code).name}{why}"
        super().__init__(f"{run.name} {how}. Run the same command again: what is finished is kept")
        self.exit_code = code if code > 0 else 1


def run_sweep(sweep: Sweep) -> tuple[Path, Comparison]:
    """Train and audit what is not finished, one after the other, then compare.

    A child process for each run frees its memory and threads, and one that dies leaves the others.

    Raises:
        ChildFailed: a run did not end well.
        Interrupted: a signal stopped it; run the same command again.
        RecordError: the runs cannot be compared.
    """
    console = Console()
    for line in describe_sweep(sweep):
        console.info(line)
    for number, run in enumerate(sweep.in_order, 1):
        if is_finished(run):
            continue
        prepare_folder(run)
        console.info(f"-- {number} of {len(sweep.in_order)}: {run.name} ({run.folder})")
        _run_child(run)
        mark_finished(run.folder, run.key)
    comparison = build_comparison(sweep, command=make_command())
    publish(comparison, sweep.folder, console)
    return sweep.folder, comparison


def _run_child(run: SweepRun) -> None:
    settings = run.folder / "requested.yaml"
    write_atomically(settings, dump_yaml(run.config).encode())
    child = subprocess.Popen(
        [sys.executable, "-m", "memguard", "train", str(settings)], stdout=subprocess.DEVNULL
    )

    def forward(number: int, _frame: object) -> None:
        # A terminal's Ctrl-C reaches the child by itself; a signal sent to this process does not.
        if number == signal.SIGTERM or not _is_in_foreground():
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if child.poll() is None:
            child.kill()
    for number in (signal.SIGINT, signal.SIGTERM):
        if code in (128 + number, -number):
            raise Interrupted(number, f"stopped in {run.name}; run the same command again to go on")
    if code:
        raise ChildFailed(run, code)


def _is_in_foreground() -> bool:
    """Tell whether a terminal sends its Ctrl-C to this process and its children."""
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
