"""Which runs of a sweep are finished, and which go on.

finished.json   written last: the content hash under which the run was completed
started.json    written first: the content hash under which the folder was begun

A finished.json that is damaged costs little: the run's own process finds that nothing is left to
do. Of a damaged started.json it is not known what the folder holds.
"""

from pathlib import Path
from typing import Literal

from memguard.compare.sweep import Sweep, SweepRun
from memguard.errors import RecordError
from memguard.records.audit_files import find_audit_damage
from memguard.records.run_files import find_trained_damage, has_trained
from memguard.records.sealed import SealedRecord, load_sealed, save_sealed

RunState = Literal["finished", "continues", "starts", "replaced", "unknown"]
"""
finished    nothing to do
continues   begun under the same content hash: the child process resumes
starts      there is no folder yet
replaced    the folder holds something else; it is set aside and the run starts afresh
unknown     its started.json is damaged; the same
"""

_SENTENCES: dict[RunState, str] = {
    "finished": "finished before",
    "continues": "continue where they stopped",
    "starts": "start",
    "replaced": "start afresh (other settings, documents or version before; old folder kept)",
    "unknown": "start afresh (started.json is damaged; old folder kept)",
}


_NAMED = 8
"""Runs that a line names."""


class _Mark(SealedRecord):
    """The content of both files."""

    key: str


def is_finished(run: SweepRun) -> bool:
    """Tell whether a run was completed under its present key and its results are still whole."""
    if read_finished(run.folder) != run.key:
        return False
    # The base run leaves a model, a setting an audit: the least that the next stage reads.
    if run.config.audit.enabled:
        return not find_audit_damage(run.folder / "audit")
    return has_trained(run.folder) and not find_trained_damage(run.folder)


def find_state(run: SweepRun) -> RunState:
    """Say what is to be done for a run."""
    if is_finished(run):
        return "finished"
    path = run.folder / "started.json"
    begun = _read_key(path)
    if begun == run.key:
        return "continues"
    if begun is None and path.exists():
        return "unknown"
    return "replaced" if run.folder.is_dir() and any(run.folder.iterdir()) else "starts"


def prepare_folder(run: SweepRun) -> RunState:
    """Make a run's folder ready for its child process and return what that process will do.

    A folder begun under another key is renamed (``plain.replaced-1``), never deleted: a process
    started in it would go on from checkpoints of another run.
    """
    state = find_state(run)
    if state in ("replaced", "unknown"):
        run.folder.rename(_find_free_name(run.folder))
    if state in ("starts", "replaced", "unknown"):
        save_sealed(_Mark(key=run.key), run.folder / "started.json")
    return state


def mark_finished(folder: Path, key: str) -> None:
    """Say that the run in ``folder`` was completed under ``key``; the last thing to be written."""
    save_sealed(_Mark(key=key), folder / "finished.json")


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
    try:
        return load_sealed(_Mark, path).key
    except RecordError:
        return None  # A mark that cannot be read is no mark.


def _find_free_name(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.replaced-{number}")).exists():
        number += 1
    return aside
