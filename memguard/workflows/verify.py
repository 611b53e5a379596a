"""`memguard verify`: what of a run, or of an audit, is still what was written. No torch.

    config.yaml   its last line
    prepared      prepared/, the run's own key
    manifest      manifest.jsonl: as prepared, and as counted after training
    checkpoints   each against its manifest
    metrics       metrics.jsonl: trained.json; before that the copy in the last checkpoint
    model         model/ without its card: trained.json
    audit         audit.json

Nothing is changed, and nothing is read that is not compared.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memguard.config import RunConfig, load_run_config
from memguard.errors import ConfigError, MemguardError, ModelError, RecordError
from memguard.records.audit_files import (
    AUDIT_FILES,
    CARD,
    PAGE,
    REPORT,
    SCORES,
    find_audit_damage,
    has_audit,
)
from memguard.records.run_files import (
    UNLISTED,
    find_checkpoint_damage,
    find_config_damage,
    find_prepared_damage,
    find_reference_damage,
    find_trained_damage,
    has_prepared,
    has_trained,
    list_checkpoints,
)
from memguard.records.sealed import Damage
from memguard.workflows.run_folder import check_free

State = Literal["whole", "damaged", "not there yet"]
_MEND_CONFIG = "'memguard train' with the file that the run was started from writes it again"
_MEND_UNLISTED = "it would be read with the rest: move away what this run has not written"
MANIFEST, METRICS = "manifest.jsonl", "metrics.jsonl"
_RUN_FILES = ("config.yaml", "prepared", "checkpoints", "trained.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a folder."""

    name: str
    state: State
    note: str
    """How much was read; of what is not there yet, what it waits for."""
    damages: Sequence[Damage] = ()
    mend: str | None = None
    """What makes it whole again, a clause; None where nothing is damaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What was found in a folder."""

    folder: Path
    parts: tuple[Part, ...]
    is_at_work: bool
    """Another process was writing there: what it had in hand may look damaged."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is damaged; what is not there yet is not."""
        return all(part.state != "damaged" for part in self.parts)

    def describe(self) -> dict[str, Any]:
        """Return it for `--json`."""
        return {
            "folder": str(self.folder),
            "whole": self.is_whole,
            "at_work": self.is_at_work,
            "parts": [
                {
                    "name": part.name,
                    "state": part.state,
                    "note": part.note,
                    "damages": [{"file": one.file, "what": one.what} for one in part.damages],
                    "mend": part.mend,
                }
                for part in self.parts
            ],
        }


OnRead = Callable[[str, int], object]
"""(what is read next, its bytes)"""


def verify(folder: Path, on_read: OnRead) -> Verified:
    """Compare all that a run, or an audit, has written with the hashes written with it.

    Args:
        folder: of a run, or of an audit that was given `--out`.
        on_read: told before each part: reading it may take long.

    Raises:
        ConfigError: it is neither.
    """
    at_work = _is_at_work(folder)
    parts: tuple[Part, ...] = ()
    if any((folder / name).exists() for name in _RUN_FILES):
        parts = tuple(_verify_run(folder, on_read))
    elif any((folder / name).exists() for name in (AUDIT_FILES, REPORT)):
        parts = (_verify_audit(folder, on_read),)
    if parts:
        return Verified(folder=folder, parts=parts, is_at_work=at_work)
    raise ConfigError(
        f"'{folder}' is neither the folder of a run (no config.yaml) nor of an audit "
        f"(no {AUDIT_FILES})"
    )


def _is_at_work(folder: Path) -> bool:
    try:
        with suppress(OSError):  # A folder that is only read is no fault here.
            check_free(folder)
    except ConfigError:
        return True
    return False


def load_own_config(folder: Path) -> RunConfig:
    """Read the config.yaml that a run wrote into its folder.

    Raises:
        ConfigError: another version wrote it, with settings that this one does not know.
        RecordError: it is not what the run wrote.
    """
    _refuse(folder, find_config_damage(folder), _MEND_CONFIG)
    return load_run_config(folder / "config.yaml")


def check_finished(folder: Path) -> None:
    """Refuse a run whose audit would measure something else than what was trained.

    Raises:
        ModelError: training has not ended.
        RecordError: config.yaml, the prepared documents, manifest, metrics or model are damaged.
    """
    train = _tell_train(folder)
    _refuse(folder, find_config_damage(folder), _MEND_CONFIG)
    if not has_trained(folder):
        has_model = (folder / "model" / "config.json").is_file()
        why = "is not trained to its end" if has_model else "has no model/ yet"
        raise ModelError(f"'{folder}' {why}: finish it with {train}")
    _refuse(folder, find_prepared_damage(folder), f"'{train}' prepares the documents again")
    damages = find_trained_damage(folder)
    is_unlisted = any(one.what == UNLISTED for one in damages)
    mend = _MEND_UNLISTED if is_unlisted else f"'{train}' goes on from the last checkpoint"
    _refuse(folder, damages, mend)


def _refuse(folder: Path, damages: Sequence[Damage], mend: str) -> None:
    if damages:
        more = f" (and {len(damages) - 1:,} more)" if len(damages) > 1 else ""
        raise RecordError(f"'{folder / damages[0].file}' {damages[0].what}{more}. {mend}")


def _tell_train(folder: Path) -> str:
    """Return the command that trains a run on in its folder, wherever that lies by now."""
    command = ["memguard", "train", str(folder / "config.yaml")]
    with suppress(MemguardError):
        config = load_run_config(folder / "config.yaml")
        here = folder.resolve()
        if (Path(config.output_dir) / config.name).resolve() != here:
            command += [f"name={here.name}", f"output_dir={here.parent}"]
    return shlex.join(command)


def _verify_run(folder: Path, on_read: OnRead) -> Iterator[Part]:
    train = _tell_train(folder)
    yield _tell("config.yaml", find_config_damage(folder), note="", mend=_MEND_CONFIG)
    on_read("documents", _measure([folder / "prepared", folder / MANIFEST])[1])
    prepared = find_prepared_damage(folder)
    on_read("model", _measure([folder / "model"])[1])
    trained = find_trained_damage(folder)
    yield from _verify_documents(folder, prepared, trained)
    saves: dict[Path, list[Damage]] = {}
    for path in list_checkpoints(folder / "checkpoints"):
        on_read(path.name, _measure([path])[1])
        saves[path] = find_checkpoint_damage(path)
    yield _verify_checkpoints(folder, saves)
    whole = [path for path, damages in saves.items() if not damages]
    yield _verify_metrics(folder, trained, whole)
    # After training nothing needs them.
    if not has_trained(folder) and (lost := find_reference_damage(folder)):
        mend = f"'{train}' measures them again"
        yield _tell("first losses", lost, note="", mend=mend)
    if has_trained(folder):
        damages = [one for one in trained if one.file not in (MANIFEST, METRICS)]
        mend = f"'{train}' exports it again from the last checkpoint"
        if any(one.what == UNLISTED for one in damages):
            mend = _MEND_UNLISTED
        elif not whole:
            mend = "no whole checkpoint is left: take it from a copy of the run"
        note = _count(_measure([folder / "model"]))
        yield _tell("model", damages, note=note, mend=mend)
    elif has_audit(folder / "audit"):
        # Only a run whose training has ended is audited.
        ended = Damage(file="trained.json", what="is missing, and the run has been audited")
        yield _tell("model", [ended], note="", mend=f"'{train}' makes it again")
    else:
        yield Part(name="model", state="not there yet", note=f"'{train}' goes on to it")
    if has_audit(folder / "audit"):
        yield _verify_audit(folder / "audit", on_read, run=folder)
    else:
        yield Part(name="audit", state="not there yet", note=f"'memguard audit {folder}' makes it")


def _verify_documents(
    folder: Path, prepared: Sequence[Damage], trained: Sequence[Damage]
) -> Iterator[Part]:
    train = _tell_train(folder)
    if not (has_prepared(folder) or prepared):
        yield Part(name="prepared", state="not there yet", note=f"'{train}' makes it")
        return
    yield _tell(
        "prepared",
        [one for one in prepared if one.file != MANIFEST],
        note=_count(_measure([folder / "prepared"])),
        mend=f"'{train}' prepares the documents again",
    )
    # As it was prepared, or as it was counted after training: one of the two tells enough.
    damages = [one for one in (*prepared, *trained) if one.file == MANIFEST][:1]
    yield _tell(
        "manifest",
        damages,
        note=_count(_measure([folder / MANIFEST])),
        mend=f"'{train}' makes it again",
    )


def _verify_checkpoints(folder: Path, saves: Mapping[Path, Sequence[Damage]]) -> Part:
    name = "checkpoints"
    if not saves:
        note = "none is kept" if has_trained(folder) else "training saves them"
        return Part(name=name, state="not there yet", note=note)
    damages = [
        Damage(file=f"{name}/{path.name}/{one.file}", what=one.what)
        for path, found in saves.items()
        for one in found
    ]
    mend = f"'{_tell_train(folder)}' passes over what is damaged"
    if has_trained(folder):
        mend = "training has ended and needs no save: delete the folder of each that is damaged"
    return _tell(
        name,
        damages,
        note=f"{_plural(len(saves), 'save')}, {_count(_measure(list(saves)))}",
        mend=mend,
    )


def _verify_metrics(folder: Path, trained: Sequence[Damage], whole: Sequence[Path]) -> Part:
    path, copy = folder / METRICS, whole[-1] / METRICS if whole else None
    if has_trained(folder):
        damages = [one for one in trained if one.file == METRICS]
        note = _count(_measure([path]))
    elif copy is not None and copy.is_file():
        damages = _hold_against(path, copy.read_bytes())
        note = f"as far as {copy.parent.name} has it"
    elif path.exists():
        return Part(name="metrics", state="not there yet", note="compared from the first save on")
    else:
        return Part(name="metrics", state="not there yet", note="training writes it")
    return _tell("metrics", damages, note=note, mend=f"'{_tell_train(folder)}' restores it")


def _hold_against(path: Path, copy: bytes) -> list[Damage]:
    if not path.is_file():
        return [Damage(file=path.name, what="is missing")]
    with path.open("rb") as file:
        if file.read(len(copy)) == copy:
            return []
    return [Damage(file=path.name, what="does not begin as the last checkpoint has it")]


def _verify_audit(folder: Path, on_read: OnRead, run: Path | None = None) -> Part:
    covered = [folder / name for name in (REPORT, SCORES, PAGE)]
    on_read("audit", _measure(covered)[1])
    found = find_audit_damage(folder)
    place = "" if run is None else f"{folder.name}/"
    again = "the same 'memguard audit' again" if run is None else f"'memguard audit {run}'"
    mend = f"{again} makes it, from the scores that are kept"
    if all(one.file in (PAGE, CARD) for one in found):
        mend = f"'memguard report {run or folder}' renders it again"
    return _tell(
        "audit",
        [
            one if one.file == CARD else Damage(file=f"{place}{one.file}", what=one.what)
            for one in found
        ],
        note=_count(_measure(covered)),
        mend=mend,
    )


def _tell(name: str, damages: Sequence[Damage], *, note: str, mend: str) -> Part:
    if damages:
        return Part(name=name, state="damaged", note=note, damages=tuple(damages), mend=mend)
    return Part(name=name, state="whole", note=note)


def _measure(paths: Sequence[Path]) -> tuple[int, int]:
    """Return how many files there are, and how many bytes, in files and folders."""
    files = [
        file
        for path in paths
        for file in (path.rglob("*") if path.is_dir() else [path])
        if file.is_file()
    ]
    return len(files), sum(file.stat().st_size for file in files)


def _count(size: tuple[int, int]) -> str:
    return f"{_plural(size[0], 'file')}, {format_bytes(size[1])}"


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def format_bytes(count: int) -> str:
    """Write bytes as ``12 bytes``, ``3.4 MB``, ``15.2 GB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return _plural(count, "byte")
