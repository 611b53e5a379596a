"""When and whom a SIGKILL hits, drawn by a seed, and how it is delivered.

Moment    a share of the time that the whole command takes
Change    a few milliseconds after the n-th change that rank 0 makes to a file or folder
Stage     as a stage of the second save begins, which training does not wait for
"""

import importlib
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from fault_runs import find_group, start_command
from ranks import RankPool

_SAVE, _THREAD = "memguard.train.checkpoint", "memguard.train.resume"
SAVE_STAGES: dict[str, tuple[str, str, bool]] = {
    "the copy": (_THREAD, "BackgroundSave._copy", True),
    "the thread": (_THREAD, "to_stored", True),
    "a folder": (_SAVE, "make_temporary_folder", False),
    "tensors": (_SAVE, "save", True),
    "their places": ("memguard.train.checkpoint_storage", "JsonWriter.finish", False),
    "the log": (_SAVE, "_copy_start", False),
    "hashes": (_SAVE, "_sum_part", True),
    "the manifest": (_SAVE, "_commit", False),
    "the name": (_SAVE, "commit", False),
    "the wait": (_THREAD, "BackgroundSave._join", True),
    "old ones": (_SAVE, "hide", False),
}
"""Where each stage of a save in the background begins, and whether on every rank."""
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")
Victim = Literal["all", "rank", "launcher"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One SIGKILL."""

    share: float
    """Of the whole command's time, or of its changes."""
    at_change: bool
    delay_s: float
    """After the change."""
    victim: Victim
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KilledRun:
    """What happens to one run."""

    num_processes: int
    kills: tuple[Kill, ...]


def draw_killed_run(seed: int, num_processes: int) -> KilledRun:
    """Draw one to three kills of a command on so many processes."""
    draw = random.Random(f"kills {seed}")
    kills = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        victim: Victim = "all"
        if num_processes > 1:
            victim = draw.choice(("all", "all", "rank", "launcher"))
        kills.append(
            Kill(
                share=draw.random(),
                at_change=draw.random() < 0.5,
                delay_s=draw.choice((0.0, 0.0, draw.uniform(0, 0.02))),
                victim=victim,
                rank=draw.randrange(num_processes),
            )
        )
    return KilledRun(num_processes=num_processes, kills=tuple(kills))


@dataclass(frozen=True, kw_only=True, slots=True)
class Undisturbed:
    """How long a command takes that nothing happens to."""

    wall_s: float
    num_changes: int


def measure(ranks: RankPool, folder: Path, arguments: tuple[object, ...]) -> Undisturbed:
    """Run a command to its end.

    Raises:
        AssertionError: it failed.
    """
    counted = folder / "changes"
    started = time.monotonic()
    log = folder / "log"
    process = start_command(ranks, folder, log, arguments, count_changes, counted)
    process.join()
    assert process.exitcode == 0, log.read_text()
    return Undisturbed(
        wall_s=time.monotonic() - started, num_changes=len(counted.read_bytes().split(b"\n"))
    )


def kill_once(
    ranks: RankPool, folder: Path, arguments: tuple[object, ...], kill: Kill, usual: Undisturbed
) -> bool:
    """Start a command, kill it, wait until it is gone; return whether it was still at work."""
    log = folder / "log"
    if kill.at_change:
        number = round(kill.share * usual.num_changes)
        victim = "self" if kill.victim == "rank" else kill.victim
        given = (kill_at_change, number, kill.delay_s, victim)
        process = start_command(ranks, folder, log, arguments, *given)
    else:
        process = start_command(ranks, folder, log, arguments)
        process.join(kill.share * usual.wall_s)
        _kill(process, kill)
    process.join()
    wait_until_gone(process)
    return process.exitcode != 0


def wait_until_gone(process: BaseProcess) -> None:
    """Wait for all processes of a command; where the launcher alone was killed, its ranks save."""
    assert process.pid is not None
    while find_group(process.pid):
        time.sleep(0.01)


def kill_at_stage(stage: str, victim: Literal["all", "self"]) -> None:
    """Kill as a stage of the second save begins: all processes, or one rank."""
    module, place, is_on_all = SAVE_STAGES[stage]
    owner: Any = importlib.import_module(module)
    *outer, name = place.split(".")
    for each in outer:
        owner = getattr(owner, each)
    # The first save that deletes an old one is the third.
    real, num_left = getattr(owner, name), 1 if stage == "old ones" else 2

    def strike(*arguments: Any, **named: Any) -> Any:
        nonlocal num_left
        last = int(os.environ.get("WORLD_SIZE", "1")) - 1
        if os.environ.get("RANK", "0") == str(last if is_on_all else 0):
            num_left -= 1
            if num_left == 0:
                if victim == "all":
                    os.killpg(0, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    setattr(owner, name, strike)


def _kill(process: BaseProcess, kill: Kill) -> None:
    assert process.pid is not None
    try:
        if kill.victim == "all":
            os.killpg(process.pid, signal.SIGKILL)
        elif kill.victim == "launcher":
            os.kill(process.pid, signal.SIGKILL)
        else:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if children:
                os.kill(int(children[kill.rank % len(children)]), signal.SIGKILL)
    except (ProcessLookupError, FileNotFoundError):
        # It has ended before.
        pass


def _is_change(event: str, arguments: tuple[Any, ...]) -> bool:
    if os.environ.get("RANK", "0") != "0":
        return False
    if event == "open":
        path, mode, flags = arguments
        writes = (mode or "r")[0] in "wxa" if mode else bool(flags & (os.O_WRONLY | os.O_RDWR))
    else:
        path, writes = arguments[0], event in _CHANGES
    if not writes or not isinstance(path, str | bytes | os.PathLike):
        return False
    inside = os.path.relpath(os.fsdecode(path))
    return inside.startswith(("runs", "cache"))


def count_changes(log: Path) -> None:
    """Write a line to ``log`` at each change to what is below `runs/` and `cache/`."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", *_CHANGES) and _is_change(event, arguments):
            os.write(handle, f"{event} {arguments[0]}\n".encode())

    sys.addaudithook(note)


def kill_at_change(number: int, delay_s: float, victim: Victim | Literal["self"]) -> None:
    """Kill once so many changes have been made, a little later."""
    done = 0
    launcher = os.getpid()

    def strike() -> None:
        time.sleep(delay_s)
        if victim == "all":
            os.killpg(0, signal.SIGKILL)
        os.kill(launcher if victim == "launcher" else os.getpid(), signal.SIGKILL)

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal done
        if event not in ("open", *_CHANGES) or not _is_change(event, arguments):
            return
        done += 1
        if done == number + 1:
            if delay_s == 0:
                strike()
            else:
                threading.Thread(target=strike, daemon=True).start()

    sys.addaudithook(look)
