"""Determines which runs of a sweep are finished and which continue.

finished.json   written last: the content hash of the completed run
started.json    written first: the content hash of the run that was started in the folder

A damaged finished.json costs little: the run's own process finds that nothing is left to do. With a
damaged started.json, the content of the folder is unknown.
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
continues   started under the same content hash: the child process resumes
starts      the folder does not exist yet
replaced    the folder contains another run; it is renamed and the run starts from the beginning
unknown     started.json is damaged; the folder is renamed in the same way
"""

_SENTENCES: dict[RunState, str] = {
    "finished": "already finished",
    "continues": "resume",
    "starts": "start",
    "replaced": "start again (settings, documents or version changed; old folder kept)",
    "unknown": "start again (started.json is damaged; old folder kept)",
}


_NAMED = 8
"""Largest number of runs that a line names."""


class _Mark(SealedRecord):
    """The content of both files."""

    key: str


def is_finished(run: SweepRun) -> bool:
    """Return whether a run was completed under its present key and its results are intact."""
    if read_finished(run.folder) != run.key:
        return False
    # The next stage reads the audit of a setting, and the model of the base run.
    if run.config.audit.enabled:
        return not find_audit_damage(run.folder / "audit")
    return has_trained(run.folder) and not find_trained_damage(run.folder)


def find_state(run: SweepRun) -> RunState:
    """Return the state of a run, which determines what is to be done for it."""
    if is_finished(run):
        return "finished"
    path = run.folder / "started.json"
    started = _read_key(path)
    if started == run.key:
        return "continues"
    if started is None and path.exists():
        return "unknown"
    return "replaced" if run.folder.is_dir() and any(run.folder.iterdir()) else "starts"


def prepare_folder(run: SweepRun) -> RunState:
    """Prepare a run's folder for its child process and return the run's state.

    A folder that was started under another key is renamed (``plain.replaced-1``), never deleted: a
    process started in it would resume from checkpoints of another run.
    """
    state = find_state(run)
    if state in ("replaced", "unknown"):
        run.folder.rename(_find_free_name(run.folder))
    if state in ("starts", "replaced", "unknown"):
        save_sealed(_Mark(key=run.key), run.folder / "started.json")
    return state


def mark_finished(folder: Path, key: str) -> None:
    """Record that the run in ``folder`` was completed under ``key``; written last."""
    save_sealed(_Mark(key=key), folder / "finished.json")


def read_finished(folder: Path) -> str | None:
    """Return the key under which the run in ``folder`` was completed; None if it was not."""
    return _read_key(folder / "finished.json")


def describe_sweep(sweep: Sweep) -> tuple[str, ...]:
    """Return a line for each state with at least one run: ``2 of 4 runs start: plain, k4``."""
    states = {run.name: find_state(run) for run in sweep.in_order}
    lines = []
    for state, sentence in _SENTENCES.items():
        names = [name for name, of_run in states.items() if of_run == state]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            listed = ", ".join(names[:_NAMED]) + more
            lines.append(f"{len(names)} of {len(states)} runs {sentence}: {listed}")
    return tuple(lines)


def _read_key(path: Path) -> str | None:
    try:
        return load_sealed(_Mark, path).key
    except RecordError:
        return None  # A file that cannot be read counts as missing.


def _find_free_name(folder: Path) -> Path:
    number = 1
    while (renamed := folder.with_name(f"{folder.name}.replaced-{number}")).exists():
        number += 1
    return renamed
