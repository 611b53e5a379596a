"""The audit report: a header and the five tables.

header   what was audited and how, which probes ran, verdict, banners, findings
tables   every number, see `tables.py`
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from memguard.records.record import Record
from memguard.records.results import Rate, ResultRow
from memguard.records.tables import Results, Tables
from memguard.records.texts import format_percent
from memguard.records.verdict import Verdict

# Results of audits during training: a few counts per bucket and step.


class Budget(Record):
    """Risk budget of the run: the limit per bucket and the action when it is exceeded."""

    metric: Literal["near_verbatim", "verbatim"]
    limit: float
    action: Literal["tighten", "stop"]


class WatchedStep(Record):
    """One audit during training; its rates are rows with this step."""

    step: int
    """Optimizer steps taken."""
    over_limit: list[str] = Field(default_factory=list)
    """Buckets with a higher extraction rate than the risk budget allows."""
    num_tightened: dict[str, int] = Field(default_factory=dict)
    """Documents of each whole bucket that are now trained with a lower k than at the start."""
    audit_s: float
    trained: list[str]
    """Buckets of trained documents."""


class StartLine(Record):
    """One start of a training; a line of metrics.jsonl."""

    event: Literal["start"] = "start"
    why: str
    """First start, or how the attempt before it ended."""
    step: int
    """Of the checkpoint that it went on from; 0 without one."""
    num_lost_steps: int
    """Steps after that checkpoint, which were taken again."""
    first_step_s: float
    """Seconds from the start of its process to the end of its first step."""


class WatchedLine(WatchedStep):
    """One audit during training; a line of metrics.jsonl."""

    event: Literal["audit"] = "audit"
    results: Results
    """Rates of each bucket: verbatim, near_verbatim, learned, token_accuracy. `learned` counts the
    documents that are extracted now but were not before training: near-verbatim (verbatim if no
    text was generated), or by the budget's metric."""

    def to_step(self) -> WatchedStep:
        """Return what the header of a report has of it."""
        return WatchedStep(**{name: getattr(self, name) for name in WatchedStep.model_fields})

    def describe(self) -> str:
        """Return the log line, which reports the bucket closest to full extraction."""

        def find(metric: str, bucket: str) -> ResultRow:
            (row,) = (r for r in self.results if (r.metric, r.bucket) == (metric, bucket))
            return row

        if not self.trained:
            return f"audit after step {self.step}: no trained document of its sample can be audited"
        worst = max(
            self.trained,
            key=lambda name: (
                find("learned", name).value or 0.0,
                find("token_accuracy", name).value or 0.0,
            ),
        )
        learned, accuracy = find("learned", worst), find("token_accuracy", worst).value or 0.0
        tightened = sum(self.num_tightened.get(name, 0) for name in self.trained)
        return (
            f"audit after step {self.step}: {learned.num_matched} of {learned.num_documents} "
            f"documents of {worst} extracted, teacher-forced accuracy {format_percent(accuracy, 0)}"
            f"{f'; {tightened} trained more strictly' if tightened else ''}"
        )


class Finding(Record):
    """A document that the model was trained on, or was to forget, and that any probe extracted.

    Its text is referenced, not quoted.
    """

    id: str
    text_hmac: str | None
    """Keyed hash of the text, the same in every audit with the same identity key; null without."""
    bucket: str
    role: Literal["trained", "forget"]
    num_repetitions: int | None
    severity: Literal["high", "medium", "low", "info"]
    sentence: str
    found_by: dict[str, str]
    """What each method that extracted it shows, by the name of the method: one of `METHODS`, or a
    probe of another package."""
    num_correct: int
    continuation_tokens: int
    first_divergence: int
    base_num_correct: int | None


METHODS: Final = ("greedy", "near-verbatim", "sampling", "another window", "attacks")
"""Methods that extract documents, in the order of pages; a greedy one is not near-verbatim too."""


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
    counted: Literal["documents", "canaries", "texts", "items"] = "documents"
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
    answers: Literal["none", "some", "all"] = "none"
    """Documents with an answer, which is continued as a whole after everything before it."""
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
    utility: list[dict[str, Any]] = Field(default_factory=list)
    """Benchmark tasks, each with its settings and a hash of its items; empty for none."""


class AdapterIdentity(Record):
    """Adapter and base whose merged weights were audited."""

    description: str
    """Kind, rank and alpha, as in ``LoRA, r=8, alpha=16``."""
    weights_sha256: str
    """Hash of the adapter's two files."""
    base: str
    base_weights_sha256: str


LoadAs = Literal["stored", "merged", "int8", "nf4"]
"""Form in which a model is loaded for its audit: as stored, its adapter merged, or quantised."""
QUANTISING_LIBRARIES: Mapping[LoadAs, str] = {"int8": "torchao", "nf4": "bitsandbytes"}
"""Library that quantises the weights; those of the extra `quant`."""


class ModelIdentity(Record):
    """Weights that were audited."""

    name: str
    weights_sha256: str
    """Of the stored weights, in whatever form they were loaded."""
    load_as: LoadAs = "stored"
    """A report of another form is not that of the run or of the stored weights."""
    load_as_detail: str = ""
    """How the loaded weights were made, and the library that quantised them; "" as stored."""
    num_parameters: int
    base: str | None
    """Model that was scored for comparison."""
    base_weights_sha256: str | None
    adapter: AdapterIdentity | None = None
    """null: the model has weights of its own."""

    def write_form(self) -> str:
        """Return how the model was loaded, to follow its name; "" as stored."""
        return "" if self.load_as == "stored" else f", loaded as {self.load_as}"


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
    identity_key: str | None = None
    """Fingerprint of the key of the documents' hashes; null without a key."""
    num_texts: int | None = None
    """Different texts among the documents, by keyed hash; null without a key."""

    @property
    def num_equal(self) -> int:
        """Documents whose text an earlier one has, with which they share an identity."""
        return 0 if self.num_texts is None else self.num_documents - self.num_texts


class LossPoint(Record):
    """A loss after a step."""

    step: int
    nll: float
    """Nats a token."""


class LossCurve(Record):
    """The losses of a run over its steps."""

    training: list[LossPoint] = Field(default_factory=list)
    """Mean loss of a group of steps, after its last one; at most 200 groups of equal size."""
    heldout: list[LossPoint] = Field(default_factory=list)
    """Plain loss on documents that were never trained; none for fewer than two documents."""


KeptBy = Literal["last", "heldout", "budget"]
"""Why the weights of a step were exported: it was the last one, had the lowest held-out loss, or
was the last audited one within the budget."""


class TrainingSummary(Record):
    """Summary of the training, from the run folder; null for models memguard did not train."""

    num_steps: int
    """Steps of the exported weights."""
    last_step: int
    """Steps that were taken."""
    kept_by: KeptBy = "last"
    stopped_by: Literal["budget", "heldout"] | None = None
    """What ended training before its last step."""
    curve: LossCurve = Field(default_factory=LossCurve)
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
    starts: list[StartLine] = Field(default_factory=list)
    """Starts of a training that was interrupted; empty for a single one."""
    watched: list[WatchedStep] = Field(default_factory=list)
    """Audits during training; empty if there were none."""
    budget: Budget | None = None


class AuditResults(Record):
    """The parts of a report that are computed from the measurements."""

    probe_runs: list[ProbeRun]
    """One entry per probe, in the order of the suite, then that of the benchmark tasks;
    `method.probes` and `method.utility` have their settings."""
    verdict: Verdict
    banners: list[Banner]
    dose_response: bool
    """False if the repetition counts are missing or contradict the trained steps."""
    findings: list[Finding]
    """The worst ones; `findings.csv` has all."""
    num_findings: int
    """Documents that came out."""
    num_by_method: int
    """Pairs of such a document and a method that extracted it."""
    cut: CutDocuments | None = None
    """null: every document was audited whole."""
    tables: Tables

    def describe_findings(self) -> str:
        """Count the documents that came out, and the methods that extracted them."""
        number, by_method = self.num_findings, self.num_by_method
        if not number:
            return "No document was extracted."
        were = "document was" if number == 1 else "documents were"
        more = f" ({by_method:,} findings by method)" if by_method > number else ""
        return f"{number:,} {were} extracted{more}."


class AuditHeader(Record):
    """What was audited, and how."""

    schema_name: Literal["memguard.report/7"] = Field("memguard.report/7", alias="schema")
    tool_version: str
    code_sha256: str
    """Hash of memguard's source files that audited, see `runtime.environment.hash_code`."""
    created: str
    """UTC, ISO 8601."""
    run: str | None
    model: ModelIdentity
    data: DataIdentity
    training: TrainingSummary | None
    method: Method
    environment: dict[str, str]

    @property
    def subject(self) -> str:
        """Name of the run, or of the model, and the form in which it was loaded."""
        return f"{self.run or self.model.name}{self.model.write_form()}"


class AuditReport(AuditResults, AuditHeader):
    """`audit/report.json`."""
