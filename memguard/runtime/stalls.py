"""Says which rank the others wait for: "waiting for rank 1 in the save for 2 minutes". No torch.

    each rank       a thread looks every five seconds where the main thread is
    waiting         it is inside the same collective as at the last look and uses no processor
    after 15 s      a waiting rank posts that in the store of the process group, again at each look
    after a minute  the lowest waiting rank reads what was posted, and names the ranks that have not

A rank that is stopped, or hangs in a file system, posts nothing. Rank 0 also posts that it is at
work, since it shows its own progress: others then wait for it without a line. Lines come after 1,
2, 4, 8, ... minutes. Collectives are the same ones.

In steps and saves every rank posts that it is at work. After `train.stall_minutes` without a sign
of a rank the one that speaks ends, and its launcher ends all; a rank that still runs has then
written its stack. The first step, which may compile, has only the limit of the process group.
"""

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from memguard.errors import list_first, plural
from memguard.runtime.children import EXIT_REPORT_FILE, RUN_FOLDER, ExitReport, report_exit
from memguard.runtime.console import Console

_LOOK_EVERY_S = 5.0
_POST_AFTER_S = 15.0
_READ_AFTER_S = 30.0
_OUTDATED_AFTER_S = 25.0
"""A post that was not renewed for so long is of a rank that does not run any more."""
_ANSWER_WITHIN_S = 8.0
_IDLE_SHARE = 0.02
"""Largest share of a core that a waiting thread uses."""
_BUSY_SHARE = 0.1
_NUM_SPEAKERS = 16
"""Only the first ranks, of more than one machine, read and speak: thousands would overload it."""
_MOST_NAMED = 4
_COLLECTIVES = "torch.distributed.distributed_c10d"
_JOIN_SAVE = ("memguard.train.resume", "_join")
SAVE_THREAD = "memguard-save"
"""Name of the thread that saves; while the main thread waits for it, it is looked at instead."""

_PHASES: tuple[tuple[str, str, str | None], ...] = (
    # It waits for its own documents.
    ("memguard.train.prefetch", "", None),
    ("memguard.train.step", "_sum_loss", "the forward"),
    ("memguard.train.step", "_backward", "the backward"),
    ("memguard.train.step", "run", "the update"),
)
"""As `_PLACES`, in a step that is not the first; any frame may be the innermost."""
_LIMITED = ("the save", *(place for *_, place in _PHASES if place))
_PLACES: tuple[tuple[str, str, str | None], ...] = (
    # The first step has the time limit of its process group ('parallel.timeout_minutes').
    ("memguard.train.step", "", None),
    ("memguard.train.checkpoint", "save_checkpoint", "the save"),
    ("memguard.train.resume", "", "the save"),
    ("memguard.train.checkpoint", "", "the loading of a checkpoint"),
    ("memguard.train.base_nll", "", "the losses before training"),
    ("memguard.train.heldout", "", "the held-out loss"),
    ("memguard.workflows.training.data", "prepare_on_ranks", "the preparation"),
    ("memguard.workflows.training.train", "_export", "the export"),
    ("memguard.hf.export", "", "the export"),
    ("memguard.hf.merged_weights", "", "the export"),
    ("memguard.audit", "", "the audit"),
    ("memguard.workflows.auditing.audit", "", "the audit"),
    ("memguard.workflows.common.setup", "", "the loading of the model"),
    ("memguard.hf", "", "the loading of the model"),
    ("memguard.workflows", "", "the checks of the run"),
    ("memguard.runtime.processes", "start_runtime", "the end of the run"),
)
"""Module, function ('' for any) and the place in a line; the first row on the stack counts."""


# -- where the main thread is ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """The main thread at one moment."""

    place: str | None
    """Where it waits for other ranks; None if it does not."""
    stack: tuple[tuple[int, int], ...]
    """Code and instruction of each of its frames."""
    thread_s: float
    """Processor time of this thread (seconds)."""
    process_s: float
    """Processor time of the process (seconds)."""


def look_at(thread: int, step: int = 0) -> Look:
    """Look at a running thread; ``step`` is that of `Progress`."""
    frames: list[FrameType] = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    calls = [(frame.f_globals.get("__name__", ""), frame.f_code.co_name) for frame in frames]
    if _JOIN_SAVE in calls:
        for other in threading.enumerate():
            if other.name == SAVE_THREAD and other.ident is not None:
                return look_at(other.ident, step)
    return Look(
        place=find_place(calls, in_step=step > 0),
        stack=((step, 0), *((id(frame.f_code), frame.f_lasti) for frame in frames)),
        thread_s=time.clock_gettime(time.pthread_getcpuclockid(thread)),
        process_s=time.process_time(),
    )


def find_place(calls: Sequence[tuple[str, str]], *, in_step: bool = False) -> str | None:
    """Return where a thread that does not go on waits for other ranks; None if it does not.

    ``calls`` are module and function of each frame, innermost first. ``in_step``: see `_PHASES`.
    """
    is_collective = bool(calls) and calls[0][0] == _COLLECTIVES
    rows = (*(_PHASES if in_step else ()), *(_PLACES if is_collective else ()))
    for module, function, place in rows:
        for called_module, called_function in calls:
            is_inside = f"{called_module}.".startswith(f"{module}.")
            if is_inside and function in ("", called_function):
                return place
    return None


# -- what ranks know of each other -----------------------------------------------------------------


@dataclass(slots=True)
class Progress:
    """How far training is; the trainer sets it, the watch reads it."""

    step: int = 0
    """The newest step, from 1; 0 before this process has done its first one."""
    limit_s: float = math.inf
    """Longest time without a sign of a rank, in steps and saves (seconds)."""
    spins: bool = False
    """Whether a wait in a step uses the processor, as on CUDA."""

    @property
    def pace(self) -> float:
        """Factor of the watch's times, below 1 if the limit is below a minute."""
        return min(1.0, self.limit_s / 60)


class StoreBoard:
    """Where ranks post what they do, in a store of torch; a call without an answer ends."""

    def __init__(self, store: Any, world_size: int) -> None:
        """Remember the process group's store; each rank must post once before any of them reads."""
        self._store = store
        self._keys = [_key(rank) for rank in range(world_size)]
        self._reader: threading.Thread | None = None

    def post(self, rank: int, text: str) -> None:
        """Replace the text of a rank; left out while a read has no answer."""
        if self._reader is None or not self._reader.is_alive():
            self._store.set(_key(rank), text)

    def read(self) -> list[str] | None:
        """Return the texts of all ranks; None if the store's process does not answer."""
        texts: list[str] = []

        def read() -> None:
            with suppress(RuntimeError):  # The connection broke: the main thread reports it.
                texts.extend(value.decode() for value in self._store.multi_get(self._keys))

        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=read, name="memguard-stalls-read", daemon=True)
            self._reader.start()
            self._reader.join(_ANSWER_WITHIN_S)
        return texts or None


def _key(rank: int) -> str:
    return f"memguard/stalls/{rank}"


# -- the watch -------------------------------------------------------------------------------------

_IDLE, _WAITS, _WORKS = "idle", "waits", "works"


@dataclass(kw_only=True, slots=True)
class StallWatch:
    """Looks at the main thread of one rank; `look` is called every few seconds."""

    rank: int
    world_size: int
    board: StoreBoard
    say: Callable[[str], None]
    see: Callable[[], Look]
    clock: Callable[[], float] = time.monotonic
    is_board_on_main: bool = True
    """Whether rank 0's process holds the board; otherwise the launcher does."""
    progress: Progress = field(default_factory=Progress)
    end: Callable[[str], None] = lambda _: None
    _last: tuple[float, Look] | None = None
    _since_s: float | None = None
    _next_minute: int = 1
    _num_posts: int = 0
    _posted: str = _IDLE
    _seen: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Text of each rank, and when it was first read."""

    def look(self) -> None:
        """Post what this rank does, and say whom it waits for if that is due."""
        now_s, seen, last = self.clock(), self.see(), self._last
        self._last = now_s, seen
        if last is None:
            return
        last_s, before = last
        elapsed_s, is_same = now_s - last_s, seen.stack == before.stack
        step, limit_s, pace = self.progress.step, self.progress.limit_s, self.progress.pace
        is_limited = step > 0 and seen.place in _LIMITED
        is_idle = seen.thread_s - before.thread_s <= _IDLE_SHARE * elapsed_s
        is_idle |= self.progress.spins and is_limited
        if math.isfinite(limit_s) and not (step and is_same and is_idle and seen.place is None):
            # Written by a thread of its own, also if the main thread keeps the interpreter's lock.
            faulthandler.dump_traceback_later(limit_s)
        if seen.place is None or not is_same or not is_idle:
            self._since_s, self._next_minute = None, 1
            self._seen.clear()
            is_busy = seen.process_s - before.process_s >= _BUSY_SHARE * elapsed_s
            works = (is_busy and not self.progress.spins) or not is_same
            self._post(_WORKS if works and (self.rank == 0 or step) else _IDLE)
            return
        if self._since_s is None:
            self._since_s = last_s
        waited_s = now_s - self._since_s
        self._post(_WAITS if waited_s >= _POST_AFTER_S * pace else _IDLE)
        if waited_s >= _READ_AFTER_S * pace and self.rank < _NUM_SPEAKERS:
            missing = self._find_missing(now_s)
            minutes = int(waited_s // 60)
            where = f"{seen.place} of step {step}" if is_limited else seen.place
            # Posts are first read some time after the wait began.
            since_s = now_s - limit_s + _READ_AFTER_S * pace
            silent = [rank for rank in missing if self._seen[rank][1] <= since_s]
            if is_limited and waited_s >= limit_s and silent:
                limit = f"{limit_s / 60:g} minutes ('train.stall_minutes')"
                self.end(f"{_name_ranks(silent)} stalled in {where}: no sign within {limit}")
            if missing and minutes >= self._next_minute:
                self._next_minute = 2 ** minutes.bit_length()
                waited = plural(minutes, "minute")
                self.say(f"waiting for {_name_ranks(missing)} in {where} for {waited}")

    def _post(self, kind: str) -> None:
        if kind == _IDLE and self._posted == _IDLE:
            return
        self._posted = kind
        self._num_posts += 1
        self.board.post(self.rank, f"{kind} {self._num_posts}")

    def _find_missing(self, now_s: float) -> list[int]:
        """Return the ranks that others wait for; none if another rank is to name them."""
        texts = self.board.read()
        if texts is None:
            # The process that holds the board does not run.
            self._seen.setdefault(0, ("", now_s))
            return [0] if self.is_board_on_main and self.rank == 1 else []
        for rank, text in enumerate(texts):
            if self._seen.get(rank, ("", 0.0))[0] != text:
                self._seen[rank] = text, now_s
        oldest_s = now_s - _OUTDATED_AFTER_S * self.progress.pace
        kinds = {
            rank: text.split()[0] if seen_s > oldest_s else _IDLE
            for rank, (text, seen_s) in self._seen.items()
        }
        kinds[self.rank] = _WAITS
        if any(kinds[rank] == _WAITS for rank in range(self.rank)):
            return []
        missing = [rank for rank in range(self.world_size) if kinds[rank] != _WAITS]
        return [] if missing == [0] and kinds[0] == _WORKS else missing


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {list_first([str(rank) for rank in ranks], _MOST_NAMED)}"


@contextmanager
def stalls_watched(rank: int, world_size: int, store: Any, progress: Progress) -> Iterator[None]:
    """Watch the calling thread in a block, with the group's store; every rank calls this."""
    thread = threading.get_ident()
    board = StoreBoard(store, world_size)
    board.post(rank, _IDLE)
    watch = StallWatch(
        rank=rank,
        world_size=world_size,
        board=board,
        say=lambda line: say(rank, line),
        see=lambda: look_at(thread, progress.step),
        progress=progress,
        end=_end,
        # torchrun holds the store in its own process.
        is_board_on_main=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )
    has_ended = threading.Event()

    def run() -> None:
        with suppress(RuntimeError):  # A broken connection ends the watch; the main thread reports.
            while not has_ended.wait(_LOOK_EVERY_S * progress.pace):
                watch.look()
        faulthandler.cancel_dump_traceback_later()

    watcher = threading.Thread(target=run, name="memguard-stalls", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        has_ended.set()
        watcher.join(1.0)


def _end(line: str) -> None:
    from memguard.runtime.ended import close_attempt  # Needs pydantic.

    report_exit(report := ExitReport(code=1, kind="Stalled", text=f"memguard: {line}"))
    # The run's folder may be what hangs.
    threading.Timer(_ANSWER_WITHIN_S, os._exit, (1,)).start()
    if folder := os.environ.get(RUN_FOLDER):
        close_attempt(Path(folder), report)
    os._exit(1)


# -- the line --------------------------------------------------------------------------------------


def say(rank: int, line: str) -> None:
    """Show a line of any rank: on standard error, or through the launcher of `--nproc`."""
    report_file = os.environ.get(EXIT_REPORT_FILE)
    if rank == 0:
        Console().info(line)
    elif report_file:
        notice = Path(report_file).with_suffix(".notice")
        with suppress(OSError):
            unfinished = notice.with_suffix(".unfinished")
            unfinished.write_text(line, encoding="utf-8")
            unfinished.replace(notice)
    else:
        print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)


def take_notice(report_file: Path) -> str | None:
    """Return the line that a rank has written since the last call; None if it has not."""
    notice = report_file.with_suffix(".notice")
    try:
        line = notice.read_text(encoding="utf-8")
        notice.unlink()
    except OSError:
        return None
    return line
