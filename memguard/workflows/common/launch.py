"""`--nproc N`: runs the same command as N processes on this machine and ends them together.

    environment   same variables as torchrun: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    terminal      rank 0 uses it; output of other ranks is shown only if one dies without a message,
                  and a line if they wait for rank 0 longer than a minute
    error         one line and the exit code of the rank that failed first, or of the one that was
                  killed; others exit in seconds. After a lost connection, the rank that caused it
                  has half a minute to end, so that it is named
    memory        if it runs out in a step whose settings `auto` chose, all ranks are ended and
                  started again with settings that need less
    failure       with `--max-restarts` they are started again, by the rule of `runtime.ended`
    Ctrl-C, TERM  all ranks save a checkpoint and exit; there is no time limit

torchrun does not support the last two: it sends SIGTERM, which memguard interprets as "save", to
all ranks as soon as one exits, and SIGKILL 30 s later; and its ranks are not in the terminal's
process group. For several machines use torchrun: `torchrun ... -m memguard train CONFIG`.
"""

import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard.errors import ConfigError
from memguard.runtime.children import (
    EXIT_REPORT_FILE,
    SAME_SIGNAL_S,
    STOP_SIGNALS,
    ExitReport,
    describe_kill,
    end_children,
    find_stop_signal,
    is_started_by_nproc,
    read_exit_report,
    share_cores,
    start_child,
)
from memguard.runtime.ended import begin_attempt, may_follow
from memguard.runtime.environment import MORE_MACHINES, check_num_processes
from memguard.runtime.stalls import take_notice

LESS_MEMORY = "MEMGUARD_LESS_MEMORY"
"""Environment variable: settings of `train` (JSON), with which a run that ran out of memory starts
again."""
STARTED_AGAIN = "Training starts again with that"
_GRACE_S = 5.0
"""Time for the other ranks to detect a failure and exit on their own."""
_CAUSE_S = 30.0
"""The same while only ranks have failed that lost another one. That one is the cause, and a killed
process may need longer: its connections can be closed seconds before it has ended."""
_LAST_CALL_S = 10.0
"""Time for all ranks to exit after a second Ctrl-C or SIGTERM."""
_SENT_BY_TERMINAL = 0x80  # SI_KERNEL
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_INTERRUPTED = "memguard: interrupted; run the same command again to resume"


def run_on_processes(num_processes: int, restarts: tuple[Path, int] | None = None) -> None:
    """Run this command as several processes and exit with their code; return in each of them.

    Called after every check that does not need torch. ``restarts``: see `launch`.
    """
    if (num_processes == 1 and not restarts) or is_started_by_nproc():
        return
    if "LOCAL_RANK" in os.environ:
        option = "--max-restarts" if restarts else "--nproc"
        raise ConfigError(f"'{option}' starts the processes itself: leave it out under torchrun")
    check_num_processes(num_processes, option="--nproc", way_out=MORE_MACHINES)
    command = [sys.executable, "-m", "memguard", *sys.argv[1:]]
    # Not typer's Exit: its 130 means a Ctrl-C that has not been reported yet.
    sys.exit(launch(command, num_processes, restarts=restarts))


@dataclass(slots=True)
class _Rank:
    """One process and how it ended."""

    number: int
    process: "subprocess.Popen[bytes]"
    report_file: Path
    log: Path | None
    """File of its standard error; None if it uses the terminal."""
    ended_s: float = math.inf
    is_killed_by_us: bool = False
    report: ExitReport | None = None

    @property
    def code(self) -> int:
        """Exit code, negative for a signal."""
        return self.process.returncode

    @property
    def is_consequence(self) -> bool:
        """Whether it ended only because another rank had ended."""
        return self.report is not None and self.report.follows

    def read_log(self) -> str:
        return "" if self.log is None else self.log.read_text(encoding="utf-8", errors="replace")

    def notice_end(self) -> bool:
        """Return whether the process has ended since the last call."""
        if self.ended_s < math.inf or self.process.poll() is None:
            return False
        self.report = read_exit_report(self.report_file)
        self.ended_s = self.report.at_s if self.report else time.monotonic()
        return True


def launch(
    command: Sequence[str],
    num_processes: int,
    *,
    stdout: int | None = None,
    restarts: tuple[Path, int] | None = None,
) -> int:
    """Run a command as several processes on this machine; print one line if they fail.

    ``stdout`` is that of rank 0. Returns the exit code of the rank that failed first, 1 if it was
    killed; 0 if none failed. ``restarts``: folder of a run, and how often it may be started again.
    """
    variables, is_restart = dict[str, str](), False
    while True:
        if restarts:
            begin_attempt(restarts[0], is_restart=is_restart)
        end = _run(command, num_processes, stdout, variables)
        is_restart = isinstance(end, int)
        if not isinstance(end, int):
            variables = {LESS_MEMORY: json.dumps(end)}
        elif end == 0 or find_stop_signal(end) or not (restarts and may_follow(*restarts, end)):
            return end


def _run(
    command: Sequence[str], num_processes: int, stdout: int | None, variables: dict[str, str]
) -> int | Mapping[str, Any]:
    """Run all ranks to their end; return their code, or settings to start all of them again."""
    with tempfile.TemporaryDirectory(prefix="memguard-") as folder, _held_back() as mask:
        ranks: list[_Rank] = []
        try:
            _start(ranks, command, num_processes, stdout, Path(folder), mask, variables)
            stop = _wait(ranks)
        finally:
            end_children([rank.process for rank in ranks])
        return _report_end(ranks, stop)


@contextmanager
def _held_back() -> Iterator[set[int]]:
    """Block signals so that `_wait` can receive them; yield the mask to restore in children."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGCHLD))
    try:
        yield {int(number) for number in before}
    finally:
        # Discard signals that arrived after all processes had ended.
        while signal.sigtimedwait(STOP_SIGNALS, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_LIBC = ctypes.CDLL(None)


def end_with_launcher(launcher: int) -> None:
    """Let this process get SIGTERM when the launcher, its parent, is killed.

    Its ranks then save and exit instead of running on unattended.
    """
    _LIBC.prctl(_DIES_WITH_PARENT, signal.SIGTERM)
    if os.getppid() != launcher:
        # It was killed before the call.
        signal.raise_signal(signal.SIGTERM)


def _start(
    ranks: list[_Rank],
    command: Sequence[str],
    count: int,
    stdout: int | None,
    folder: Path,
    mask: set[int],
    variables: dict[str, str],
) -> None:
    """Start all ranks; each is added to the list as soon as it runs."""
    launcher = os.getpid()

    def prepare_child() -> None:
        end_with_launcher(launcher)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    # Bound here and passed to rank 0, so that no other program can take the port before it listens.
    with socket.create_server(("127.0.0.1", 0), backlog=count) as meeting:
        for number in range(count):
            report_file = folder / f"{number}.json"
            log = None if number == 0 else folder / f"{number}.log"
            environment = {
                **share_cores(count),
                # Works even if the machine's own host name does not resolve.
                "GLOO_SOCKET_IFNAME": "lo",
                # The launcher's one line already reports a broken connection.
                "TORCH_CPP_LOG_LEVEL": "FATAL",
                # The user's own values win.
                **os.environ,
                **variables,
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(meeting.getsockname()[1]),
                "MEMGUARD_STORE_FD": str(meeting.fileno()),
                EXIT_REPORT_FILE: str(report_file),
            }
            process = start_child(
                command,
                log,
                environment=environment,
                stdout=stdout if number == 0 else subprocess.DEVNULL,
                pass_fds=[meeting.fileno()] if number == 0 else [],
                preexec_fn=prepare_child,
            )
            ranks.append(_Rank(number, process, report_file, log))


def _wait(ranks: Sequence[_Rank]) -> int | None:
    """Wait until all ranks have ended; return the last stop signal received, if any."""
    stop: int | None = None
    stop_times_s: list[float] = []
    deadline_s = math.inf
    while running := [rank for rank in ranks if rank.ended_s == math.inf]:
        left_s = min(1.0, max(0.0, deadline_s - time.monotonic()))
        caught = signal.sigtimedwait((*STOP_SIGNALS, signal.SIGCHLD), left_s)
        now_s = time.monotonic()
        if caught is not None and caught.si_signo in STOP_SIGNALS:
            stop = caught.si_signo
            if caught.si_code != _SENT_BY_TERMINAL:  # a terminal signals all processes itself
                for rank in running:
                    rank.process.send_signal(stop)
            if not stop_times_s or now_s - stop_times_s[-1] >= SAME_SIGNAL_S:
                stop_times_s.append(now_s)
            if len(stop_times_s) > 1:
                deadline_s = min(deadline_s, now_s + _LAST_CALL_S)
        _show_notices(running)
        for rank in running:
            has_ended, report = rank.notice_end(), rank.report
            is_agreed = has_ended and (rank.code == 0 or (report is not None and report.agreed))
            if rank.ended_s < math.inf and not is_agreed:
                patience_s = _CAUSE_S if rank.is_consequence else _GRACE_S
                deadline_s = min(deadline_s, now_s + patience_s)
        if now_s >= deadline_s:
            for rank in running:
                if rank.process.poll() is None:
                    rank.is_killed_by_us = True
                    rank.process.kill()
    return stop


def _show_notices(ranks: Sequence[_Rank]) -> None:
    """Print the lines of ranks that cannot use the terminal."""
    for rank in ranks:
        line = take_notice(rank.report_file)
        if line is not None:
            # Rank 0 may have been drawing a progress bar when it stopped.
            start = "\n" if sys.stderr.isatty() else ""
            print(f"{start}{line}", file=sys.stderr, flush=True)


def _report_end(ranks: Sequence[_Rank], stop: int | None) -> int | Mapping[str, Any]:
    """Print the error if a rank failed; return the exit code, or settings to start all again."""
    if all(rank.code == 0 for rank in ranks):
        return 0
    if ranks[0].code == -signal.SIGKILL and sys.stderr.isatty():
        # It may have been drawing a progress bar: end its line and show the cursor again.
        print("\x1b[?25h", file=sys.stderr)
    failed = [rank for rank in ranks if rank.code != 0 and not rank.is_killed_by_us]
    for rank in ranks:
        if rank.is_killed_by_us and "Timeout (" in (said := rank.read_log()):  # Of faulthandler.
            print(f"rank {rank.number}: {said[said.index('Timeout (') :]}", file=sys.stderr)
    first = min(failed, key=_by_cause, default=None)
    if stop is not None and (first is None or -first.code in STOP_SIGNALS):
        print(_INTERRUPTED, file=sys.stderr)
        return 128 + stop
    assert first is not None, "ranks are killed after one has failed, or after a signal"
    if first.report is None:
        print(f"memguard: rank {first.number} {_describe_death(first)}", file=sys.stderr)
        return max(1, first.code)
    prefix = "" if _speaks_for_all(first, ranks) else f"rank {first.number}: "
    if first.report.settings and stop is None:
        print(f"{prefix}{first.report.text}. {STARTED_AGAIN}", file=sys.stderr, flush=True)
        return first.report.settings
    first.report.print(prefix)
    return first.report.code


def _by_cause(rank: _Rank) -> tuple[int, float, int]:
    """Sort key of failed ranks; SIGKILL is first, as it is never caused by another rank's error."""
    order = 2 if rank.is_consequence else 1
    if rank.code == -signal.SIGKILL:
        order = 0
    return order, rank.ended_s, rank.number


def _speaks_for_all(first: _Rank, ranks: Sequence[_Rank]) -> bool:
    """Return whether the message needs no rank: all ranks failed with the same error, or rank 0."""
    kinds = {rank.report.kind if rank.report else None for rank in ranks}
    is_interrupted = first.report is not None and first.report.code in (130, 143)
    return first.number == 0 or len(kinds) == 1 or is_interrupted


def _describe_death(rank: _Rank) -> str:
    """Return how a rank ended that wrote no message."""
    if rank.code == -signal.SIGKILL:
        return f"{describe_kill(rank.code)}; see the system log for the reason"
    last = rank.read_log().strip().split("\n")[-1].strip()
    how = describe_kill(rank.code) if rank.code < 0 else f"ended with code {rank.code}"
    return f"{how}{f': {last}' if last else ''}"
