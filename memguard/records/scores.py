"""Estimates with their intervals, curves, and the names of the extraction risks."""

from typing import Literal

from memguard.records.record import Record

RiskName = Literal["verbatim", "near_verbatim", "attack_cost", "attack"]
"""Extraction methods: greedy text that matches exactly or nearly, text sampled within
`NUM_RISK_QUERIES` queries, text extracted verbatim by the best of the attacks that ran."""

NUM_RISK_QUERIES = 1_000_000
"""A document whose attack cost is at most this counts as extracted (queries)."""

RISK_NAMES: dict[RiskName, str] = {
    "verbatim": "verbatim",
    "near_verbatim": "near-verbatim",
    "attack_cost": f"within {NUM_RISK_QUERIES:,} queries",
    "attack": "best attack",
}
"""The extraction methods as sentences and tables name them."""


class Texts(Record):
    """The different texts among documents of which some are near-duplicates."""

    num_texts: int
    """Clusters of near-duplicates; a document without any is a cluster."""
    num_matched: int
    """Texts of which at least one document matches."""
    num_effective: float
    """Documents without near-duplicates that are as much evidence: (sum of cluster sizes)^2 / sum
    of their squares."""


class Rate(Record):
    """A share of documents with its counts and 95 % interval (Clopper-Pearson unless stated)."""

    num_documents: int
    num_matched: int
    rate: float | None
    """null if there are no documents."""
    ci: tuple[float, float] | None
    """Of the same rate of `texts.num_effective` documents; null below two texts."""
    texts: Texts | None = None
    """null if no two of the documents are near-duplicates."""

    @property
    def num_effective(self) -> float:
        """Number of documents at which intervals are computed."""
        return self.num_documents if self.texts is None else self.texts.num_effective


MIN_FOR_MEANS = 25
"""Texts below which the interval of a mean of bounded values is marked: it may be too narrow."""


class Interval(Record):
    """An estimate with its 95 % interval."""

    value: float
    ci: tuple[float, float] | None


MIN_FOR_QUANTILES = 10
"""Minimum number of documents for quantiles of the attack cost."""


BLIND = "blind"
"""Membership score of the blind baseline, which reads the texts but has no model access."""


class RocCurve(Record):
    """Ranks of a membership score: trained documents above few control documents."""

    score: str
    num_members: int
    """Trained documents with the score."""
    num_control: int
    """Control documents with the score."""
    num_allowed: tuple[int, ...]
    """Maximum numbers of control documents above a threshold, ascending, from 0 to all."""
    num_matched: tuple[int, ...]
    """For each, the trained documents above the lowest such threshold."""
