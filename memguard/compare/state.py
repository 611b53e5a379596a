"""Which runs of a sweep are finished, and which go on.

finished.json   written last: the content hash under which the run was completed
started.json    written first: the content hash under which the folder was begun
"""

from contextlib import suppress
from pathlib import Path
from typing import Literal

from memguard.compare.sweep import Sweep, SweepRun
from memguard.errors import RecordError
from memguard.records import Record, load_record, save_record

RunState = Literal["finished", "continues", "starts", "replaced"]
"""
finished    nothing to do
continues   begun under the same content hash: the child process resumes
starts      there is no folder yet
replaced    the folder holds something else; it is set aside and the run starts afresh
"""

_SENTENCES: dict[RunState, str] = {
    "finished": "finished before",
    "continues": "continue where they stopped",
    "starts": "start",
    "replaced": "start afresh (other settings, documents or version before; old folder kept)",
}


_NAMED = 8
"""Runs that a line names."""


class _Mark(Record):
    """The content of both files."""

    key: str


def is_finished(run: SweepRun) -> bool:
    """Tell whether a run was completed under its present key and its results are still there."""
    # The base run leaves a model, a setting an audit: the least that the next stage reads.
    audited = [run.folder / "audit" / name for name in ("report.json", "records.parquet")]
    results = audited if run.config.audit.enabled else [run.folder / "model" / "config.json"]
    return read_finished(run.folder) == run.key and all(path.is_file() for path in results)


def find_state(run: SweepRun) -> RunState:
    """Say what is to be done for a run."""
    if is_finished(run):
        return "finished"
    if _read_key(run.folder / "started.json") == run.key:
        return "continues"
    return "replaced" if run.folder.is_dir() and any(run.folder.iterdir()) else "starts"


def prepare_folder(run: SweepRun) -> RunState:
    """Make a run's folder ready for its child process and return what that process will do.

    A folder begun under another key is renamed (``plain.replaced-1``), never deleted: a process
    started in it would go on from checkpoints of another run.
    """
    state = find_state(run)
    if state == "replaced":
        run.folder.rename(_find_free_name(run.folder))
    if state in ("starts", "replaced"):
        save_record(_Mark(key=run.key), run.folder / "started.json")
    return state


def mark_finished(folder: Path, key: str) -> None:
    """Say that the run in ``folder`` was completed under ``key``; the last thing to be written."""
    save_record(_Mark(key=key), folder / "finished.json")


def read_finished(folder: Path) -> str | None:
    """Return the key under which the run in ``folder`` was completed, if it was."""
    return _read_key(folder / "finished.json")


def describe_sweep(sweep: Sweep) -> tuple[str, ...]:
    """Return a line for each state that any run is in: ``2 of 4 runs start: plain, k4``."""
    states = {run.name: find_state(run) for run in sweep.in_order}
    lines = []
    for state, sentence in _SENTENCES.items():
        names = [name for name, found in states.items() if found == state]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            listed = ", ".join(names[:_NAMED]) + more
            lines.append(f"{len(names)} of {len(states)} runs {sentence}: {listed}")
    return tuple(lines)


def _read_key(path: Path) -> str | None:
    # A mark that cannot be read is no mark: the run is made again.
    with suppress(RecordError):
        return load_record(_Mark, path).key
    return None


def _find_free_name(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.replaced-{number}")).exists():
        number += 1
    return aside
