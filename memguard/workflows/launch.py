"""`--nproc N`: the same command on N processes of this machine, which end as one.

    environment   what torchrun sets: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    terminal      rank 0 has it; what the others print is kept only for a rank that dies silently
    error         one line, of the rank that failed first; its exit code; the others end in seconds
    Ctrl-C, TERM  the ranks save and end, and have the time they need

torchrun itself cannot keep the last two: it sends SIGTERM to all ranks as soon as one has ended,
which for us means "save", and SIGKILL 30 s later; and its ranks are not in the terminal's process
group. On several machines it is the one to use: `torchrun ... -m memguard train CONFIG`.

Where a process writes the error that it ends with:

    alone, or rank 0 of torchrun   standard error
    rank k of torchrun             standard error, "[rank k] " in front; nothing where it only
                                   follows another rank, which has spoken
    a rank of `--nproc`            a file: its launcher says one line for all ranks
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

WORDS_FILE = "MEMGUARD_LAST_WORDS"
"""Environment variable: where a rank of `--nproc` leaves its last words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LastWords:
    """How a process ended and what it says about it."""

    code: int
    """Exit code."""
    kind: str
    """Class of the error."""
    text: str
    """One line; of a wrong configuration one for each problem."""
    traceback: str = ""
    """Shown above the text where the mistake is memguard's."""
    follows: bool = False
    """It ended only because another rank had."""
    agreed: bool = False
    """All ranks end in this way, each in its own time."""
    at_s: float = field(default_factory=time.monotonic)
    """When; the clock is the machine's (seconds)."""

    def say(self, prefix: str = "") -> None:
        """Write it to standard error."""
        shown = f"{self.traceback}{prefix}{self.text}"
        print(shown, file=sys.stderr, flush=True)


def is_started_by_nproc() -> bool:
    """Whether this process is one of those that `--nproc` has started."""
    return bool(os.environ.get(WORDS_FILE))


def own_rank() -> int:
    """Return this process's rank, known before torch is loaded; 0 where there are no others."""
    return int(os.environ.get("RANK") or 0) if "LOCAL_RANK" in os.environ else 0


def tell(words: LastWords) -> None:
    """Say the last words where they belong."""
    file = os.environ.get(WORDS_FILE)
    if file:
        # Here: neither a launcher nor `memguard --help` needs pydantic.
        from memguard.records import write_atomically

        try:
            # The launcher may look at any time.
            write_atomically(Path(file), json.dumps(asdict(words)).encode())
            return
        except OSError:  # no space left, where that may be what the words are about
            pass
    rank = own_rank()
    if rank == 0:
        words.say()
    elif not words.follows:
        words.say(f"[rank {rank}] ")


def read_last_words(file: Path) -> LastWords | None:
    """Return what a rank has left; None where it ended without a word."""
    try:
        return LastWords(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


_GRACE_S = 5.0
"""Time the others have to notice that one has failed, and to end by themselves."""
_LAST_CALL_S = 10.0
"""Time all have to end after a second Ctrl-C or SIGTERM."""
_SAME_SIGNAL_S = 1.0
_STOPS = (signal.SIGINT, signal.SIGTERM)
_SENT_BY_TERMINAL = 0x80  # SI_KERNEL
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_INTERRUPTED = "memguard: interrupted; run the same command again to go on"


def run_on_processes(num_processes: int) -> None:
    """Run this command on several processes and end as they did; return in each of them.

    Called when all is checked that can be checked without torch.

    Raises:
        ConfigError: torchrun has started processes already, or they are too many.
        SystemExit: with their exit code; what there was to say has been said.
    """
    if num_processes == 1 or is_started_by_nproc():
        return
    if "LOCAL_RANK" in os.environ:
        raise ConfigError("'--nproc' starts the processes itself: leave it out under torchrun")
    check_num_processes(num_processes, option="--nproc", way_out=MORE_MACHINES)
    command = [sys.executable, "-m", "memguard", *sys.argv[1:]]
    # Not typer's Exit: its 130 means a Ctrl-C that nobody has told yet.
    sys.exit(launch(command, num_processes))


@dataclass(slots=True)
class _Rank:
    """One process, and how it ended."""

    number: int
    process: "subprocess.Popen[bytes]"
    words_file: Path
    output_file: Path
    ended_s: float = math.inf
    is_killed_by_us: bool = False
    words: LastWords | None = None

    @property
    def code(self) -> int:
        """Exit code, negative for a signal."""
        return self.process.returncode

    def notice_end(self) -> bool:
        """Return whether it has ended since the last call."""
        if self.ended_s < math.inf or self.process.poll() is None:
            return False
        self.words = read_last_words(self.words_file)
        self.ended_s = self.words.at_s if self.words else time.monotonic()
        return True


def launch(command: Sequence[str], num_processes: int) -> int:
    """Run a command on several processes of this machine; say one line if they fail.

    Args:
        command: program and arguments, the same for all.
        num_processes: number of ranks.

    Returns:
        The exit code of the rank that failed first, 1 where it was killed; 0 if none failed.
    """
    with tempfile.TemporaryDirectory(prefix="memguard-") as folder, _held_back() as mask:
        ranks: list[_Rank] = []
        try:
            _start(ranks, command, num_processes, Path(folder), mask)
            stop = _wait(ranks)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.wait()
        return _tell_end(ranks, stop)


@contextmanager
def _held_back() -> Iterator[set[int]]:
    """Block signals, to be taken one by one; yield the mask to be restored in children."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_STOPS, signal.SIGCHLD))
    try:
        yield {int(number) for number in before}
    finally:
        # One that came when all had ended already has nobody to stop.
        while signal.sigtimedwait(_STOPS, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(
    ranks: list[_Rank], command: Sequence[str], count: int, folder: Path, mask: set[int]
) -> None:
    """Start all ranks, adding each to the list as soon as it runs."""
    libc = ctypes.CDLL(None)

    def prepare_child() -> None:
        # Where the launcher is killed its ranks save and end, and do not go on unseen.
        libc.prctl(_DIES_WITH_PARENT, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    # Bound here and handed to rank 0: nobody can take the port in the seconds until it listens.
    with socket.create_server(("127.0.0.1", 0), backlog=count) as meeting:
        for number in range(count):
            words_file, output_file = folder / f"{number}.json", folder / f"{number}.log"
            environment = {
                **_defaults(count),
                **os.environ,
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(meeting.getsockname()[1]),
                "MEMGUARD_STORE_FD": str(meeting.fileno()),
                WORDS_FILE: str(words_file),
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
            ranks.append(_Rank(number, process, words_file, output_file))


def _defaults(count: int) -> dict[str, str]:
    """Return what ranks of one machine are given unless the user has set it."""
    cores = len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": str(max(1, cores // count)),
        # A machine whose own name does not resolve can still talk to itself.
        "GLOO_SOCKET_IFNAME": "lo",
        # What its libraries say of a broken connection is said by the one line.
        "TORCH_CPP_LOG_LEVEL": "FATAL",
    }


def _wait(ranks: Sequence[_Rank]) -> int | None:
    """Wait until all have ended; return the last signal that asked them to."""
    stop: int | None = None
    asked_s: list[float] = []
    deadline_s = math.inf
    while running := [rank for rank in ranks if rank.ended_s == math.inf]:
        left_s = min(1.0, max(0.0, deadline_s - time.monotonic()))
        caught = signal.sigtimedwait((*_STOPS, signal.SIGCHLD), left_s)
        now_s = time.monotonic()
        if caught is not None and caught.si_signo in _STOPS:
            stop = caught.si_signo
            if caught.si_code != _SENT_BY_TERMINAL:  # which sends to all of its processes
                for rank in running:
                    rank.process.send_signal(stop)
            if not asked_s or now_s - asked_s[-1] >= _SAME_SIGNAL_S:
                asked_s.append(now_s)
            if len(asked_s) > 1:
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


def _tell_end(ranks: Sequence[_Rank], stop: int | None) -> int:
    """Say how it ended if it did not end well; return the exit code."""
    if all(rank.code == 0 for rank in ranks):
        return 0
    if ranks[0].code == -signal.SIGKILL and sys.stderr.isatty():
        # It may have been drawing: end its line and show the cursor it had hidden.
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
    first.words.say("" if _speaks_for_all(first, ranks) else f"rank {first.number}: ")
    return first.words.code


def _by_cause(rank: _Rank) -> tuple[int, float, int]:
    """Sort what failed: nobody is killed from outside as a result of another's error."""
    if rank.code == -signal.SIGKILL:
        order = 0
    else:
        order = 2 if rank.words is not None and rank.words.follows else 1
    return order, rank.ended_s, rank.number


def _speaks_for_all(first: _Rank, ranks: Sequence[_Rank]) -> bool:
    """Return whether all ranks met the same, or rank 0 speaks, which needs no name."""
    kinds = {rank.words.kind if rank.words else None for rank in ranks}
    is_interrupted = first.words is not None and first.words.code in (130, 143)
    return first.number == 0 or len(kinds) == 1 or is_interrupted


def _describe_death(rank: _Rank) -> str:
    """Say how a rank without last words ended."""
    if rank.code == -signal.SIGKILL:
        return "was killed by SIGKILL (out of memory?); the system's log says why"
    lines = rank.output_file.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    how = f"was killed by {_name(-rank.code)}" if rank.code < 0 else f"ended with code {rank.code}"
    return f"{how}{f': {last}' if last else ''}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
