"""`--nproc N`: runs the same command as N processes on this machine and ends them together.

    environment   same variables as torchrun: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    terminal      rank 0 uses it; output of other ranks is shown only if one dies without a message
    error         one line and the exit code of the rank that failed first; others exit in seconds
    memory        if it runs out in the first steps with a micro-batch that `auto` chose, all ranks
                  are ended and started again with half of it, once
    Ctrl-C, TERM  all ranks save a checkpoint and exit; there is no time limit

torchrun does not support the last two: it sends SIGTERM, which memguard interprets as "save", to
all ranks as soon as one exits, and SIGKILL 30 s later; and its ranks are not in the terminal's
process group. For several machines use torchrun: `torchrun ... -m memguard train CONFIG`.

Where a process writes its final error message:

    single process, rank 0 of torchrun   standard error
    rank k of torchrun                   standard error with the prefix "[rank k] "; nothing if it
                                         failed only because of another rank, which reports
    rank of `--nproc`                    a file; the launcher prints one line for all ranks
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from memguard.errors import ConfigError
from memguard.workflows.process_limits import MORE_MACHINES, check_num_processes

EXIT_REPORT_FILE = "MEMGUARD_LAST_WORDS"
"""Environment variable: file to which a rank of `--nproc` writes its final error message."""
HALVE_MICRO_BATCH = "MEMGUARD_HALVE_MICRO_BATCH"
"""Environment variable of the second attempt of a run whose first one ran out of memory."""
STARTED_AGAIN = "Training starts again with that"
_TOO_LARGE = "MicroBatchTooLarge"
"""Class of the error after which all ranks are started again, once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitReport:
    """How a process ended, with its final error message."""

    code: int
    """Exit code."""
    kind: str
    """Class of the error."""
    text: str
    """One line; for an invalid configuration one line per problem."""
    traceback: str = ""
    """Printed above the text if the error is a bug in memguard."""
    follows: bool = False
    """The process ended only because another rank had ended."""
    agreed: bool = False
    """All ranks end in this way, not necessarily at the same time."""
    at_s: float = field(default_factory=time.monotonic)
    """Time of the end on the machine's monotonic clock (seconds)."""

    def say(self, prefix: str = "") -> None:
        """Write the message to standard error."""
        shown = f"{self.traceback}{prefix}{self.text}"
        print(shown, file=sys.stderr, flush=True)


def is_started_by_nproc() -> bool:
    """Return whether this process was started by `--nproc`."""
    return bool(os.environ.get(EXIT_REPORT_FILE))


def own_rank() -> int:
    """Return this process's rank, without importing torch; 0 for a single process."""
    return int(os.environ.get("RANK") or 0) if "LOCAL_RANK" in os.environ else 0


def tell(words: ExitReport) -> None:
    """Write the final error message to the launcher's file or to standard error."""
    file = os.environ.get(EXIT_REPORT_FILE)
    if file:
        # Imported here: neither the launcher nor `memguard --help` needs pydantic.
        from memguard.records import write_atomically

        try:
            # The launcher may read the file at any time.
            write_atomically(Path(file), json.dumps(asdict(words)).encode())
            return
        except OSError:  # e.g. no space left, which may be the error to report
            pass
    rank = own_rank()
    if rank == 0:
        words.say()
    elif not words.follows:
        words.say(f"[rank {rank}] ")


def read_exit_report(file: Path) -> ExitReport | None:
    """Return the final error message of a rank; None if it wrote none."""
    try:
        return ExitReport(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


_GRACE_S = 5.0
"""Time for the other ranks to detect a failure and exit on their own."""
_LAST_CALL_S = 10.0
"""Time for all ranks to exit after a second Ctrl-C or SIGTERM."""
_SAME_SIGNAL_S = 1.0
_STOPS = (signal.SIGINT, signal.SIGTERM)
_SENT_BY_TERMINAL = 0x80  # SI_KERNEL
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_INTERRUPTED = "memguard: interrupted; run the same command again to resume"


def run_on_processes(num_processes: int) -> None:
    """Run this command as several processes and exit with their code; return in each of them.

    Called after every check that does not need torch.

    Raises:
        ConfigError: torchrun has already started processes, or the number is too large.
        SystemExit: with the exit code of the processes, after any error was printed.
    """
    if num_processes == 1 or is_started_by_nproc():
        return
    if "LOCAL_RANK" in os.environ:
        raise ConfigError("'--nproc' starts the processes itself: leave it out under torchrun")
    check_num_processes(num_processes, option="--nproc", way_out=MORE_MACHINES)
    command = [sys.executable, "-m", "memguard", *sys.argv[1:]]
    # Not typer's Exit: its 130 means a Ctrl-C that has not been reported yet.
    sys.exit(launch(command, num_processes))


@dataclass(slots=True)
class _Rank:
    """One process and how it ended."""

    number: int
    process: "subprocess.Popen[bytes]"
    report_file: Path
    output_file: Path
    ended_s: float = math.inf
    is_killed_by_us: bool = False
    words: ExitReport | None = None

    @property
    def code(self) -> int:
        """Exit code, negative for a signal."""
        return self.process.returncode

    def notice_end(self) -> bool:
        """Return whether the process has ended since the last call."""
        if self.ended_s < math.inf or self.process.poll() is None:
            return False
        self.words = read_exit_report(self.report_file)
        self.ended_s = self.words.at_s if self.words else time.monotonic()
        return True


def launch(command: Sequence[str], num_processes: int) -> int:
    """Run a command as several processes on this machine; print one line if they fail.

    Args:
        command: program and arguments, the same for all.
        num_processes: number of ranks.

    Returns:
        The exit code of the rank that failed first, 1 if it was killed; 0 if none failed.
    """
    code = _run(command, num_processes, {})
    if code is None:
        code = _run(command, num_processes, {HALVE_MICRO_BATCH: "1"})
    assert code is not None, "ranks are started again once"
    return code


def _run(command: Sequence[str], num_processes: int, variables: dict[str, str]) -> int | None:
    """Run all ranks to their end; None if they must be started again.

    Args:
        command: program and arguments.
        num_processes: number of ranks.
        variables: environment variables to add; none at the first attempt.
    """
    with tempfile.TemporaryDirectory(prefix="memguard-") as folder, _held_back() as mask:
        ranks: list[_Rank] = []
        try:
            _start(ranks, command, num_processes, Path(folder), mask, variables)
            stop = _wait(ranks)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.wait()
        return _report_end(ranks, stop, may_restart=not variables)


@contextmanager
def _held_back() -> Iterator[set[int]]:
    """Block signals so that `_wait` can receive them; yield the mask to restore in children."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_STOPS, signal.SIGCHLD))
    try:
        yield {int(number) for number in before}
    finally:
        # Discard signals that arrived after all processes had ended.
        while signal.sigtimedwait(_STOPS, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_LIBC = ctypes.CDLL(None)


def end_with_launcher(launcher: int) -> None:
    """Let this process get SIGTERM when the launcher, its parent, is killed.

    Its ranks then save and exit instead of running on unattended.

    Args:
        launcher: its process id.
    """
    _LIBC.prctl(_DIES_WITH_PARENT, signal.SIGTERM)
    if os.getppid() != launcher:
        # It was killed before the call.
        signal.raise_signal(signal.SIGTERM)


def _start(
    ranks: list[_Rank],
    command: Sequence[str],
    count: int,
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
            report_file, output_file = folder / f"{number}.json", folder / f"{number}.log"
            environment = {
                **_defaults(count),
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
            with output_file.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=None if number == 0 else subprocess.DEVNULL,
                    stdout=None if number == 0 else subprocess.DEVNULL,
                    stderr=None if number == 0 else output,
                    pass_fds=[meeting.fileno()] if number == 0 else [],
                    preexec_fn=prepare_child,
                )
            ranks.append(_Rank(number, process, report_file, output_file))


def _defaults(count: int) -> dict[str, str]:
    """Return environment defaults for ranks on one machine; the user's own values win."""
    cores = len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": str(max(1, cores // count)),
        # Works even if the machine's own host name does not resolve.
        "GLOO_SOCKET_IFNAME": "lo",
        # The launcher's one line already reports a broken connection.
        "TORCH_CPP_LOG_LEVEL": "FATAL",
    }


def _wait(ranks: Sequence[_Rank]) -> int | None:
    """Wait until all ranks have ended; return the last stop signal received, if any."""
    stop: int | None = None
    stop_times_s: list[float] = []
    deadline_s = math.inf
    while running := [rank for rank in ranks if rank.ended_s == math.inf]:
        left_s = min(1.0, max(0.0, deadline_s - time.monotonic()))
        caught = signal.sigtimedwait((*_STOPS, signal.SIGCHLD), left_s)
        now_s = time.monotonic()
        if caught is not None and caught.si_signo in _STOPS:
            stop = caught.si_signo
            if caught.si_code != _SENT_BY_TERMINAL:  # a terminal signals all processes itself
                for rank in running:
                    rank.process.send_signal(stop)
            if not stop_times_s or now_s - stop_times_s[-1] >= _SAME_SIGNAL_S:
                stop_times_s.append(now_s)
            if len(stop_times_s) > 1:
                deadline_s = min(deadline_s, now_s + _LAST_CALL_S)
        for rank in running:
            is_agreed = rank.notice_end() and (rank.code == 0 or _has_agreed(rank))
            if rank.ended_s < math.inf and not is_agreed:
                deadline_s = min(deadline_s, now_s + _GRACE_S)
        if now_s >= deadline_s:
            for rank in running:
                if rank.process.poll() is None:
                    rank.is_killed_by_us = True
                    rank.process.kill()
    return stop


def _has_agreed(rank: _Rank) -> bool:
    return rank.words is not None and rank.words.agreed


def _report_end(ranks: Sequence[_Rank], stop: int | None, *, may_restart: bool) -> int | None:
    """Print the error if a rank failed; return the exit code, None to start all ranks again."""
    if all(rank.code == 0 for rank in ranks):
        return 0
    if ranks[0].code == -signal.SIGKILL and sys.stderr.isatty():
        # It may have been drawing a progress bar: end its line and show the cursor again.
        print("\x1b[?25h", file=sys.stderr)
    failed = [rank for rank in ranks if rank.code != 0 and not rank.is_killed_by_us]
    first = min(failed, key=_by_cause, default=None)
    if stop is not None and (first is None or -first.code in _STOPS):
        print(_INTERRUPTED, file=sys.stderr)
        return 128 + stop
    assert first is not None, "ranks are killed after one has failed, or after a signal"
    if first.words is None:
        print(f"memguard: rank {first.number} {_describe_death(first)}", file=sys.stderr)
        return max(1, first.code)
    prefix = "" if _speaks_for_all(first, ranks) else f"rank {first.number}: "
    if may_restart and stop is None and first.words.kind == _TOO_LARGE:
        print(f"{prefix}{first.words.text}. {STARTED_AGAIN}", file=sys.stderr, flush=True)
        return None
    first.words.say(prefix)
    return first.words.code


def _by_cause(rank: _Rank) -> tuple[int, float, int]:
    """Sort key of failed ranks; SIGKILL is first, as it is never caused by another rank's error."""
    if rank.code == -signal.SIGKILL:
        order = 0
    else:
        order = 2 if rank.words is not None and rank.words.follows else 1
    return order, rank.ended_s, rank.number


def _speaks_for_all(first: _Rank, ranks: Sequence[_Rank]) -> bool:
    """Return whether the message needs no rank: all ranks failed with the same error, or rank 0."""
    kinds = {rank.words.kind if rank.words else None for rank in ranks}
    is_interrupted = first.words is not None and first.words.code in (130, 143)
    return first.number == 0 or len(kinds) == 1 or is_interrupted


def _describe_death(rank: _Rank) -> str:
    """Return how a rank ended that wrote no message."""
    if rank.code == -signal.SIGKILL:
        return "was killed by SIGKILL (out of memory?); see the system log for the reason"
    lines = rank.output_file.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    how = f"was killed by {_name(-rank.code)}" if rank.code < 0 else f"ended with code {rank.code}"
    return f"{how}{f': {last}' if last else ''}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
