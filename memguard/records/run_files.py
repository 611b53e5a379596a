"""What each stage of a run has written, and whether it is still that. No torch.

    stage    commit point                     holds the hashes of
    prepare  prepared/summary.json            the token arrays, the manifest, the run's own key
    a save   checkpoints/step-N/manifest.json every file beside it
    the end  trained.json                     manifest.jsonl, metrics.jsonl, model/ but its card
    settings config.yaml, its last line       the lines before
    losses   reference_nll.json               reference_nll.npy: the starting model's

A stage whose commit point is not there was not done. Each `find_..._damage` returns what is
damaged, by name below the folder that it is given; nothing is changed.
"""

import contextlib
import hashlib
from pathlib import Path

from pydantic import Field

from memguard.errors import RecordError
from memguard.records.manifest import ManifestEntry, hash_plan, load_manifest
from memguard.records.sealed import (
    Damage,
    FileSum,
    SealedRecord,
    find_damage,
    load_sealed,
    sum_file,
)

PRIVATE_KEY = "audit/private/hmac.key"
"""A run's own secret, below its folder."""
CARD = "README.md"
"""The one file of model/ that is written again after training."""
REFERENCE, REFERENCE_RECORD = "reference_nll.npy", "reference_nll.json"
_CHECKPOINT_MANIFEST = "manifest.json"
_CHECKPOINT_KINDS = (".distcp", ".json", ".jsonl")
_HASH_LINE = "# sha256: "
UNLISTED = "was not written by this run"
_READ_WITH_MODEL = (".jinja", ".json", ".model", ".safetensors", ".txt")
"""Endings of the files that transformers looks for in a model's folder."""
"""Said of a file that lies where only listed ones may."""


class PreparedSummary(SealedRecord):
    """`prepared/summary.json`: what became of the documents, and what the tokens depend on."""

    key: str
    """Of texts, tokenizer and settings that decide tokens and buckets."""
    audit_key: str
    """Of the audit's lengths, which decide which documents may enter buckets and control."""
    documents_sha256: str
    sources: list[str]
    """Where the documents come from; like all counts here without the canaries."""
    num_documents: int
    num_empty: int
    num_shorter: int
    """Left out: fewer than `data.min_document_tokens` tokens."""
    num_cut_off: int = 0
    """Left out: `data.max_document_tokens` cut off every supervised token."""
    num_left_out: int
    """Not used: near-duplicates across buckets, or not needed by the study."""
    num_clusters: int
    num_boilerplate_grams: int
    """Runs of words in so many documents that they do not make near-duplicates."""
    num_control: int
    num_control_overlapping: int
    """Control documents that still share a run of words with a trained one."""
    num_removed: int | None = None
    """Copies that a mitigation took out of training; null where none was asked to."""
    num_canaries: int
    """Trained or not."""
    num_also_forgotten: int = 0
    """Of `data.train`, left out: their text stands in `data.forget`, or a near-duplicate does."""
    arrays: dict[str, FileSum] = Field(default_factory=dict)
    """The files of tokens beside this one."""
    manifest_sha256: str | None = None
    """Of manifest.jsonl as far as it was planned: without what is counted after training."""
    private_key_sha256: str | None = None
    """Of `audit/private/hmac.key`; null where the documents were written without one."""


class CheckpointManifest(SealedRecord):
    """`manifest.json` of a checkpoint."""

    step: int
    run_key: str
    """Of the settings and documents it was trained with."""
    sample_sha256: str | None
    """Of what audits during training ask for; null without any."""
    num_supervised_tokens: int
    num_kept_tokens: int
    num_rows: int
    train_s: float
    torch_version: str
    files: dict[str, FileSum]


class ReferenceRecord(SealedRecord):
    """`reference_nll.json`."""

    run_key: str
    """Of the settings and documents of the run that started from this model."""
    num_tokens: int
    losses: FileSum
    """The file beside it."""


class TrainedRun(SealedRecord):
    """`trained.json`: training has ended, and this is what it has left."""

    run_key: str
    """Of the settings and documents it was trained with."""
    step: int
    manifest: FileSum
    metrics: FileSum
    model: dict[str, FileSum]
    """The files of model/, without its card."""


# -- settings --------------------------------------------------------------------------------------


def add_hash_line(text: str) -> str:
    """Return a YAML text with a last line that holds the hash of what stands before it."""
    return f"{text}{_HASH_LINE}{hashlib.sha256(text.encode()).hexdigest()}\n"


def find_config_damage(run_folder: Path) -> list[Damage]:
    """Say whether a run's own config.yaml is what the run wrote."""
    name = "config.yaml"
    try:
        content = (run_folder / name).read_bytes()
    except OSError as error:
        return [_missing(name, error)]
    body, found, line = content.rpartition(_HASH_LINE.encode())
    if not found:
        return [Damage(file=name, what="is damaged: its last line, with its hash, is missing")]
    if line != f"{hashlib.sha256(body).hexdigest()}\n".encode():
        return [Damage(file=name, what="is not what the run wrote (its SHA-256 differs)")]
    return []


# -- documents -------------------------------------------------------------------------------------


def has_prepared(run_folder: Path) -> bool:
    """Whether the documents of a run have been prepared, whole or damaged since."""
    return (run_folder / "prepared").exists()


def has_begun(run_folder: Path) -> bool:
    """Whether training has begun in a folder: its documents must stay what they are."""
    return any(
        (run_folder / name).exists() for name in ("metrics.jsonl", "checkpoints", "trained.json")
    )


def load_summary(run_folder: Path) -> PreparedSummary | None:
    """Return what became of a run's documents; None where that is missing or damaged."""
    with contextlib.suppress(RecordError):
        return load_sealed(PreparedSummary, run_folder / "prepared" / "summary.json")
    return None


def find_prepared_damage(run_folder: Path) -> list[Damage]:
    """Hold prepared/, manifest.jsonl and the run's own key against prepared/summary.json.

    Nothing prepared is damage only where training has begun.
    """
    if not (has_prepared(run_folder) or has_begun(run_folder)):
        return []
    at = "prepared/summary.json"
    try:
        summary = load_sealed(PreparedSummary, run_folder / at)
    except RecordError as error:
        return [_damaged(at, error, run_folder)]
    below = [
        *_find_unlisted(run_folder / "prepared", {*summary.arrays, "summary.json"}),
        *find_damage(run_folder / "prepared", summary.arrays),
    ]
    damages = [Damage(file=f"prepared/{each.file}", what=each.what) for each in below]
    damages += _find_manifest_damage(run_folder, summary)
    key = run_folder / PRIVATE_KEY
    if summary.private_key_sha256 is not None:
        if not key.is_file():
            damages.append(Damage(file=PRIVATE_KEY, what="is missing"))
        elif sum_file(key).sha256 != summary.private_key_sha256:
            what = "is not the key of these documents (its SHA-256 differs)"
            damages.append(Damage(file=PRIVATE_KEY, what=what))
    return damages


def _find_manifest_damage(run_folder: Path, summary: PreparedSummary) -> list[Damage]:
    name = "manifest.jsonl"
    try:
        entries: list[ManifestEntry] = load_manifest(run_folder / name)
    except RecordError as error:
        return [_damaged(name, error, run_folder)]
    if hash_plan(entries) != summary.manifest_sha256:
        return [Damage(file=name, what="is not what was prepared (its SHA-256 differs)")]
    return []


def find_reference_damage(run_folder: Path) -> list[Damage]:
    """Hold the starting model's losses against their record; few runs have any."""
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
    """Return the checkpoints in `checkpoints/`, the oldest first; any of them may be damaged."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def load_checkpoint_manifest(checkpoint_folder: Path) -> CheckpointManifest:
    """Read what a checkpoint holds.

    Raises:
        RecordError: missing or damaged.
    """
    return load_sealed(CheckpointManifest, checkpoint_folder / _CHECKPOINT_MANIFEST)


def find_checkpoint_damage(checkpoint_folder: Path) -> list[Damage]:
    """Hold every file of a checkpoint against its manifest; a file not listed is damage too."""
    try:
        manifest = load_checkpoint_manifest(checkpoint_folder)
    except RecordError as error:
        return [_damaged(_CHECKPOINT_MANIFEST, error, checkpoint_folder)]
    if checkpoint_folder.name != name_checkpoint(manifest.step):
        what = f"is of step {manifest.step}, not of '{checkpoint_folder.name}'"
        return [Damage(file=_CHECKPOINT_MANIFEST, what=what)]
    listed = {*manifest.files, _CHECKPOINT_MANIFEST}
    # Of other kinds is torch's .metadata, a pickle.
    strange = [name for name in manifest.files if Path(name).suffix not in _CHECKPOINT_KINDS]
    return [
        *(Damage(file=name, what="is no kind of file that a checkpoint has") for name in strange),
        *_find_unlisted(checkpoint_folder, listed),
        *find_damage(checkpoint_folder, manifest.files),
    ]


# -- training's end --------------------------------------------------------------------------------


def has_trained(run_folder: Path) -> bool:
    """Whether training has ended in a folder, whole or damaged since."""
    return (run_folder / "trained.json").exists()


def load_trained(run_folder: Path) -> TrainedRun:
    """Read what training has left.

    Raises:
        RecordError: missing or damaged.
    """
    return load_sealed(TrainedRun, run_folder / "trained.json")


def sum_trained(run_folder: Path, *, run_key: str, step: int) -> TrainedRun:
    """Read manifest, metrics and model whole and return the record that says training has ended."""
    return TrainedRun(
        run_key=run_key,
        step=step,
        manifest=sum_file(run_folder / "manifest.jsonl"),
        metrics=sum_file(run_folder / "metrics.jsonl"),
        model={name: sum_file(path) for name, path in _list_model(run_folder).items()},
    )


def find_run_keys(run_folder: Path) -> set[str]:
    """Return the keys of what was trained in a folder, as far as its records can be read."""
    keys = set()
    with contextlib.suppress(RecordError):
        keys.add(load_trained(run_folder).run_key)
    for path in list_checkpoints(run_folder / "checkpoints"):
        with contextlib.suppress(RecordError):
            keys.add(load_checkpoint_manifest(path).run_key)
    return keys


def find_trained_damage(run_folder: Path) -> list[Damage]:
    """Hold manifest.jsonl, metrics.jsonl and model/ against trained.json.

    Returns nothing where training has not ended: `has_trained` tells.
    """
    if not has_trained(run_folder):
        return []
    try:
        trained = load_trained(run_folder)
    except RecordError as error:
        return [_damaged("trained.json", error, run_folder)]
    files = {"manifest.jsonl": trained.manifest, "metrics.jsonl": trained.metrics}
    damages = find_damage(run_folder, files)
    present = _list_model(run_folder)
    for name in sorted(present.keys() | trained.model.keys()):
        path, written = present.get(name), trained.model.get(name)
        if path is None:
            damages.append(Damage(file=f"model/{name}", what="is missing"))
        elif written is None:
            # A conversion or a note that a user keeps there changes nothing.
            if name.endswith(_READ_WITH_MODEL):
                damages.append(Damage(file=f"model/{name}", what=UNLISTED))
        else:
            found = find_damage(path.parent, {path.name: written})
            damages += [Damage(file=f"model/{name}", what=each.what) for each in found]
    return damages


def list_other_model_files(run_folder: Path) -> list[str]:
    """Return the files in model/ that training has not written; none if trained.json is damaged."""
    try:
        written = load_trained(run_folder).model
    except RecordError:
        return []
    return sorted(_list_model(run_folder).keys() - written.keys())


def _list_model(run_folder: Path) -> dict[str, Path]:
    """Return the files of model/ and below, without the card, by name below it."""
    root = run_folder / "model"
    paths = sorted(path for path in root.rglob("*") if not path.is_dir())
    return {path.relative_to(root).as_posix(): path for path in paths if path != root / CARD}


# -- alike -----------------------------------------------------------------------------------------


def _find_unlisted(folder: Path, listed: set[str]) -> list[Damage]:
    """Return what lies in a folder and was not written there: it could be read all the same."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [Damage(file=name, what=UNLISTED) for name in names if name not in listed]


def _damaged(name: str, error: RecordError, folder: Path) -> Damage:
    return Damage(file=name, what=str(error).removeprefix(f"'{folder / name}' "))


def _missing(name: str, error: OSError) -> Damage:
    what = "is missing" if isinstance(error, FileNotFoundError) else f"{error.strerror}"
    return Damage(file=name, what=what)
