"""Signals of this process, and its child processes: their start, end and error message. No torch.

    ranks of `--nproc`   one command on several processes, which end together (workflows/launch.py)
    runs of a sweep      each ends on its own (workflows/sweep.py)
    long calls           of libraries, in a thread, so that Ctrl-C takes effect at once

Ctrl-C and SIGTERM raise an exception in a command: unfinished files are deleted and one line is
printed. During training the trainer's own handler, which saves first, replaces this one. Ranks have
no handler: their launcher reports the signal.

Where a process writes its final error message:

    single process, rank 0 of torchrun   standard error
    rank k of torchrun                   standard error with the prefix "[rank k] "; nothing if it
                                         failed only because of another rank, which reports
    rank of `--nproc`                    a file; the launcher prints one line for all ranks
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

EXIT_REPORT_FILE = "MEMGUARD_EXIT_REPORT"
"""Environment variable: file to which a rank of `--nproc` writes its final error message."""
RUN_FOLDER = "MEMGUARD_RUN"
"""Environment variable of a process that trains: folder of the run, in which it tells its end."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_SIGNAL_S = 1.0
"""Signals within this time count as one: a launcher forwards the Ctrl-C that the terminal already
sent to all processes (seconds)."""
_AGAIN_AFTER_S = 0.01
_TICK_EVERY_S = 1.0

ResultT = TypeVar("ResultT")
Handler = Callable[[int, FrameType | None], None]


# -- signals of this process -----------------------------------------------------------------------


class SignalReceived(BaseException):
    """A signal to end the command; not an `Exception`, so that handlers of those ignore it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def raise_on_signals() -> list[SignalReceived]:
    """Install handlers: the first signal raises `SignalReceived`, a second ends the process.

    Python discards an exception that is raised in a finalizer or in the callback of a weak
    reference, wherever the signal happens to come. Such a signal is sent again.

    Returns:
        What was raised until now: libraries convert it to errors of their own.
    """
    raised: list[SignalReceived] = []
    if "LOCAL_RANK" in os.environ or threading.current_thread() is not threading.main_thread():
        return raised
    received_s = -math.inf

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal received_s
        is_first, since_s = received_s == -math.inf, time.monotonic() - received_s
        if not is_first and since_s < SAME_SIGNAL_S:
            return
        received_s = time.monotonic()
        if is_first:
            raised.append(SignalReceived(number))
            raise raised[-1]
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def send_again(discarded: "sys.UnraisableHookArgs") -> None:
        nonlocal received_s
        if not isinstance(discarded.exc_value, SignalReceived):
            report(discarded)
            return
        received_s = -math.inf
        number = discarded.exc_value.number
        timer = threading.Timer(_AGAIN_AFTER_S, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    report, sys.unraisablehook = sys.unraisablehook, send_again
    for number in STOP_SIGNALS:
        # An ignored signal stays ignored, for example under nohup.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, handle)
    return raised


@contextmanager
def signals_handled(handle: Handler) -> Iterator[Mapping[signal.Signals, Any]]:
    """Handle stop signals in a block; yield the handlers before, none outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield before
    finally:
        restore_handlers(before)


def restore_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    """Install the handlers that `signals_handled` replaced."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


# -- calls that a signal may end -------------------------------------------------------------------


def call_interruptibly(
    function: Callable[[], ResultT],
    tick: Callable[[], None] | None = None,
    *,
    every_s: float = _TICK_EVERY_S,
) -> ResultT:
    """Return what the function returns; a signal ends the wait for it.

    A call of a library in Rust or C++ on the main thread delays a signal until it returns, which
    for a document of ten million characters is minutes. In a thread, the library releases the
    interpreter's lock; after a signal the thread ends with the process. Outside of the main thread,
    which receives no signals, the function is called directly, so it must not depend on the thread.
    While it runs, ``tick`` is called every ``every_s`` on the main thread, e.g. to show progress.

    Raises:
        BaseException: that of the function, or of the handler of a signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    results: list[ResultT] = []
    errors: list[BaseException] = []
    has_ended = threading.Event()

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # Raised again on the main thread.
            errors.append(error)
        finally:
            has_ended.set()

    # A daemon: the end of the process does not wait for it.
    threading.Thread(target=run, name="memguard-call", daemon=True).start()
    while not has_ended.wait(every_s):
        if tick is not None:
            tick()
    if errors:
        raise errors[0]
    return results[0]


# -- child processes -------------------------------------------------------------------------------


def share_cores(count: int) -> dict[str, str]:
    """Return the environment variable that divides the cores among children; users may set it."""
    cores = len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(max(1, cores // count))}


def start_child(
    command: Sequence[str],
    log: Path | None,
    *,
    environment: Mapping[str, str] | None = None,
    stdout: int | None = subprocess.DEVNULL,
    **options: Any,
) -> "subprocess.Popen[bytes]":
    """Start a child process, whose standard error goes to ``log``; None lets it use the terminal.

    ``environment`` and ``stdout`` None are those of this process; options are those of `Popen`.
    """
    if log is None:
        return subprocess.Popen(command, env=environment, stdout=stdout, **options)
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=output,
            **options,
        )


def end_children(
    children: Sequence["subprocess.Popen[bytes]"], *, terminate: bool = False, within_s: float = 0.0
) -> None:
    """Wait ``within_s`` for children to end, and kill those that do not.

    ``terminate``: whether to send SIGTERM first.
    """
    if terminate:
        for child in children:
            child.terminate()
    deadline_s = time.monotonic() + within_s
    for child in children:
        try:
            child.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def find_stop_signal(code: int) -> signal.Signals | None:
    """Return the signal that stopped a process with this exit code, saved or not; None if none."""
    return next((number for number in STOP_SIGNALS if code in (128 + number, -number)), None)


def describe_kill(code: int) -> str:
    """Return how a process was killed, from its negative exit code."""
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}{' (out of memory?)' if code == -signal.SIGKILL else ''}"


# -- the error message of a process ----------------------------------------------------------------


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
    settings: dict[str, Any] = field(default_factory=dict)
    """Of `train`, with which all ranks may start again."""
    step: int | None = None
    """Step at which training diverged."""
    at_s: float = field(default_factory=time.monotonic)
    """Time of the end on the machine's monotonic clock (seconds)."""

    def print(self, prefix: str = "") -> None:
        """Write the message to standard error."""
        print(f"{self.traceback}{prefix}{self.text}", file=sys.stderr, flush=True)


def is_started_by_nproc() -> bool:
    """Return whether this process was started by `--nproc`."""
    return bool(os.environ.get(EXIT_REPORT_FILE))


def own_rank() -> int:
    """Return this process's rank, without importing torch; 0 for a single process."""
    rank = os.environ.get("RANK", "")
    # Another value is refused when this process joins the ranks.
    return int(rank) if "LOCAL_RANK" in os.environ and rank.isdecimal() else 0


def report_exit(report: ExitReport) -> None:
    """Write the final error message to the launcher's file or to standard error."""
    file = os.environ.get(EXIT_REPORT_FILE)
    if file:
        # Imported here: neither the launcher nor `memguard --help` needs pydantic.
        from memguard.records import write_atomically

        try:
            # The launcher may read the file at any time.
            write_atomically(Path(file), json.dumps(asdict(report)).encode())
            return
        except OSError:  # e.g. no space left, which may be the error to report
            pass
    rank = own_rank()
    if rank == 0:
        report.print()
    elif not report.follows:
        report.print(f"[rank {rank}] ")


def read_exit_report(file: Path) -> ExitReport | None:
    """Return the final error message of a rank; None if it wrote none."""
    try:
        return ExitReport(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
