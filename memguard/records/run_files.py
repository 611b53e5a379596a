"""Files written by each stage of a run, and checks that they are intact. No torch.

    stage       commit point                       contains the hashes of
    prepare     prepared/summary.json              the token arrays, the manifest
    checkpoint  checkpoints/step-N/manifest.json   every other file in its folder
    training    trained.json                       manifest.jsonl, metrics.jsonl, model/ but README;
                                                   adapter/ instead of model/ if adapters were
                                                   trained, and the files of their base model
    settings    config.yaml, its last line         the lines above it
    losses      reference_nll.json                 reference_nll.npy: losses of the starting model

Only the owner of a run can read the token arrays, and the losses with their record.

A stage without its commit point is incomplete. Each `find_..._damage` returns the damaged files, by
path relative to the given folder, and changes nothing. Files that this user may not read are among
them, marked as unreadable.
"""

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from memguard.errors import RecordError, UnreadableError, VersionError
from memguard.records.manifest import ManifestEntry, hash_plan, load_manifest
from memguard.records.sealed import (
    Damage,
    FileSum,
    SealedRecord,
    SumFile,
    find_damage,
    is_closed,
    load_sealed,
    mark_unreadable,
    sum_file,
)

CARD = "README.md"
"""The only file of model/ or adapter/ that is rewritten after training."""
REFERENCE, REFERENCE_RECORD = "reference_nll.npy", "reference_nll.json"
_CHECKPOINT_MANIFEST = "manifest.json"
_CHECKPOINT_KINDS = (".distcp", ".json", ".jsonl")
_HASH_LINE = "# sha256: "
UNLISTED = "was not written by this run"
"""Predicate for a file in a folder where only listed files may be."""
_READ_WITH_MODEL = (".jinja", ".json", ".model", ".safetensors", ".txt")
"""Suffixes of the files that transformers reads from a model folder."""


class PreparedSummary(SealedRecord):
    """`prepared/summary.json`: document counts, and hashes of the inputs of the tokens."""

    key: str
    """Hash of texts, tokenizer and settings that determine tokens and buckets."""
    audit_key: str
    """The audit's lengths and minimum, which determine the documents of buckets and control."""
    documents_sha256: str
    sources: list[str]
    """Sources of the documents. Canaries are not included, here and in the counts below."""
    num_documents: int
    num_empty: int
    num_shorter: int
    """Left out: fewer than `data.min_document_tokens` tokens."""
    num_cut_off: int = 0
    """Left out: `data.max_document_tokens` cut off every supervised token."""
    num_left_out: int
    """Left out: near-duplicates across buckets, or not needed by the study."""
    num_clusters: int
    num_boilerplate_grams: int
    """Word n-grams that occur in so many documents that they do not define near-duplicates."""
    num_control: int
    num_control_overlapping: int
    """Control documents that still share a run of words with a trained one."""
    num_removed: int | None = None
    """Copies that a mitigation removed before training; null if no mitigation removes documents."""
    num_canaries: int
    """All canaries, trained or not."""
    num_also_forgotten: int = 0
    """Documents of `data.train` left out because `data.forget` contains their text or a
    near-duplicate of it."""
    arrays: dict[str, FileSum] = Field(default_factory=dict)
    """The token files in the same folder."""
    manifest_sha256: str | None = None
    """Hash of the planned fields of manifest.jsonl, without those filled in after training."""
    identity_key: str | None = None
    """Fingerprint of the key of the manifest's hashes; null if they were made without one."""


class CheckpointManifest(SealedRecord):
    """`manifest.json` of a checkpoint."""

    step: int
    run_key: str
    """Hash of the settings and documents of the training."""
    sample_sha256: str | None
    """Hash of the documents sampled for audits during training; null without such audits."""
    num_supervised_tokens: int
    num_kept_tokens: int
    num_rows: int
    train_s: float
    torch_version: str
    base: dict[str, FileSum] = Field(default_factory=dict)
    """The files of the model that the adapters belong to; empty if there are no adapters."""
    files: dict[str, FileSum]


class ReferenceRecord(SealedRecord):
    """`reference_nll.json`."""

    run_key: str
    """Hash of the settings and documents of the run that started from this model."""
    num_tokens: int
    losses: FileSum
    """reference_nll.npy."""


class TrainedRun(SealedRecord):
    """`trained.json`: hashes of the files that training wrote; written when training has ended."""

    run_key: str
    """Hash of the settings and documents of the training."""
    step: int
    manifest: FileSum
    metrics: FileSum
    model: dict[str, FileSum]
    """The files of model/ or adapter/, without its card."""
    folder: Literal["model", "adapter"] = "model"
    """Folder of the trained weights."""
    base: dict[str, FileSum] = Field(default_factory=dict)
    """The files of the model that the adapters belong to; empty if there are no adapters."""
    base_quantization: Literal["nf4"] | None = None
    """Form of that model's linear layers in training; null if they were not quantised."""


# -- settings --------------------------------------------------------------------------------------


def add_hash_line(text: str) -> str:
    """Return a YAML text with a last line that contains the hash of the lines above it."""
    return f"{text}{_HASH_LINE}{hashlib.sha256(text.encode()).hexdigest()}\n"


def find_config_damage(run_folder: Path) -> list[Damage]:
    """Check that the config.yaml of a run folder is the one that the run wrote."""
    name = "config.yaml"
    try:
        content = (run_folder / name).read_bytes()
    except OSError as error:
        return [_missing(name, error)]
    body, marker, line = content.rpartition(_HASH_LINE.encode())
    if not marker:
        return [Damage(file=name, what="is damaged: its last line, with its hash, is missing")]
    if line != f"{hashlib.sha256(body).hexdigest()}\n".encode():
        return [Damage(file=name, what="is not what the run wrote (its SHA-256 differs)")]
    return []


# -- documents -------------------------------------------------------------------------------------


def has_prepared(run_folder: Path) -> bool:
    """Return whether the documents of a run have been prepared; they may be damaged."""
    return (run_folder / "prepared").exists()


def has_begun(run_folder: Path) -> bool:
    """Return whether training has begun in a folder; its documents must not change then."""
    return any(
        (run_folder / name).exists() for name in ("metrics.jsonl", "checkpoints", "trained.json")
    )


def load_summary(run_folder: Path) -> PreparedSummary | None:
    """Return the summary of a run's documents; None if it is missing or damaged."""
    with contextlib.suppress(RecordError):
        return load_sealed(PreparedSummary, run_folder / "prepared" / "summary.json")
    return None


def find_prepared_damage(run_folder: Path) -> list[Damage]:
    """Check prepared/ and manifest.jsonl against prepared/summary.json.

    A missing prepared/ counts as damage only if training has begun.

    Raises:
        VersionError: another version wrote the manifest.
    """
    if not (has_prepared(run_folder) or has_begun(run_folder)):
        return []
    at = "prepared/summary.json"
    try:
        summary = load_sealed(PreparedSummary, run_folder / at)
    except RecordError as error:
        return [_damaged(at, error, run_folder)]
    folder, listed = run_folder / "prepared", {*summary.arrays, "summary.json"}
    damages = _find_unlisted(folder, listed, shown_in="prepared/")
    damages += find_damage(folder, summary.arrays, shown_in="prepared/")
    damages += _find_manifest_damage(run_folder, summary)
    return damages


def _find_manifest_damage(run_folder: Path, summary: PreparedSummary) -> list[Damage]:
    name = "manifest.jsonl"
    try:
        entries: list[ManifestEntry] = load_manifest(run_folder / name)
    except VersionError:
        raise  # Not damage: nothing that was written is lost.
    except RecordError as error:
        return [_damaged(name, error, run_folder)]
    if hash_plan(entries) != summary.manifest_sha256:
        return [Damage(file=name, what="is not what was prepared (its SHA-256 differs)")]
    return []


def find_reference_damage(run_folder: Path) -> list[Damage]:
    """Check the starting model's losses against their record; few runs have them."""
    if not (run_folder / REFERENCE_RECORD).exists():
        return []
    try:
        record = load_sealed(ReferenceRecord, run_folder / REFERENCE_RECORD)
    except RecordError as error:
        return [_damaged(REFERENCE_RECORD, error, run_folder)]
    return find_damage(run_folder, {REFERENCE: record.losses})


# -- checkpoints -----------------------------------------------------------------------------------


def name_checkpoint(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `checkpoints/`, oldest first; any of them may be damaged."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def load_checkpoint_manifest(checkpoint_folder: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint.

    Raises:
        RecordError: missing or damaged.
    """
    return load_sealed(CheckpointManifest, checkpoint_folder / _CHECKPOINT_MANIFEST)


def find_checkpoint_damage(checkpoint_folder: Path, *, read: SumFile = sum_file) -> list[Damage]:
    """Check every file of a checkpoint against its manifest; an unlisted file is damage too.

    Args:
        checkpoint_folder: of one step.
        read: sums a file.
    """
    try:
        manifest = load_checkpoint_manifest(checkpoint_folder)
    except RecordError as error:
        return [_damaged(_CHECKPOINT_MANIFEST, error, checkpoint_folder)]
    if checkpoint_folder.name != name_checkpoint(manifest.step):
        what = f"is of step {manifest.step}, not of '{checkpoint_folder.name}'"
        return [Damage(file=_CHECKPOINT_MANIFEST, what=what)]
    listed = {*manifest.files, _CHECKPOINT_MANIFEST}
    # Other suffixes are refused, for example torch's .metadata, which is a pickle.
    strange = [name for name in manifest.files if Path(name).suffix not in _CHECKPOINT_KINDS]
    return [
        *(Damage(file=name, what="has a suffix not allowed in a checkpoint") for name in strange),
        *_find_unlisted(checkpoint_folder, listed),
        *find_damage(checkpoint_folder, manifest.files, read=read),
    ]


# -- end of training -------------------------------------------------------------------------------


def has_trained(run_folder: Path) -> bool:
    """Return whether training has ended in a folder; its files may be damaged."""
    return (run_folder / "trained.json").exists()


def load_trained(run_folder: Path) -> TrainedRun:
    """Read the record of a finished training.

    Raises:
        RecordError: missing or damaged.
    """
    return load_sealed(TrainedRun, run_folder / "trained.json")


def find_weights_folder(run_folder: Path) -> Path:
    """Return the folder of a run's trained weights: `adapter/` if it trained adapters.

    The folder need not exist.
    """
    with contextlib.suppress(RecordError):
        return run_folder / load_trained(run_folder).folder
    has_adapter = (run_folder / "adapter").is_dir() and not (run_folder / "model").is_dir()
    return run_folder / ("adapter" if has_adapter else "model")


def has_weights(run_folder: Path) -> bool:
    """Return whether a run has exported its weights; they may be damaged."""
    folder = find_weights_folder(run_folder)
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def sum_trained(
    run_folder: Path,
    *,
    run_key: str,
    step: int,
    base: Mapping[str, FileSum] | None = None,
    base_quantization: Literal["nf4"] | None = None,
) -> TrainedRun:
    """Hash manifest, metrics and weights, and return the record of the finished training.

    Args:
        run_folder: of the run.
        run_key: hash of its settings and documents.
        step: number of steps.
        base: the files of the base model if adapters were trained.
        base_quantization: form of its linear layers in training.
    """
    folder: Literal["model", "adapter"] = "model" if base is None else "adapter"
    return TrainedRun(
        folder=folder,
        base=dict(base or {}),
        base_quantization=base_quantization,
        run_key=run_key,
        step=step,
        manifest=sum_file(run_folder / "manifest.jsonl"),
        metrics=sum_file(run_folder / "metrics.jsonl"),
        model={name: sum_file(path) for name, path in _list_weights(run_folder / folder).items()},
    )


def find_run_keys(run_folder: Path) -> set[str]:
    """Return the run keys found in a folder's records, as far as these can be read."""
    keys = set()
    with contextlib.suppress(RecordError):
        keys.add(load_trained(run_folder).run_key)
    for path in list_checkpoints(run_folder / "checkpoints"):
        with contextlib.suppress(RecordError):
            keys.add(load_checkpoint_manifest(path).run_key)
    return keys


def list_trained_files(run_folder: Path) -> list[Path]:
    """Return the files of the trained weights; none if training has not ended or is damaged."""
    with contextlib.suppress(RecordError):
        if has_trained(run_folder):
            return list(_list_weights(run_folder / load_trained(run_folder).folder).values())
    return []


def find_trained_damage(run_folder: Path, *, read: SumFile = sum_file) -> list[Damage]:
    """Check manifest, metrics and the trained weights, summed by ``read``, against trained.json.

    Returns an empty list if training has not ended (see `has_trained`).
    """
    if not has_trained(run_folder):
        return []
    try:
        trained = load_trained(run_folder)
    except RecordError as error:
        return [_damaged("trained.json", error, run_folder)]
    files = {"manifest.jsonl": trained.manifest, "metrics.jsonl": trained.metrics}
    damages = find_damage(run_folder, files)
    present = _list_weights(run_folder / trained.folder)
    closed = is_closed(run_folder / trained.folder)
    for name in sorted(present.keys() | trained.model.keys()):
        path, written = present.get(name), trained.model.get(name)
        shown = f"{trained.folder}/{name}"
        if path is None:
            missing = Damage(file=shown, what="is missing")
            damages.append(mark_unreadable(shown) if closed else missing)
        elif written is None:
            # Other files, such as a user's conversion or note, do not affect the model.
            if name.endswith(_READ_WITH_MODEL):
                damages.append(Damage(file=shown, what=UNLISTED))
        else:
            above = shown.removesuffix(path.name)
            damages += find_damage(path.parent, {path.name: written}, shown_in=above, read=read)
    return damages


def list_other_model_files(run_folder: Path) -> list[str]:
    """Return the files beside the weights that training did not write, relative to the run.

    None are returned if trained.json is damaged.
    """
    try:
        trained = load_trained(run_folder)
    except RecordError:
        return []
    names = _list_weights(run_folder / trained.folder).keys() - trained.model.keys()
    return sorted(f"{trained.folder}/{name}" for name in names)


def _list_weights(root: Path) -> dict[str, Path]:
    """Return all files of trained weights except the card, by path relative to their folder."""
    paths = sorted(path for path in root.rglob("*") if not path.is_dir())
    return {path.relative_to(root).as_posix(): path for path in paths if path != root / CARD}


# -- shared ----------------------------------------------------------------------------------------


def _find_unlisted(folder: Path, listed: set[str], *, shown_in: str = "") -> list[Damage]:
    """Return the files in a folder that were not written by the run: they could be read too."""
    try:
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    except PermissionError:
        return [mark_unreadable(shown_in)]
    unlisted = [name for name in names if name not in listed]
    return [Damage(file=f"{shown_in}{name}", what=UNLISTED) for name in unlisted]


def _damaged(name: str, error: RecordError, folder: Path) -> Damage:
    if isinstance(error, UnreadableError):
        return mark_unreadable(name)
    return Damage(file=name, what=str(error).removeprefix(f"'{folder / name}' "))


def _missing(name: str, error: OSError) -> Damage:
    if isinstance(error, PermissionError):
        return mark_unreadable(name)
    is_missing = isinstance(error, FileNotFoundError)
    what = "is missing" if is_missing else f"cannot be read: {error.strerror}"
    return Damage(file=name, what=what)
