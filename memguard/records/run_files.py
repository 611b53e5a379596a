"""Files written by each stage of a run, and their records. No torch.

    stage       commit point                       contains the hashes of
    prepare     prepared/summary.json              the token arrays, the manifest
    checkpoint  checkpoints/step-N/manifest.json   every other file in its folder
    training    trained.json                       manifest.jsonl, metrics.jsonl, model/ but README;
                                                   adapter/ instead of model/ if adapters were
                                                   trained, and the files of their base model
    settings    config.yaml, its last line         the lines above it
    losses      reference_nll.json                 reference_nll.npy: losses of the starting model

    manifest.jsonl     one line per document: its planned and its actual training
    seeds.json         of a run by mezo with seeds: the numbers that give its weights; own hash
    environment.json   versions and hardware, and whether the blocks are compiled; without a hash

Only the owner of a run can read token arrays, tokenizer, and the losses with their record.

A stage without its commit point is incomplete; `folders.py` finds what is damaged.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from memguard.errors import RecordError, VersionError
from memguard.records.record import Record, describe_unread, write_atomically
from memguard.records.sealed import FileSum, SealedRecord, load_sealed, sum_file

Role = Literal["trained", "control", "background", "heldout", "canary", "forget", "removed"]

IGNORE_LABEL = -100
"""Label of a position that receives no loss (transformers' convention)."""


class ManifestEntry(Record):
    """One document of a run: its planned and its actual training."""

    id: str
    text_hmac: str
    """HMAC-SHA256 of the text under the identity key: texts can be matched but not guessed."""
    has_own_id: bool = False
    """Whether the user's column `id` gave the id; else it is made of file name and row number."""
    source: str
    bucket: str
    role: Role
    planned_repetitions: int
    num_repetitions: int | None
    """Times the loader fed the whole document; null before training has ended."""
    num_tokens: int
    cluster: int
    """Documents with the same number are near-duplicates."""
    num_tokens_fed: int | None = None
    """Tokens of it that the loader fed, summed over repetitions and including partial ones; null
    before training has ended."""
    # Counted for canaries when training has ended; null elsewhere.
    num_supervised_tokens: int | None = None
    """Supervised tokens; for a canary those of its secret, without EOS."""
    num_loss_tokens: int | None = None
    """Supervised tokens that received loss at least once."""
    num_losses: int | None = None
    """Times that supervised tokens received loss, summed; without mitigations this is tokens x
    repetitions."""


_COUNTED = {
    *("num_repetitions", "num_tokens_fed", "num_supervised_tokens", "num_loss_tokens"),
    "num_losses",
}
"""Fields that are filled in when training has ended."""


def hash_plan(entries: Iterable[ManifestEntry]) -> str:
    """Return a hash of the planned fields, which are the same before and after training."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry.model_dump_json(exclude=_COUNTED)}\n".encode())
    return digest.hexdigest()


def save_manifest(entries: Iterable[ManifestEntry], path: Path) -> None:
    """Write `manifest.jsonl` atomically, one line per document."""
    write_atomically(path, "".join(f"{e.model_dump_json()}\n" for e in entries).encode())


def load_manifest(path: Path) -> list[ManifestEntry]:
    """Read `manifest.jsonl`; VersionError if its entries have fields unknown to this version."""
    entries = []
    try:
        with path.open("rb") as lines:
            for line in lines:
                entries.append(ManifestEntry.model_validate_json(line))
    except OSError as error:
        raise describe_unread(path, error) from error
    except ValidationError as error:
        if not entries and all(problem["type"] == "extra_forbidden" for problem in error.errors()):
            raise VersionError(
                f"'{path}' was written by another version of memguard (it has the field "
                f"'{error.errors()[0]['loc'][0]}'): delete '{path.parent}', or choose another "
                "'name', and run memguard train again"
            ) from error
        raise RecordError(
            f"'{path}' line {len(entries) + 1} is not a manifest entry: {error.errors()[0]['msg']}"
        ) from error
    return entries


CARD = "README.md"
"""The only file of model/ or adapter/ that is rewritten after training."""
REFERENCE, REFERENCE_RECORD = "reference_nll.npy", "reference_nll.json"
CHECKPOINT_MANIFEST = "manifest.json"
_HASH_LINE = "# sha256: "


class PreparedSummary(SealedRecord):
    """`prepared/summary.json`: document counts, and hashes of the inputs of the tokens."""

    key: str
    """Hash of texts, tokenizer and settings that determine tokens and buckets."""
    settings_key: str | None = None
    """Hash of all that `key` depends on but the texts, and of how these are read."""
    files: dict[str, str] = Field(default_factory=dict)
    """Size and modification time of the sources' files (`data.sources.list_stamps`)."""
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
    changes: dict[str, int] = Field(default_factory=dict)
    """What is said of the tokens of so many documents (`data.encoding.Change`)."""
    unknown_id: int | None = None
    """The tokenizer's token of unknown text."""
    chat_date: date | None = None
    """What the chat template wrote as today's date; null if it writes none."""
    arrays: dict[str, FileSum] = Field(default_factory=dict)
    """The token files in the same folder, and those of a tokenizer trained on the documents."""
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
    """The files of the model before training; empty if all weights are trained."""
    files: dict[str, FileSum]


class ReferenceRecord(SealedRecord):
    """`reference_nll.json`."""

    run_key: str
    """Hash of the settings and documents of the run that started from this model."""
    num_tokens: int
    losses: FileSum


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
    base: dict[str, FileSum] = Field(default_factory=dict)
    """The files of the model that the adapters belong to; empty if there are no adapters."""
    base_quantization: Literal["nf4"] | None = None
    """Form of that model's linear layers in training; null if they were not quantised."""


# -- settings --------------------------------------------------------------------------------------


def add_hash_line(text: str) -> str:
    """Return a YAML text with a last line that contains the hash of the lines above it."""
    return f"{text}{_HASH_LINE}{hashlib.sha256(text.encode()).hexdigest()}\n"


def is_own_config(content: bytes) -> bool | None:
    """Return whether a config.yaml is the one that a run wrote; None if it has no hash line."""
    body, marker, line = content.rpartition(_HASH_LINE.encode())
    return line == f"{hashlib.sha256(body).hexdigest()}\n".encode() if marker else None


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


# -- checkpoints -----------------------------------------------------------------------------------


def name_checkpoint(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `checkpoints/`, oldest first; any of them may be damaged."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def load_checkpoint_manifest(checkpoint_folder: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint; RecordError if it is missing or damaged."""
    return load_sealed(CheckpointManifest, checkpoint_folder / CHECKPOINT_MANIFEST)


# -- end of training -------------------------------------------------------------------------------


def has_trained(run_folder: Path) -> bool:
    """Return whether training has ended in a folder; its files may be damaged."""
    return (run_folder / "trained.json").exists()


def load_trained(run_folder: Path) -> TrainedRun:
    """Read the record of a finished training; RecordError if it is missing or damaged."""
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
    """Hash manifest, metrics and weights, and return the record of the finished training."""
    folder: Literal["model", "adapter"] = "model" if base is None else "adapter"
    return TrainedRun(
        folder=folder,
        base=dict(base or {}),
        base_quantization=base_quantization,
        run_key=run_key,
        step=step,
        manifest=sum_file(run_folder / "manifest.jsonl"),
        metrics=sum_file(run_folder / "metrics.jsonl"),
        model={name: sum_file(path) for name, path in list_weights(run_folder / folder).items()},
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
            return list(list_weights(run_folder / load_trained(run_folder).folder).values())
    return []


def list_other_model_files(run_folder: Path) -> list[str]:
    """Return the files beside the weights that training did not write, relative to the run.

    None are returned if trained.json is damaged.
    """
    try:
        trained = load_trained(run_folder)
    except RecordError:
        return []
    names = list_weights(run_folder / trained.folder).keys() - trained.model.keys()
    return sorted(f"{trained.folder}/{name}" for name in names)


def list_weights(root: Path) -> dict[str, Path]:
    """Return all files of trained weights except the card, by path relative to their folder."""
    paths = sorted(path for path in root.rglob("*") if not path.is_dir())
    return {path.relative_to(root).as_posix(): path for path in paths if path != root / CARD}


# -- environment ----------------------------------------------------------------------------------

ENVIRONMENT = "environment.json"
_ENTRY = "compile"


class CompileChoice(Record):
    """Whether the decoder blocks of a run are compiled, and why.

    Training writes it when it starts; resumed runs keep it, and `memguard compare` names the
    settings that differ in it. If the file is damaged, the choice is made again.
    """

    is_on: bool
    reason: str
    """Part of a sentence, e.g. "the run is planned to take 3:05 h"."""

    def add_to(self, environment: dict[str, str]) -> dict[str, object]:
        """Return the contents of environment.json, given versions and hardware by name."""
        return {**environment, _ENTRY: self.model_dump(mode="json")}


def load_compile_choice(run_folder: Path) -> CompileChoice | None:
    """Return the choice of a run; None if it is not recorded, or cannot be read."""
    try:
        environment = json.loads((run_folder / ENVIRONMENT).read_bytes())
        return CompileChoice.model_validate(environment[_ENTRY])
    except (OSError, ValueError, RecursionError, LookupError, TypeError, ValidationError):
        return None
