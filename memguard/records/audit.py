"""The audit report: its verdict, findings and scores."""

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from memguard.records.manifest import Role
from memguard.records.record import Record
from memguard.records.scores import (
    BLIND,
    AttackCostBucket,
    AttackCostScores,
    AttackedBucket,
    BucketScores,
    CanaryScores,
    DoseTrend,
    ExtractedCopies,
    GeneratedTexts,
    Interval,
    MaskChange,
    Measure,
    MeasuredBucket,
    MembershipScores,
    Rate,
    RiskName,
)
from memguard.records.verdict import Verdict

# Results of audits during training: a few counts per bucket and step.


class Budget(Record):
    """Risk budget of the run: the limit per bucket and the action when it is exceeded."""

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
    """Counted on generated text; null if no text was generated."""
    num_learned: int
    """Documents extracted now but not before training: near-verbatim (verbatim if no text was
    generated), or by the budget's metric."""
    mean_token_accuracy: float
    """Teacher-forced, mean over documents."""
    num_tightened: int
    """Documents of the whole bucket that are now trained with a lower k than at the start."""


class WatchedStep(Record):
    """One audit during training; a line of metrics.jsonl."""

    event: Literal["audit"] = "audit"
    step: int
    """Optimizer steps taken."""
    buckets: list[WatchedBucket]
    over_limit: list[str] = Field(default_factory=list)
    """Buckets with a higher extraction rate than the risk budget allows."""
    audit_s: float

    def describe(self) -> str:
        """Return the log line, which reports the bucket closest to full extraction."""
        trained = [bucket for bucket in self.buckets if bucket.role == "trained"]
        worst = max(
            trained,
            key=lambda bucket: (
                bucket.num_learned / bucket.num_documents,
                bucket.mean_token_accuracy,
            ),
        )
        tightened = sum(bucket.num_tightened for bucket in trained)
        return (
            f"audit after step {self.step}: {worst.num_learned} of {worst.num_documents} documents "
            f"of {worst.bucket} extracted, teacher-forced accuracy {worst.mean_token_accuracy:.0%}"
            f"{f'; {tightened} trained more strictly' if tightened else ''}"
        )


class Finding(Record):
    """A document that the model memorized; its text is referenced, not quoted."""

    id: str
    bucket: str
    num_repetitions: int | None
    severity: Literal["high", "medium", "low", "info"]
    sentence: str
    num_correct: int
    continuation_tokens: int
    first_divergence: int
    base_num_correct: int | None
    text_hmac: str | None


class Banner(Record):
    """A warning or note shown above the results."""

    level: Literal["warning", "note"]
    text: str


class ProbeRun(Record):
    """One probe of the suite: the number of items it ran on, or the reason it did not run."""

    name: str
    version: int
    num_documents: int | None
    """Documents with a result; null if the probe did not run, never 0."""
    counted: Literal["documents", "canaries", "texts"] = "documents"
    """What `num_documents` counts."""
    reason_not_run: str | None
    """null if it ran."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.num_documents is None) == (self.reason_not_run is None):
            raise ValueError("a probe has either a number of documents or a reason it did not run")
        if self.num_documents is not None and self.num_documents < 1:
            raise ValueError("a probe without documents did not run: give the reason")
        return self


class CutDocuments(Record):
    """Documents longer than a row or the model's context, which were audited in part."""

    num_documents: int
    num_given: int
    """All documents, cut or not."""
    longest_tokens: int
    """Length of the longest document, uncut."""
    used_tokens: int
    """Largest number of tokens used of one document."""
    window: Literal["last", "first"]
    by: Literal["training", "context"]
    """training: cut into pieces of `data.seq_len`; context: cut to the model's maximum length."""
    num_inside_completion: int
    """Completions whose own first tokens serve as the prefix, because the audited part contains too
    little of the prompt."""


class Method(Record):
    """Settings of the audit, sufficient to reproduce its numbers."""

    suite: str
    suite_version: int
    probes: list[dict[str, Any]]
    continuation_tokens: int
    prefix_tokens: int | None
    """null: everything before the continuation."""
    window: Literal["last", "first"] = "last"
    """Part that was audited of documents longer than a row or the model's context."""
    max_edit_share: float
    """A match is near-verbatim with at most this number of edits (share of the continuation)."""
    tiny_margin: float
    dtype: str
    batch_tokens: int | None
    """null: as many as fit in memory."""
    sample_size: int | None = None
    """Largest number of documents scored per bucket; null: all."""
    seed: int
    command: str
    wall_s: float


class AdapterIdentity(Record):
    """Adapter and base whose merged weights were audited."""

    description: str
    """Kind, rank and alpha, as in ``LoRA, r=8, alpha=16``."""
    weights_sha256: str
    """Hash of the adapter's two files."""
    base: str
    base_weights_sha256: str


class ModelIdentity(Record):
    """Weights that were audited."""

    name: str
    weights_sha256: str
    num_parameters: int
    base: str | None
    """Model that was scored for comparison."""
    base_weights_sha256: str | None
    adapter: AdapterIdentity | None = None
    """null: the model has weights of its own."""


class DataIdentity(Record):
    """Documents that were audited."""

    sources: list[str]
    documents_sha256: str
    """Hash of the ids and token hashes of all documents, in order."""
    num_documents: int
    num_clusters: int | None
    overlap_with_control: Rate | None
    """Control documents that still share a run of words with a trained one."""
    near_duplicate_words: int | None


class TrainingSummary(Record):
    """Summary of the training, from the run folder; null for models memguard did not train."""

    num_steps: int
    num_supervised_tokens: int
    dropped_fraction: float | None
    """Share of the labels that mitigations dropped."""
    mitigations: list[dict[str, Any]]
    num_removed: int | None = None
    """Documents removed as copies before training; null if no mitigation removes documents."""
    epsilon: float | None = None
    """Privacy loss per row at `delta`, for the schedule of this run; null without dp_sgd."""
    epsilon_if_sampled: float | None = None
    """Privacy loss per row if each step had sampled its rows independently, which it does not; for
    comparison with published values."""
    delta: float | None = None
    train_s: float
    heldout_nll: float | None
    """Plain loss on documents that were never trained (nats a token); null for fewer than two."""
    base_heldout_nll: float | None
    heldout_bucket: str | None
    heldout_num_documents: int
    heldout_num_tokens: int
    watched: list[WatchedStep] = Field(default_factory=list)
    """Audits during training; empty if there were none."""
    budget: Budget | None = None
    stopped_by_budget: bool = False


VariantName = Literal["model", "adapter", "merged", "int8", "nf4"]
"""`model`: the weights of a model without an adapter, always its first variant."""
VARIANT_LIBRARIES: dict[VariantName, str] = {"int8": "torchao", "nf4": "bitsandbytes"}
"""Library that quantises a variant; those of the extra `quant`."""


class VariantBucket(Record):
    """One variant on the documents of one bucket."""

    bucket: str
    role: Role
    num_documents: int
    risks: dict[RiskName, Rate]
    """Extraction rates: verbatim, near-verbatim, and within `NUM_RISK_QUERIES` sampled queries, as
    far as they were measured; no attacks run on variants."""
    attack_cost: AttackCostScores | None
    """null if the suite does not measure it."""
    mean_logprob: Interval | None
    """Mean over documents of the mean log-probability of a continuation token (nats)."""
    differences: dict[RiskName, Interval] = Field(default_factory=dict)
    """`risks` minus those of the first variant, paired by document; empty for the first."""
    logprob_difference: Interval | None = None
    """`mean_logprob` minus that of the first variant, paired by document; null for the first."""


class Variant(Record):
    """One variant of the model."""

    name: VariantName
    description: str
    """Weights and the library that quantised them."""
    reason_not_generated: str | None
    """null if texts were generated for near-verbatim matches."""
    heldout_nll: float | None
    """Loss on documents that were never trained (nats a token); null without such documents."""
    heldout_difference: Interval | None = None
    """`heldout_nll` minus that of the first variant, paired by document; null for the first."""
    buckets: list[VariantBucket]


class VariantComparison(Record):
    """The variants; the others are compared with the first one."""

    heldout_bucket: str | None
    heldout_num_documents: int
    heldout_num_tokens: int
    variants: list[Variant]


class AuditHeader(Record):
    """What was audited, and how."""

    schema_name: Literal["memguard.report/2"] = Field("memguard.report/2", alias="schema")
    tool_version: str
    created: str
    """UTC, ISO 8601."""
    run: str | None
    model: ModelIdentity
    data: DataIdentity
    training: TrainingSummary | None
    method: Method

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)


class AuditResults(Record):
    """The parts of a report that are computed from the measurements."""

    probe_runs: list[ProbeRun]
    """One entry per probe, in the order of the suite; `method.probes` has their settings."""
    verdict: Verdict
    banners: list[Banner]
    buckets: list[BucketScores]
    generated: GeneratedTexts
    base_generated: GeneratedTexts | None
    """null without a base model."""
    dose_response: bool
    """False if the repetition counts are missing or contradict the trained steps."""
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

    @property
    def control(self) -> BucketScores | None:
        """The bucket of documents that were never trained."""
        return next((bucket for bucket in self.buckets if bucket.role == "control"), None)

    @property
    def blind_auc(self) -> Interval | None:
        """AUC of the blind baseline; None if it did not run."""
        return next((scores.auc for scores in self.membership if scores.score == BLIND), None)

    def find_cost(self, bucket: str | None) -> AttackCostBucket | None:
        """Return the attack cost of a bucket; None if it was not measured."""
        return next((cost for cost in self.attack_cost if cost.bucket == bucket), None)

    def find_gain(self, bucket: str) -> MeasuredBucket | None:
        """Return the token accuracy of a bucket if training raised it; None otherwise.

        The change from the base model must be above 0 by more than its interval. None is returned
        too if the blind baseline separates trained documents from the control, because the control
        then does not show what other training would have added.
        """
        blind = self.blind_auc
        if blind is None or blind.ci is None or not blind.ci[0] <= 0.5 <= blind.ci[1]:
            return None
        for measure in self.measures:
            if (measure.probe, measure.metric) == ("extraction", "token_accuracy"):
                row = next((row for row in measure.buckets if row.bucket == bucket), None)
                change = None if row is None else row.change_from_base
                return row if change and change.ci and change.ci[0] > 0 else None
        return None


class AuditReport(AuditResults, AuditHeader):
    """`audit/report.json`."""

    variants: VariantComparison | None = None
    """null unless they were requested."""
    environment: dict[str, str]
