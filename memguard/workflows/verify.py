"""`memguard verify`: compares the files of a run or audit with recorded hashes, without torch.

    config.yaml   hash in its last line
    prepared      prepared/; the fingerprint of the identity key, whose file is elsewhere
    manifest      manifest.jsonl: hashes from preparation and from the end of training
    checkpoints   the manifest of each checkpoint
    metrics       metrics.jsonl: trained.json; before the end of training the last checkpoint's copy
    model         model/ or adapter/ without its card: trained.json
    base model    the files of the model that the adapters belong to: trained.json
    audit         audit.json
    gate          gate/gate.json, if there is one; and whether it judged the present report

No file is changed, and only files with recorded hashes are read. Private files of another user are
listed as not checked: a part is intact only if all of it was compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from memguard.errors import ConfigError, ModelError, RecordError, plural
from memguard.hf.adapter_config import say_where_base_is
from memguard.hf.identity import find_base_folder
from memguard.records import AuditReport, load_record
from memguard.records.audit_files import AUDIT_FILES, AUDITED, CARDS, PAGE, REPORT, has_audit
from memguard.records.folders import UNLISTED, AuditFolder, CheckpointFolder, GateFolder
from memguard.records.gate import GATE_FOLDER, has_gate
from memguard.records.run_files import (
    find_weights_folder,
    has_prepared,
    has_trained,
    list_checkpoints,
    load_summary,
    load_trained,
)
from memguard.records.sealed import (
    Damage,
    FileSum,
    SumFile,
    describe_unread_file,
    find_damage,
    is_closed,
    is_file,
    mark_unreadable,
    sum_file,
)
from memguard.workflows.common.folder import REPAIR_CONFIG, REPAIR_UNLISTED, RunFolder, check_free

State = Literal["intact", "damaged", "not checked", "not there yet"]
MANIFEST, METRICS = "manifest.jsonl", "metrics.jsonl"
BASE_MODEL = "base model"
_RUN_FILES = ("config.yaml", "prepared", "checkpoints", "trained.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a folder."""

    name: str
    state: State
    note: str
    """Amount of data read; for a part that does not exist yet, the step that creates it."""
    damages: Sequence[Damage] = ()
    not_checked: Sequence[str] = ()
    """Files and folders that this user may not read, relative to the folder of the run or audit."""
    repair: str | None = None
    """How to repair the part, a clause; None if nothing is damaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """Result of verifying a folder."""

    folder: Path
    parts: tuple[Part, ...]
    is_in_use: bool
    """Another process was using the folder: files that it was writing may look damaged."""

    @property
    def is_damaged(self) -> bool:
        """Whether a part is damaged."""
        return any(part.state == "damaged" for part in self.parts)

    @property
    def not_checked(self) -> list[str]:
        """Files that this user may not read."""
        return [file for part in self.parts for file in part.not_checked]

    @property
    def is_intact(self) -> bool:
        """Whether all that exists was checked and is undamaged."""
        return not (self.is_damaged or self.not_checked)

    def describe(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        return {
            "folder": str(self.folder),
            "intact": self.is_intact,
            "not_checked": self.not_checked,
            "in_use": self.is_in_use,
            "parts": [
                asdict(part)
                | {
                    "damages": [{"file": item.file, "what": item.what} for item in part.damages],
                    "not_checked": list(part.not_checked),
                }
                for part in self.parts
            ],
        }


OnRead = Callable[[str, int], object]
"""(part that is read next, its size in bytes)"""


def sum_shown(on_read: OnRead) -> SumFile:
    """Return what sums a file, and calls ``on_read`` before."""

    def read(path: Path) -> FileSum:
        on_read(path.name, path.stat().st_size)
        return sum_file(path)

    return read


def verify(folder: Path, on_read: OnRead, *, base: str | None = None) -> Verified:
    """Compare all files of a run or an audit with the hashes recorded when they were written.

    ``base`` is the present location of the model that the run's adapters belong to.
    """
    in_use = _is_in_use(folder)
    parts: tuple[Part, ...] = ()
    if any((folder / name).exists() for name in _RUN_FILES):
        parts = tuple(_verify_run(folder, on_read, base))
    elif any((folder / name).exists() for name in (AUDIT_FILES, REPORT)):
        parts = (_verify_audit(folder, on_read), *_verify_gate(folder, folder))
    if base is not None and find_weights_folder(folder).name != "adapter":
        raise ConfigError(f"--base '{base}': '{folder}' has no trained adapter. Leave it out")
    if parts:
        return Verified(folder=folder, parts=parts, is_in_use=in_use)
    raise ConfigError(
        f"'{folder}' is neither the folder of a run (no config.yaml) nor of an audit "
        f"(no {AUDIT_FILES})"
    )


def _is_in_use(folder: Path) -> bool:
    try:
        with suppress(OSError):  # A read-only folder is not an error here.
            check_free(folder)
    except ConfigError:
        return True
    return False


def _verify_run(folder: Path, on_read: OnRead, base: str | None) -> Iterator[Part]:
    run, train = RunFolder(folder), RunFolder(folder).make_resume_command()
    weights, has_ended = find_weights_folder(folder), has_trained(folder)
    yield _judge("config.yaml", run.find_damage("config"), repair=REPAIR_CONFIG)
    on_read("documents", _measure([folder / "prepared", folder / MANIFEST])[1])
    prepared = run.find_damage("prepared")
    on_read("model", _measure([weights])[1])
    trained = run.find_damage("trained")
    if has_prepared(folder) or prepared:
        summary = load_summary(folder)
        yield _judge(
            "prepared",
            [item for item in prepared if item.file != MANIFEST],
            repair=f"'{train}' prepares the documents again",
            note=_count([folder / "prepared"])
            + _write_key(summary.identity_key if summary else None),
        )
        # Preparation and the end of training may report the same damage: one message is enough.
        damages = [item for item in (*prepared, *trained) if item.file == MANIFEST][:1]
        repair = f"'{train}' writes it again"
        yield _judge("manifest", damages, repair=repair, note=_count([folder / MANIFEST]))
    else:
        yield _await("prepared", f"'{train}' creates it")
    saves: dict[Path, list[Damage]] = {}
    for path in list_checkpoints(folder / "checkpoints"):
        on_read(path.name, _measure([path])[1])
        saves[path] = CheckpointFolder(path).find_damage()
    yield _judge_checkpoints(folder, saves, train)
    intact = [path for path, damages in saves.items() if not damages]
    yield _judge_metrics(folder, trained, intact, repair=f"'{train}' restores it")
    # The losses before training are needed only until training ends.
    if not has_ended and (lost := run.find_damage("losses")):
        yield _judge("first losses", lost, repair=f"'{train}' measures them again")
    is_hidden = is_closed(folder / "audit")
    is_audited = not is_hidden and has_audit(folder / "audit")
    if has_ended:
        damages = [item for item in trained if item.file not in (MANIFEST, METRICS)]
        repair = f"'{train}' exports it again from the last checkpoint"
        if any(item.what == UNLISTED for item in damages):
            repair = REPAIR_UNLISTED
        elif not intact:
            repair = "no undamaged checkpoint is left: restore it from a copy of the run"
        yield _judge("model", damages, repair=repair, note=_count([weights]))
        is_read = not any(i.file.startswith(("trained.json", "adapter/")) for i in damages)
        if is_read and (files := load_trained(folder).base):
            yield _verify_base(weights, files, on_read, base)
    elif is_audited:
        # Only a run whose training has ended is audited.
        ended = Damage(file="trained.json", what="is missing, and the run has been audited")
        yield _judge("model", [ended], repair=f"'{train}' writes it again")
    else:
        yield _await("model", f"'{train}' creates it")
    if is_audited:
        yield _verify_audit(folder / "audit", on_read, run=folder)
    elif is_hidden:
        yield _judge("audit", [mark_unreadable("audit/")])
    else:
        yield _await("audit", f"'memguard audit {folder}' creates it")
    yield from _verify_gate(folder, folder / "audit")


def _judge_checkpoints(folder: Path, saves: Mapping[Path, Sequence[Damage]], train: str) -> Part:
    name, has_ended = "checkpoints", has_trained(folder)
    if is_closed(folder / name):
        return _judge(name, [mark_unreadable(f"{name}/")])
    if not saves:
        return _await(name, "none were kept" if has_ended else "training saves them")
    damages = [
        replace(item, file=f"{name}/{path.name}/{item.file}")
        for path, items in saves.items()
        for item in items
    ]
    repair = f"'{train}' skips damaged checkpoints"
    if has_ended:
        repair = "training has ended and needs no checkpoint: delete the damaged checkpoint folders"
    note = f"{plural(len(saves), 'checkpoint')}, {_count(list(saves))}"
    return _judge(name, damages, repair=repair, note=note)


def _judge_metrics(
    folder: Path, trained: Sequence[Damage], intact: Sequence[Path], *, repair: str
) -> Part:
    """Compare metrics.jsonl, or what a run that goes on has of it in its newest checkpoint."""
    path, copy = folder / METRICS, intact[-1] / METRICS if intact else None
    if has_trained(folder):
        damages = [item for item in trained if item.file == METRICS]
        return _judge("metrics", damages, repair=repair, note=_count([path]))
    if copy is None or not copy.is_file():
        later = "can be compared after the first checkpoint"
        return _await("metrics", later if path.exists() else "training writes it")
    damages, note = _compare_with_copy(path, copy.read_bytes()), copy.parent.name
    return _judge("metrics", damages, repair=repair, note=f"compared up to {note}")


def _compare_with_copy(path: Path, copy: bytes) -> list[Damage]:
    try:
        with path.open("rb") as file:
            if file.read(len(copy)) == copy:
                return []
    except OSError as error:
        return [describe_unread_file(path.name, error)]
    return [Damage(file=path.name, what="differs from the copy in the last checkpoint")]


def _verify_base(
    adapter: Path, files: Mapping[str, FileSum], on_read: OnRead, named: str | None
) -> Part:
    """Compare the base of a run's undamaged adapters with the model they were trained on."""
    repair = f"restore it, or {say_where_base_is(adapter)}"
    try:
        place = find_base_folder(adapter, files, base=named)
    except PermissionError as error:
        return _judge(BASE_MODEL, [mark_unreadable(str(error.filename))])
    except ModelError as error:
        # The message has the way out too.
        damage = Damage(file=BASE_MODEL, what=f"cannot be read: {error}")
        return _judge(BASE_MODEL, [damage], repair=repair)
    if place is None:
        note = "on the hub and not downloaded yet: 'memguard audit' checks it"
        return _await(BASE_MODEL, note)
    paths = [place / name for name in files]
    on_read(BASE_MODEL, _measure(paths)[1])
    damages = find_damage(place, files, shown_in=f"{place}/")
    return _judge(BASE_MODEL, damages, repair=repair, note=_count(paths))


def _verify_audit(folder: Path, on_read: OnRead, run: Path | None = None) -> Part:
    covered = [folder / name for name in AUDITED]
    on_read("audit", _measure(covered)[1])
    damages = AuditFolder(folder).find_damage()
    place = "" if run is None else f"{folder.name}/"
    again = "the same 'memguard audit' again" if run is None else f"'memguard audit {run}'"
    repair = f"{again} creates it again from cached scores"
    if all(item.file in (PAGE, *CARDS) or item.is_unreadable for item in damages):
        repair = f"'memguard report {run or folder}' renders it again"
    placed = [
        item if item.file in CARDS else replace(item, file=f"{place}{item.file}")
        for item in damages
    ]
    note = _count(covered)
    if run is None:
        with suppress(RecordError):
            note += _write_key(load_record(AuditReport, folder / REPORT).data.identity_key)
    return _judge("audit", placed, repair=repair, note=note)


def _verify_gate(folder: Path, audit: Path) -> Iterator[Part]:
    """Check what `memguard gate` wrote into the folder of a run or an audit."""
    place = folder / GATE_FOLDER
    if has_gate(place):
        repair = f"'memguard gate {folder} --policy FILE' judges the present report"
        gate = GateFolder(place, audit)
        note = _count([place])
        if gate.is_older:
            note += f"; older than this audit: {repair}"
        yield _judge(GATE_FOLDER, gate.find_damage(), repair=repair, note=note)


def _write_key(fingerprint: str | None) -> str:
    """Return the fingerprint of an identity key, whose file lies elsewhere, for a note."""
    return "" if fingerprint is None else f", identity key {fingerprint}"


def _judge(name: str, damages: Sequence[Damage], *, repair: str = "", note: str = "") -> Part:
    """Return a part that exists, with what is wrong with it."""
    closed = tuple(damage.file for damage in damages if damage.is_unreadable)
    found = tuple(damage for damage in damages if not damage.is_unreadable)
    state: State = "damaged" if found else "not checked" if closed else "intact"
    return Part(
        name=name,
        state=state,
        note="no permission" if state == "not checked" else note,
        damages=found,
        not_checked=closed,
        repair=repair if found else None,
    )


def _await(name: str, note: str) -> Part:
    """Return a part that does not exist yet; ``note`` says what creates it."""
    return Part(name=name, state="not there yet", note=note)


def _measure(paths: Sequence[Path]) -> tuple[int, int]:
    """Return the number of files and their total size (bytes), in files and folders.

    Files in folders that this user may not enter are left out.
    """
    sizes = []
    for path in paths:
        for file in path.rglob("*") if path.is_dir() else [path]:
            with suppress(PermissionError):
                if is_file(file):
                    sizes.append(file.stat().st_size)
    return len(sizes), sum(sizes)


def _count(paths: Sequence[Path]) -> str:
    num_files, num_bytes = _measure(paths)
    return f"{plural(num_files, 'file')}, {format_bytes(num_bytes)}"


def format_bytes(count: int) -> str:
    """Format a number of bytes as ``12 bytes``, ``3.4 MB``, ``15.2 GB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return plural(count, "byte")
