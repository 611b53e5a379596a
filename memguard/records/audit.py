"""What an audit says: the report, its findings and its verdict."""

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from memguard.records.manifest import Role
from memguard.records.record import Record
from memguard.records.scores import (
    BLIND,
    AttackCostBucket,
    AttackedBucket,
    BucketScores,
    CanaryScores,
    DoseTrend,
    ExtractedCopies,
    GeneratedTexts,
    MaskChange,
    Measure,
    MembershipScores,
    Rate,
    RiskName,
)

# What audits during training found: a few numbers a bucket, step by step.


class Budget(Record):
    """How much of a bucket might be extractable, and what was to happen then."""

    metric: Literal["near_verbatim", "verbatim"]
    limit: float
    action: Literal["tighten", "stop"]


class WatchedBucket(Record):
    """The audited documents of one bucket at one step."""

    bucket: str
    role: Role
    num_documents: int
    num_verbatim: int
    num_near_verbatim: int | None
    """Of generated text; null where nothing was generated."""
    num_learned: int
    """Extracted now and not before training: near-verbatim (verbatim where nothing was generated),
    or by the budget's metric."""
    mean_token_accuracy: float
    """Teacher-forced, mean over documents."""
    num_tightened: int
    """Of ALL the bucket's documents, those trained with a lower k than they began with."""


class WatchedStep(Record):
    """One audit during training; a line of metrics.jsonl."""

    event: Literal["audit"] = "audit"
    step: int
    """Steps taken."""
    buckets: list[WatchedBucket]
    over_limit: list[str] = Field(default_factory=list)
    """Buckets of which more was extracted than the risk budget allows."""
    audit_s: float

    def describe(self) -> str:
        """Return the line for a log, of the bucket of which most is, or is nearly, extracted."""
        trained = [bucket for bucket in self.buckets if bucket.role == "trained"]
        worst = max(
            trained,
            key=lambda each: (each.num_learned / each.num_documents, each.mean_token_accuracy),
        )
        tightened = sum(bucket.num_tightened for bucket in trained)
        return (
            f"audit after step {self.step}: {worst.num_learned} of {worst.num_documents} documents "
            f"of {worst.bucket} extracted, teacher-forced accuracy {worst.mean_token_accuracy:.0%}"
            f"{f'; {tightened} trained more strictly' if tightened else ''}"
        )


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
    """The sentence that leads the page; the worst rate of extraction decides."""

    level: Literal["recites", "not-above-control", "no-control", "inconclusive"]
    metric: RiskName
    bucket: str
    sentence: str


class ProbeRun(Record):
    """One probe of the suite: what it ran on, or why it did not run."""

    name: str
    version: int
    num_documents: int | None
    """With a result; null where it did not run, never 0."""
    counted: Literal["documents", "canaries", "texts"] = "documents"
    """What `num_documents` counts."""
    reason_not_run: str | None
    """null where it ran."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.num_documents is None) == (self.reason_not_run is None):
            raise ValueError("a probe has either documents or a reason why it did not run")
        if self.num_documents is not None and self.num_documents < 1:
            raise ValueError("a probe without a document did not run: give the reason")
        return self


class CutDocuments(Record):
    """Documents of which only a part was audited, being longer than a row or a context."""

    num_documents: int
    num_given: int
    """All documents, cut or not."""
    longest_tokens: int
    """Of the longest, whole."""
    used_tokens: int
    """Most tokens that were used of one."""
    window: Literal["last", "first"]
    by: Literal["training", "context"]
    """training: in pieces of `data.seq_len`; context: by what the model has positions for."""
    num_inside_completion: int
    """Completions whose own first tokens are the prefix: their part holds too little prompt."""


class Method(Record):
    """How the numbers were made, enough to make them again."""

    suite: str
    suite_version: int
    probes: list[dict[str, Any]]
    continuation_tokens: int
    prefix_tokens: int | None
    """null: everything before the continuation."""
    window: Literal["last", "first"] = "last"
    """Which part of a document longer than a row, or the model's context, was audited."""
    max_edit_share: float
    """Near-verbatim: edits of at most this share of the continuation's tokens."""
    tiny_margin: float
    dtype: str
    batch_tokens: int | None
    """null: as many as fit."""
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
    num_removed: int | None = None
    """Documents that were given and not trained, being copies; null where none was asked to."""
    epsilon: float | None = None
    """Privacy loss of a row at `delta`, by the run's own schedule; null without dp_sgd."""
    epsilon_if_sampled: float | None = None
    """As if each step had drawn its rows anew, which it does not; to compare with papers."""
    delta: float | None = None
    train_s: float
    heldout_nll: float | None
    """Nats a token on documents that were never trained, plain loss."""
    base_heldout_nll: float | None
    heldout_bucket: str | None
    heldout_num_documents: int
    heldout_num_tokens: int
    watched: list[WatchedStep] = Field(default_factory=list)
    """Audits during training; empty where there were none."""
    budget: Budget | None = None
    stopped_by_budget: bool = False


class AuditReport(Record):
    """`audit/report.json`."""

    schema_name: Literal["memguard.report/1"] = Field("memguard.report/1", alias="schema")
    tool_version: str
    created: str
    """UTC, ISO 8601."""
    run: str | None
    model: ModelIdentity
    data: DataIdentity
    training: TrainingSummary | None
    method: Method
    probe_runs: list[ProbeRun]
    """One for each probe of the suite, in its order; `method.probes` has their settings."""
    verdict: Verdict
    banners: list[Banner]
    buckets: list[BucketScores]
    generated: GeneratedTexts
    base_generated: GeneratedTexts | None
    """null without a base model."""
    dose_response: bool
    """False where the tally of repetitions is missing or contradicts the trained steps."""
    membership: list[MembershipScores]
    findings: list[Finding]
    num_findings: int
    cut: CutDocuments | None = None
    """null: every document was audited whole."""
    measures: list[Measure] = Field(default_factory=list)
    attack_cost: list[AttackCostBucket] = Field(default_factory=list)
    attacks: list[AttackedBucket] = Field(default_factory=list)
    extracted_copies: list[ExtractedCopies] = Field(default_factory=list)
    canaries: CanaryScores | None = None
    mask_changes: list[MaskChange] = Field(default_factory=list)
    trends: list[DoseTrend] = Field(default_factory=list)
    environment: dict[str, str]

    @property
    def is_blind_at_chance(self) -> bool:
        """Whether the blind baseline ran and does not tell trained documents and control apart."""
        blind = next((one.auc for one in self.membership if one.score == BLIND), None)
        return blind is not None and blind.ci is not None and blind.ci[0] <= 0.5 <= blind.ci[1]

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)
