"""RUN/ended.json: how the last attempt at a run ended; the one rule of whether another follows.

The launcher or rank 0 writes that an attempt has begun, the first rank that fails how it ended. The
rule is that of `--max-restarts`, of the Slurm files, and of workers that torchrun starts again.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from memguard.errors import MemguardError, OtherRankFailed
from memguard.records import Record, save_record
from memguard.records.run_files import list_checkpoints
from memguard.runtime.children import RUN_FOLDER, ExitReport, is_started_by_nproc, own_rank

if TYPE_CHECKING:
    from memguard.runtime.processes import Runtime

_MOST_FRUITLESS = 2
_STOPPED = "it was stopped"
_FINAL = {0: "it has ended", 2: "correct its settings", 3: "correct its inputs"}
_FINAL |= {130: _STOPPED, 143: _STOPPED}


class Ended(Record):
    """One attempt at a run, since it began or as it ended."""

    attempt: int = 1
    """Number in a row of restarts, from 1."""
    why: str = "first start"
    """How the attempt before it ended."""
    exit_code: int | None = None
    """Null: it goes on, or all its processes were killed."""
    error: str = ""
    """Its class; of a killed rank what another one saw."""
    newest_checkpoint: int = 0
    """Its step, when the attempt began or, later, ended; 0 for none."""
    num_fruitless: int = 0
    """Attempts in a row that made no new checkpoint."""
    diverged: tuple[int, ...] = ()
    """Steps at which the attempts in this row diverged."""
    at_s: float
    """Time when it began or ended, since 1970."""

    def explain_end(self, max_restarts: int | None = None) -> str | None:
        """Return why no attempt may follow in a row of ``max_restarts``; None if one may."""
        place = f"step {self.newest_checkpoint}" if self.newest_checkpoint else "the start"
        if self.exit_code in _FINAL:
            return _FINAL[self.exit_code]
        if self.exit_code == 4 and self.diverged[-1] in self.diverged[:-1]:
            return f"training diverged at step {self.diverged[-1]} again, restarted from {place}"
        if self.num_fruitless >= _MOST_FRUITLESS:
            return f"{self.num_fruitless} attempts in a row made no checkpoint after {place}"
        if max_restarts is not None and self.attempt > max_restarts:
            return f"it was started again {max_restarts} times"
        return None

    def describe(self) -> str:
        """Return how it ended."""
        return "killed" if self.exit_code is None else f"exit code {self.exit_code}, {self.error}"


def begin_attempt(folder: Path, *, is_restart: bool) -> Ended:
    """Write that an attempt goes on; one that is no restart begins a row."""
    before, newest = _read_closed(folder), _find_newest(folder)
    begun = Ended(at_s=time.time(), newest_checkpoint=newest)
    if before is not None:
        kept: dict[str, Any] = {"why": before.why if before.exit_code == 0 else before.describe()}
        if is_restart and before.exit_code not in (0, 130, 143):
            kept |= {"num_fruitless": before.num_fruitless, "diverged": before.diverged}
            kept["attempt"] = before.attempt + 1
        begun = begun.model_copy(update=kept)
    save_record(begun, folder / "ended.json")
    return begun


def close_attempt(folder: Path, report: ExitReport) -> None:
    """Write how an attempt ended, if no rank has failed before."""
    ended = _read(folder)
    if ended is not None and not ended.exit_code:
        error = "lost a rank" if report.follows else report.kind
        steps = (*ended.diverged, *([] if report.step is None else [report.step]))
        values = {"exit_code": report.code, "error": error, "diverged": steps, "at_s": time.time()}
        with suppress(OSError):
            save_record(_close(ended, folder, **values), folder / "ended.json")


def read_why(folder: Path) -> str:
    """Return why the attempt that goes on was started."""
    return (_read(folder) or Ended(at_s=0.0)).why


def may_follow(folder: Path, max_restarts: int, code: int = 1) -> bool:
    """Say whether an attempt follows the one that this process or a sibling began, and that failed.

    ``code`` is how it ended if no rank could write that.
    """
    ended, why_not = _read(folder), "it had not begun"
    if _is_own(ended):
        close_attempt(folder, ExitReport(code=code, kind="no message", text=""))
        why_not = (_read(folder) or ended).explain_end(max_restarts) or ""
    again = f"not started again: {why_not}" if why_not else "starting again"
    print(f"memguard: {again}", file=sys.stderr, flush=True)
    return not why_not


@contextmanager
def attempted(folder: Path, runtime: "Runtime") -> Iterator[None]:
    """Record an attempt at a locked run, on all ranks; the command line writes how one failed.

    One that the launcher has begun goes on.
    """

    def begin() -> None:
        ended = _read(folder)
        if _is_own(ended) and ended.exit_code is None and is_started_by_nproc():
            return
        is_requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
        begin_attempt(folder, is_restart=_is_own(ended) or is_requeued)

    runtime.only_on_main(begin)
    os.environ[RUN_FOLDER] = str(folder)
    yield
    os.environ.pop(RUN_FOLDER, None)
    runtime.only_on_main(partial(close_attempt, folder, ExitReport(code=0, kind="", text="")))


def refuse_restart(folder: Path) -> None:
    """End a worker that torchrun has started again after an end that is final, with its code."""
    ended = _read_closed(folder) if "TORCHELASTIC_RUN_ID" in os.environ else None
    if _is_own(ended) and (why_not := ended.explain_end()):
        code = 1 if ended.exit_code is None else ended.exit_code
        if own_rank() > 0:
            raise OtherRankFailed(0, code)
        refusal = MemguardError(f"not started again: {why_not} ({ended.describe()})")
        refusal.exit_code = code
        raise refusal


def read_start_s(process: int) -> float:
    """Return when a process was started, in seconds since 1970."""
    ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    boot_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot_s + ticks / os.sysconf("SC_CLK_TCK")


def _is_own(ended: Ended | None) -> TypeGuard[Ended]:
    """Return whether an attempt was begun by the program that started this process."""
    return ended is not None and ended.at_s > read_start_s(os.getppid() or os.getpid())


def _read(folder: Path) -> Ended | None:
    with suppress(OSError, ValueError):
        return Ended.model_validate_json((folder / "ended.json").read_bytes())
    return None


def _read_closed(folder: Path) -> Ended | None:
    ended = _read(folder)
    return ended and (_close(ended, folder) if ended.exit_code is None else ended)


def _close(ended: Ended, folder: Path, **values: Any) -> Ended:
    newest = _find_newest(folder)
    is_fruitless = values.get("exit_code") != 0 and newest <= ended.newest_checkpoint
    num_fruitless = ended.num_fruitless + 1 if is_fruitless else 0
    values |= {"newest_checkpoint": newest, "num_fruitless": num_fruitless}
    return ended.model_copy(update=values)


def _find_newest(folder: Path) -> int:
    names = [path.name.removeprefix("step-") for path in list_checkpoints(folder / "checkpoints")]
    return max((int(name) for name in names if name.isdecimal()), default=0)
