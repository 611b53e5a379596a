"""The files that each stage of a run or audit sealed, and which of them are damaged. No torch.

    SealedFiles        files of one stage, with the hashes recorded when they were written
    RunFiles           config, prepared, losses and trained: stages in the folder of a run
    CheckpointFolder   one checkpoint of it
    AuditFolder        an audit, with the model card of its run
    GateFolder         the result of a policy; whether it is older than the present report

A folder lists its stages; one loop, `SealedFolder.find_damage`, compares their files. It changes
nothing. A stage without its record is incomplete: a damaged record is the only damage of its stage,
because the hashes of the other files are not known.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from memguard.errors import RecordError, UnreadableError, VersionError
from memguard.records.audit_files import (
    AUDIT_FILES,
    REPORT,
    AuditFiles,
    find_card,
    load_audit_files,
)
from memguard.records.gate import GATE, GateResult
from memguard.records.run_files import (
    CHECKPOINT_MANIFEST,
    REFERENCE,
    REFERENCE_RECORD,
    CheckpointManifest,
    PreparedSummary,
    ReferenceRecord,
    TrainedRun,
    has_begun,
    has_prepared,
    has_trained,
    hash_plan,
    is_own_config,
    list_weights,
    load_manifest,
    name_checkpoint,
)
from memguard.records.sealed import (
    Damage,
    FileSum,
    SealedT,
    SumFile,
    describe_unread_file,
    find_damage,
    is_closed,
    load_sealed,
    mark_unreadable,
    sum_file,
)

UNLISTED = "was not written by this run"
"""Predicate for a file in a folder where only listed files may be."""
_CHECKPOINT_KINDS = (".distcp", ".json", ".jsonl")
_READ_WITH_MODEL = (".jinja", ".json", ".model", ".safetensors", ".txt")
"""Suffixes of the files that transformers reads from a model folder."""
Stage = Literal["config", "prepared", "losses", "trained"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedFiles:
    """Files that one stage wrote, with the hashes recorded when they were written."""

    folder: Path
    files: Mapping[str, FileSum]
    """By path relative to the folder."""
    shown_in: str = ""
    """Text before the names of damaged files, as in ``model/``."""
    unlisted: str | None = None
    """Predicate of a file in the folder that is not listed; None: other files do no harm."""
    others: Callable[[], Collection[str]] = field(default=tuple)
    """Returns the names in the folder that must be listed; used if `unlisted` is set."""

    def find_damage(self, read: SumFile = sum_file) -> list[Damage]:
        """Return the files that are not listed, and those that differ or are missing."""
        if self.unlisted is None:
            return find_damage(self.folder, self.files, shown_in=self.shown_in, read=read)
        if is_closed(self.folder):
            # What is beside the listed files cannot be seen, so that none of them counts as intact.
            return [mark_unreadable(f"{self.shown_in}{name}") for name in self.files or ("",)]
        unlisted = sorted(set(self.others()).difference(self.files))
        return [
            *(Damage(file=f"{self.shown_in}{name}", what=self.unlisted) for name in unlisted),
            *find_damage(self.folder, self.files, shown_in=self.shown_in, read=read),
        ]


@dataclass(frozen=True, slots=True)
class SealedFolder:
    """A folder whose stages sealed their files."""

    path: Path

    def stages(self, *names: Stage) -> Iterator[SealedFiles | Damage]:
        """Yield the files of stages; a `Damage` in place of a record that cannot be read."""
        raise NotImplementedError

    def find_damage(self, *names: Stage, read: SumFile = sum_file) -> list[Damage]:
        """Return the damaged files of stages, and those that this user may not read.

        Only runs have several stages. ``read`` sums a file of the right size, such as the weights.
        Raises VersionError if another version wrote the manifest; nothing that was written is lost.
        """
        return [
            damage
            for stage in self.stages(*names)
            for damage in ([stage] if isinstance(stage, Damage) else stage.find_damage(read))
        ]


class RunFiles(SealedFolder):
    """The folder of a run."""

    def stages(self, *names: Stage) -> Iterator[SealedFiles | Damage]:
        """Yield the files of stages in the order of ``names``; none of a stage to come."""
        for name in names:
            yield from _STAGES[name](self.path)


def _list_config(run: Path) -> Iterator[Damage]:
    """Yield the damage of config.yaml, whose last line is the hash of the lines above it."""
    name = "config.yaml"
    try:
        is_own = is_own_config((run / name).read_bytes())
    except OSError as error:
        yield describe_unread_file(name, error)
    else:
        if is_own is None:
            yield Damage(file=name, what="is damaged: its last line, with its hash, is missing")
        elif not is_own:
            yield Damage(file=name, what="is not what the run wrote (its SHA-256 differs)")


def _list_prepared(run: Path) -> Iterator[SealedFiles | Damage]:
    """Yield prepared/, and the damage of manifest.jsonl.

    A missing prepared/ counts as damage only if training has begun. The manifest is written again
    after training: its planned fields are compared.
    """
    if not (has_prepared(run) or has_begun(run)):
        return
    folder, at = run / "prepared", "prepared/"
    summary = _load(PreparedSummary, folder, "summary.json", shown_in=at)
    if isinstance(summary, Damage):
        yield summary
        return
    yield _list_flat(folder, summary.arrays, record="summary.json", shown_in=at)
    name = "manifest.jsonl"
    try:
        if hash_plan(load_manifest(run / name)) != summary.manifest_sha256:
            yield Damage(file=name, what="is not what was prepared (its SHA-256 differs)")
    except VersionError:
        raise
    except RecordError as error:
        yield _describe(name, error, run / name)


def _list_losses(run: Path) -> Iterator[SealedFiles | Damage]:
    """Yield the starting model's losses; few runs have them."""
    if (run / REFERENCE_RECORD).exists():
        record = _load(ReferenceRecord, run, REFERENCE_RECORD)
        if isinstance(record, Damage):
            yield record
        else:
            yield SealedFiles(folder=run, files={REFERENCE: record.losses})


def _list_trained(run: Path) -> Iterator[SealedFiles | Damage]:
    """Yield manifest, metrics and weights of a training that has ended.

    The card of the weights is free, as are files that do not affect the model, such as a user's
    conversion or note.
    """
    if not has_trained(run):
        return
    trained = _load(TrainedRun, run, "trained.json")
    if isinstance(trained, Damage):
        yield trained
        return
    # Small files, which are summed here whatever function sums the weights.
    files = {"manifest.jsonl": trained.manifest, "metrics.jsonl": trained.metrics}
    yield from find_damage(run, files)
    weights = run / trained.folder
    yield SealedFiles(
        folder=weights,
        files=trained.model,
        shown_in=f"{trained.folder}/",
        unlisted=UNLISTED,
        others=lambda: [name for name in list_weights(weights) if name.endswith(_READ_WITH_MODEL)],
    )


_STAGES: Final[Mapping[Stage, Callable[[Path], Iterator[SealedFiles | Damage]]]] = {
    "config": _list_config,
    "prepared": _list_prepared,
    "losses": _list_losses,
    "trained": _list_trained,
}


class CheckpointFolder(SealedFolder):
    """The folder of one checkpoint, named by its step; an unlisted file is damage."""

    def stages(self, *names: Stage) -> Iterator[SealedFiles | Damage]:
        """Yield the files of the checkpoint."""
        manifest = _load(CheckpointManifest, self.path, CHECKPOINT_MANIFEST)
        if isinstance(manifest, Damage):
            yield manifest
            return
        if self.path.name != name_checkpoint(manifest.step):
            what = f"is of step {manifest.step}, not of '{self.path.name}'"
            yield Damage(file=CHECKPOINT_MANIFEST, what=what)
            return
        for name in manifest.files:
            # Other suffixes are refused, for example torch's .metadata, which is a pickle.
            if Path(name).suffix not in _CHECKPOINT_KINDS:
                yield Damage(file=name, what="has a suffix not allowed in a checkpoint")
        yield _list_flat(self.path, manifest.files, record=CHECKPOINT_MANIFEST)


class AuditFolder(SealedFolder):
    """The folder of an audit. The model card of its run is shown as one of `CARDS`."""

    def stages(self, *names: Stage) -> Iterator[SealedFiles | Damage]:
        """Yield the files of the audit, and the card."""
        written = _load(AuditFiles, self.path, AUDIT_FILES, is_brief=True)
        if isinstance(written, Damage):
            yield written
            return
        yield SealedFiles(folder=self.path, files=written.files)
        if written.card is not None:
            card = find_card(self.path.resolve().parent)
            shown_in = f"{card.parent.name}/"
            files = {card.name: written.card}
            yield SealedFiles(folder=card.parent, files=files, shown_in=shown_in)


@dataclass(frozen=True, slots=True)
class GateFolder(SealedFolder):
    """The folder of a gate's result."""

    audit: Path
    """Folder of the audit that it belongs to."""

    def stages(self, *names: Stage) -> Iterator[SealedFiles | Damage]:
        """Yield the files of the gate."""
        at = f"{self.path.name}/"
        if is_closed(self.path):
            yield mark_unreadable(at)
            return
        result = _load(GateResult, self.path, GATE, shown_in=at, is_brief=True)
        if isinstance(result, Damage):
            yield result
            return
        what = "was not written by 'memguard gate'"
        yield _list_flat(self.path, result.files, record=GATE, shown_in=at, unlisted=what)
        if not (self.audit / AUDIT_FILES).exists():
            yield Damage(file=f"{at}{GATE}", what="judged an audit that is no longer there")

    @property
    def is_older(self) -> bool:
        """Whether it judged another report than the present one, which is no damage."""
        try:
            judged = load_sealed(GateResult, self.path / GATE).report_sha256
            return load_audit_files(self.audit).files[REPORT].sha256 != judged
        except RecordError:
            return False  # It is damaged, or the audit is, which is listed itself.


def _list_flat(
    folder: Path,
    files: Mapping[str, FileSum],
    *,
    record: str,
    shown_in: str = "",
    unlisted: str = UNLISTED,
) -> SealedFiles:
    """Return the files of a folder in which nothing else but the record may be."""

    def list_others() -> list[str]:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return [name for name in names if name != record]

    return SealedFiles(
        folder=folder, files=files, shown_in=shown_in, unlisted=unlisted, others=list_others
    )


def _load(
    kind: type[SealedT], folder: Path, name: str, *, shown_in: str = "", is_brief: bool = False
) -> SealedT | Damage:
    """Return a record, or why it cannot be read; brief: whether it is there."""
    try:
        return load_sealed(kind, folder / name)
    except RecordError as error:
        if is_brief and not isinstance(error, UnreadableError):
            is_there = (folder / name).exists()
            return Damage(file=f"{shown_in}{name}", what="is damaged" if is_there else "is missing")
        return _describe(f"{shown_in}{name}", error, folder / name)


def _describe(shown: str, error: RecordError, path: Path) -> Damage:
    if isinstance(error, UnreadableError):
        return mark_unreadable(shown)
    return Damage(file=shown, what=str(error).removeprefix(f"'{path}' "))
