"""Variants of an audited model as it may be shipped, compared on the same documents."""

from typing import Literal

from pydantic import Field

from memguard.records.manifest import Role
from memguard.records.record import Record
from memguard.records.scores import AttackCostScores, Interval, Rate, RiskName

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
