"""What was found: manifest, document scores, audit report, comparison. No torch.

Everything memguard writes for others to read is one of these models; a missing number is null and
counted, never NaN and never 0. `schema` names change when a reader of the old form would be wrong.
"""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from memguard.errors import RecordError

RecordT = TypeVar("RecordT", bound="Record")
Role = Literal["trained", "control", "background", "heldout"]

IGNORE_LABEL = -100
"""Label of a position that receives no loss (transformers' convention)."""


class Record(BaseModel):
    """Frozen, closed, without NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


class ManifestEntry(Record):
    """One document of a run: what was planned for it and what the loader really did."""

    id: str
    text_hmac: str
    """HMAC-SHA256 of the text under the run's own key, so that ids can be matched, not guessed."""
    source: str
    bucket: str
    role: Role
    planned_repetitions: int
    num_repetitions: int | None
    """Times the loader fed the whole document; null until training has ended."""
    num_tokens: int
    tokens_sha256: str
    cluster: int
    """Documents with the same number share a run of words."""


class Rate(Record):
    """A share of documents with its counts and Clopper-Pearson 95 % interval."""

    num_documents: int
    num_matched: int
    rate: float | None
    """null where there are no documents."""
    ci: tuple[float, float] | None
    """null below two documents."""


class Interval(Record):
    """An estimate with its 95 % interval."""

    value: float
    ci: tuple[float, float] | None


class DocumentScore(Record):
    """One document under one model, decided by one teacher-forced pass. One row of the parquet."""

    id: str
    bucket: str
    role: Role
    source: str
    num_repetitions: int | None
    num_tokens: int
    prefix_tokens: int
    continuation_tokens: int
    num_correct: int
    """Continuation tokens that are the argmax given everything true before them."""
    verbatim: bool
    near_verbatim: bool
    """At least 90 % of the continuation tokens are right."""
    first_divergence: int
    """Index of the first wrong token; `continuation_tokens` where there is none."""
    extraction_strength: float
    """1 - k/S, k the smallest index from which on every token is right; 0 where none is."""
    logprob: float
    """Sum over the continuation, natural log."""
    min_margin: float | None
    """Smallest gap between true token and best other one where right (logits); null: none is."""
    type_token_ratio: float
    """Distinct tokens / tokens of the true continuation."""
    argmax_type_token_ratio: float
    """The same of the model's argmax tokens: a collapsed model has a low one."""
    base_num_correct: int | None = None
    base_verbatim: bool | None = None
    base_near_verbatim: bool | None = None
    base_first_divergence: int | None = None
    base_logprob: float | None = None


class ModelScores(Record):
    """What one model does on the documents of one bucket."""

    verbatim: Rate
    near_verbatim: Rate
    mean_token_accuracy: Interval | None
    """Mean over documents; interval by the t distribution over documents."""
    median_first_divergence: float | None
    mean_logprob: Interval | None
    """Mean over documents of the mean log-probability of a continuation token (nats)."""


class BucketScores(Record):
    """One row of the report's table."""

    bucket: str
    role: Role
    num_repetitions: int | None
    num_documents: int
    num_too_short: int
    """Documents of this bucket that were trained (or held back) but are too short to audit."""
    num_not_sampled: int = 0
    model: ModelScores
    base: ModelScores | None
    mean_extraction_strength: float | None
    mean_type_token_ratio: float | None
    mean_argmax_type_token_ratio: float | None
    num_tiny_margin: int
    """Verdicts that hang on a margin below the stated one: other arithmetic could flip them."""
    verbatim_minus_control: Interval | None
    near_verbatim_minus_control: Interval | None
    """Difference of rates, Newcombe's interval; null for the control and without one."""


class MembershipScores(Record):
    """How well a score tells trained documents from control documents."""

    score: str
    num_members: int
    num_nonmembers: int
    auc: Interval
    """0.5 is chance; higher means members score higher. Interval by DeLong."""
    higher_is_better: bool = False


class Finding(Record):
    """A document the model recites; text only by reference."""

    id: str
    bucket: str
    num_repetitions: int | None
    severity: Literal["high", "medium", "low", "info"]
    sentence: str
    num_correct: int
    continuation_tokens: int
    first_divergence: int
    logprob: float
    base_num_correct: int | None
    text_hmac: str | None


class Banner(Record):
    """Something a reader must know before the numbers."""

    level: Literal["warning", "note"]
    text: str


class Verdict(Record):
    """The sentence that leads the page; the worse of verbatim and near-verbatim decides."""

    level: Literal["recites", "not-above-control", "no-control", "inconclusive"]
    metric: Literal["verbatim", "near_verbatim"]
    bucket: str
    sentence: str


class Method(Record):
    """How the numbers were made, enough to make them again."""

    suite: str
    suite_version: int
    probes: list[dict[str, Any]]
    continuation_tokens: int
    prefix_tokens: int | None
    """null: everything before the continuation."""
    near_verbatim_threshold: float
    tiny_margin: float
    dtype: str
    batch_tokens: int
    sample_size: int | None = None
    """Most documents scored of a bucket; null scored all."""
    seed: int
    command: str
    wall_s: float


class ModelIdentity(Record):
    """Which weights were measured."""

    name: str
    weights_sha256: str
    num_parameters: int
    base: str | None
    base_weights_sha256: str | None


class DataIdentity(Record):
    """Which documents were measured."""

    sources: list[str]
    documents_sha256: str
    """Over ids and token hashes of all documents, in order."""
    num_documents: int
    num_clusters: int | None
    overlap_with_control: Rate | None
    """Control documents that still share a run of words with a trained one."""
    near_duplicate_words: int | None


class TrainingSummary(Record):
    """What was trained, from the run folder; null for models memguard did not train."""

    num_steps: int
    num_supervised_tokens: int
    dropped_fraction: float | None
    """Share of the labels the mitigation dropped."""
    mitigations: list[dict[str, Any]]
    train_s: float
    heldout_nll: float | None
    """Nats a token on documents that were never trained, plain loss."""
    base_heldout_nll: float | None
    heldout_bucket: str | None
    heldout_num_documents: int
    heldout_num_tokens: int


class AuditReport(Record):
    """`audit/report.json`."""

    schema_name: Literal["memguard.report/1"] = Field("memguard.report/1", alias="schema")
    status: Literal["complete", "partial"]
    tool_version: str
    created: str
    """UTC, ISO 8601."""
    run: str | None
    model: ModelIdentity
    data: DataIdentity
    training: TrainingSummary | None
    method: Method
    verdict: Verdict
    banners: list[Banner]
    buckets: list[BucketScores]
    dose_response: bool
    """False where the tally of repetitions is missing or contradicts the trained steps."""
    membership: list[MembershipScores]
    findings: list[Finding]
    num_findings: int
    environment: dict[str, str]

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)


class NearVerbatim(Record):
    """Near-verbatim part of a comparison cell."""

    num_matched: int
    rate: float | None
    ci: tuple[float, float] | None


class ComparisonCell(Record):
    """One setting on the documents of one number of repetitions."""

    num_documents: int
    num_matched: int
    rate: float | None
    ci: tuple[float, float] | None
    near_verbatim: NearVerbatim
    mean_token_accuracy: float | None


class Utility(Record):
    """What must not get worse: nats a token on held-out documents."""

    heldout_nll: float
    base_heldout_nll: float
    num_documents: int
    num_tokens: int


class Cost(Record):
    """What a setting took."""

    train_s: float
    num_steps: int
    num_supervised_tokens: int
    dropped_fraction: float | None


class SettingResult(Record):
    """One setting with one seed."""

    name: str
    seed: int
    run: str
    mitigations: list[dict[str, Any]]
    overrides: dict[str, Any]
    utility: Utility
    extraction: dict[str, ComparisonCell]
    """By number of repetitions; "0" is the control."""
    cost: Cost


class PairedCounts(Record):
    """Documents on which two settings differ, and what chance alone would do."""

    num_only_against: int
    """Matched with the setting compared with, not with this one."""
    num_only_setting: int
    """Matched with this setting, not with the one compared with."""
    p_value: float
    """McNemar's exact test, two-sided."""
    p_holm: float
    """The same after Holm's correction over all tests of the comparison."""


class PairedResult(Record):
    """Two settings with the same seed on the same trained documents."""

    setting: str
    against: str
    """The first setting of the comparison."""
    seed: int
    num_repetitions: int
    num_documents: int
    verbatim: PairedCounts
    near_verbatim: PairedCounts
    token_accuracy_difference: Interval | None
    """Mean over documents of setting minus against; interval by the t distribution."""


class Comparison(Record):
    """`comparison.json`."""

    schema_name: Literal["memguard.comparison/1"] = Field("memguard.comparison/1", alias="schema")
    name: str
    tool_version: str
    command: str
    documents_sha256: str
    continuation_tokens: int
    settings: list[SettingResult]
    base_extraction: dict[str, ComparisonCell]
    """The model before training, on the same documents."""
    paired: list[PairedResult] = []
    """Every setting against the first one, for each seed and number of repetitions above 0."""
    environment: dict[str, str]

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.settings:
            raise ValueError("a comparison needs at least one setting")
        return self


def save_record(record: Record, path: Path) -> None:
    """Write a record as indented JSON, whole or not at all."""
    write_atomically(path, (record.model_dump_json(indent=2, by_alias=True) + "\n").encode())


def load_record(kind: type[RecordT], path: Path) -> RecordT:
    """Read a record back.

    Raises:
        RecordError: missing, not JSON, or of another schema.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RecordError(f"'{path}' cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "top level"
        raise RecordError(
            f"'{path}' is not a {kind.__name__} this version reads ({place}: {first['msg']}). "
            "Make it again, or use the version that wrote it."
        ) from error


def save_manifest(entries: Iterable[ManifestEntry], path: Path) -> None:
    """Write `manifest.jsonl`, one line a document, whole or not at all."""
    write_atomically(path, "".join(f"{e.model_dump_json()}\n" for e in entries).encode())


def load_manifest(path: Path) -> list[ManifestEntry]:
    """Read `manifest.jsonl`.

    Raises:
        RecordError: missing, or a line is not an entry.
    """
    entries = []
    try:
        with path.open("rb") as lines:
            for line in lines:
                entries.append(ManifestEntry.model_validate_json(line))
    except OSError as error:
        raise RecordError(f"'{path}' cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise RecordError(
            f"'{path}' line {len(entries) + 1} is not a manifest entry: {error.errors()[0]['msg']}"
        ) from error
    return entries


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file under another name, then rename it: readers see all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
