"""What audits during training found: a few numbers a bucket, step by step."""

from typing import Literal

from pydantic import Field

from memguard.records.manifest import Role
from memguard.records.record import Record


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
    num_learnt: int
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
            key=lambda each: (each.num_learnt / each.num_documents, each.mean_token_accuracy),
        )
        tightened = sum(bucket.num_tightened for bucket in trained)
        return (
            f"audit after step {self.step}: {worst.num_learnt} of {worst.num_documents} documents "
            f"of {worst.bucket} extracted, teacher-forced accuracy {worst.mean_token_accuracy:.0%}"
            f"{f'; {tightened} trained more strictly' if tightened else ''}"
        )
