"""A metric of documents, its estimates, and its rows of results for each bucket.

Metric           meaning, unit, bounds and words
Estimator        a metric's mean or rate, its change from the base model, and the differences to the
                 control, each with the interval that its kind of values has
Evidence         the measurements of an audit, and the documents that they are of
tabulate_metric  value_N, base_N, buckets -> for each bucket the model, the base, and the difference
                 of the two, each minus that of the control
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memguard.audit.own_text import OwnText
from memguard.audit.requests import Inputs, Measured
from memguard.audit.statistics import (
    compute_difference,
    compute_mean,
    compute_mean_difference,
    compute_paired_difference,
    compute_paired_rates,
    compute_rate,
    find_difference_bounds,
    subtract,
)
from memguard.audit.windows import AuditDocument, is_member, list_clusters
from memguard.records import (
    NO_DOCUMENTS,
    ONE_TEXT,
    BucketRow,
    Interval,
    Rate,
    ResultRow,
    fill_row,
)
from memguard.records.results import Method


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """Meaning, unit and words of a metric: defined once, beside its probe."""

    name: str
    meaning: str
    """A sentence."""
    unit: str
    """documents, share, tokens, nats, bits, log10 queries, ..."""
    statistic: Literal["rate", "mean", "median", "auc"] = "mean"
    """How values of items become one number; of a rate they are 1 or 0."""
    is_length: bool = False
    """Whether it counts tokens of the continuation."""
    bounds: tuple[float, float] | None = None
    """Smallest and largest value; of a length, 0 and the tokens of the continuation."""
    higher_is_better: bool = False
    """False if a higher value means more memorization."""
    is_confidential: bool = False
    """Whether the value of a single text would confirm a guess of it: shown for two texts or more.
    """
    heading: str = ""
    """Of a column; "" derives it from the name."""
    spoken: str = ""
    """In a sentence; "" derives it from the name."""
    risk_rank: int | None = None
    """Place among the extraction risks, the strongest evidence first; None if it is no risk."""

    @property
    def is_rate(self) -> bool:
        """Whether the values of documents are 1 or 0."""
        return self.statistic == "rate"


def rate_metric(name: str, meaning: str, unit: str = "documents", **others: Any) -> Metric:
    """Return a metric whose values are 1 or 0."""
    return Metric(name=name, meaning=meaning, unit=unit, statistic="rate", **others)


def share_metric(name: str, meaning: str, **others: Any) -> Metric:
    """Return a metric with values from 0 to 1."""
    return Metric(name=name, meaning=meaning, unit="share", bounds=(0.0, 1.0), **others)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Estimator:
    """Estimates one metric over selections of N documents."""

    kind: Metric
    bounds: tuple[float, float] | None
    """Smallest and largest value of a document; None if there are none."""
    cluster_N: NDArray[np.int64]
    """Near-duplicate clusters."""

    def estimate(
        self, value_N: NDArray[np.float64], where_N: NDArray[np.bool_]
    ) -> Rate | Interval | None:
        """Return the mean, or the rate, of the selected documents."""
        clusters = self.cluster_N[where_N]
        if self.kind.is_rate:
            return compute_rate(value_N[where_N], clusters)
        return compute_mean(value_N[where_N], self.bounds, clusters)

    def compute_change(
        self, value_N: NDArray[np.float64], base_N: NDArray[np.float64], where_N: NDArray[np.bool_]
    ) -> Interval | None:
        """Return the values minus the base model's, over the same documents."""
        values, others, clusters = value_N[where_N], base_N[where_N], self.cluster_N[where_N]
        if self.kind.is_rate:
            return compute_paired_rates(values, others, clusters=clusters)
        return compute_paired_difference(values, others, bounds=self.bounds, clusters=clusters)

    def subtract_control(
        self, value_N: NDArray[np.float64], where_N: NDArray[np.bool_], control_N: NDArray[np.bool_]
    ) -> Interval | None:
        """Return the values of the selected documents minus those of the control."""
        if self.kind.is_rate:
            ones, others = (
                compute_rate(value_N[here_N], self.cluster_N[here_N])
                for here_N in (where_N, control_N)
            )
            return compute_difference(ones, others)
        return compute_mean_difference(
            value_N[where_N],
            value_N[control_N],
            bounds=self.bounds,
            first_clusters=self.cluster_N[where_N],
            second_clusters=self.cluster_N[control_N],
        )

    def subtract_changes(
        self,
        value_N: NDArray[np.float64],
        base_N: NDArray[np.float64],
        where_N: NDArray[np.bool_],
        control_N: NDArray[np.bool_],
    ) -> Interval | None:
        """Return the change from the base model minus that of the control."""
        limits = find_difference_bounds((0.0, 1.0) if self.kind.is_rate else self.bounds)
        if limits is None or not math.isfinite(limits[1]):
            return self.subtract_control(value_N - base_N, where_N, control_N)
        ones, others = (
            self.compute_change(value_N, base_N, here_N) for here_N in (where_N, control_N)
        )
        if ones is None or others is None:
            return None
        return subtract(ones, others, (2 * limits[0], 2 * limits[1]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """The measurements of an audit, by probe, and the documents that they are of; N windows."""

    inputs: Inputs
    buckets: Sequence[BucketRow]
    """Buckets in the report's order, including those without documents."""
    trained: Mapping[str, Measured]
    """Results of the audited model."""
    other: Mapping[str, Measured] | None = None
    """Results of the base model; None without one."""
    reference: Mapping[str, Measured] = field(default_factory=dict)
    """Results of the reference model."""
    dose_response: bool = False
    """Whether the counts of repetitions are valid."""
    skipped_because: Mapping[str, str] = field(default_factory=dict)
    """Reasons, by name of the probe, why the audit had no input for it; its `tabulate` is not
    called."""
    documents: Sequence[AuditDocument] = ()
    """All that may have been measured, with which own text is compared."""
    num_tightened: int = 0
    """Documents of which a risk budget dropped more labels during training than the goldfish."""

    @cached_property
    def bucket_N(self) -> NDArray[np.object_]:
        """Names of the buckets."""
        return np.array([w.document.bucket for w in self.inputs.windows], dtype=object)

    @cached_property
    def cluster_N(self) -> NDArray[np.int64]:
        """Near-duplicate clusters."""
        return list_clusters([window.document for window in self.inputs.windows])

    @cached_property
    def size_N(self) -> NDArray[np.int64]:
        """Tokens of the continuations."""
        return np.array([w.continuation_tokens for w in self.inputs.windows], dtype=np.int64)

    @cached_property
    def is_trained_N(self) -> NDArray[np.bool_]:
        """Whether each document was trained at least once."""
        return np.array([is_member(w.document) for w in self.inputs.windows], dtype=bool)

    @cached_property
    def own_text(self) -> OwnText:
        """Which texts are own text."""
        return OwnText(self.documents, self.inputs.windows, self.inputs.codec)

    @property
    def control(self) -> BucketRow | None:
        """The bucket of documents that were never trained."""
        return next((outline for outline in self.buckets if outline.role == "control"), None)


def tabulate_metric(
    evidence: Evidence,
    row: ResultRow,
    metric: Metric,
    value_N: NDArray[np.float64],
    other_N: NDArray[np.float64] | None,
    *,
    continuation_tokens: int,
) -> Iterator[ResultRow]:
    """Yield the rows of one metric: for each bucket the model, the base and their difference.

    ``row`` has probe, parameters and metric. Values are NaN where missing; ``other_N`` are the base
    model's, None without one. ``continuation_tokens`` is the largest value of a length.
    """
    estimator = Estimator(
        kind=metric,
        bounds=(0.0, float(continuation_tokens)) if metric.is_length else metric.bounds,
        cluster_N=evidence.cluster_N,
    )
    control = evidence.control
    control_N = None if control is None else evidence.bucket_N == control.bucket
    for outline in evidence.buckets:
        here_N = evidence.bucket_N == outline.bucket
        beside_N = None if outline is control else control_N
        named = replace(row, bucket=outline.bucket)
        yield from _tabulate_bucket(estimator, named, value_N, other_N, here_N, beside_N)


def _tabulate_bucket(
    estimator: Estimator,
    row: ResultRow,
    value_N: NDArray[np.float64],
    other_N: NDArray[np.float64] | None,
    here_N: NDArray[np.bool_],
    control_N: NDArray[np.bool_] | None,
) -> Iterator[ResultRow]:
    kind, cluster_N = estimator.kind, estimator.cluster_N

    def place(where_N: NDArray[np.bool_]) -> ResultRow:
        num_documents = int(where_N.sum())
        return replace(
            row,
            statistic="rate" if kind.is_rate else "mean",
            num_documents=num_documents,
            num_missing=int(here_N.sum()) - num_documents,
            num_clusters=count_clusters(cluster_N[where_N]),
        )

    def is_shown(where_N: NDArray[np.bool_]) -> bool:
        # The difference from the value of a single text would reveal that value.
        return not kind.is_confidential or len(np.unique(cluster_N[where_N])) > 1

    def subtract(row: ResultRow) -> ResultRow:
        return replace(row, against="base", statistic="difference")

    known_N = here_N & ~np.isnan(value_N)
    of_model = place(known_N)
    why_not = ONE_TEXT if of_model.num_documents else NO_DOCUMENTS
    if not is_shown(known_N):
        rows = [of_model]
        if other_N is not None:
            rows += [replace(of_model, model="base"), subtract(of_model)]
        yield from (fill_row(one, None, "", why_not=why_not) for one in rows)
        return
    minus_control = None
    if control_N is not None and is_shown(beside_N := control_N & ~np.isnan(value_N)):
        minus_control = estimator.subtract_control(value_N, known_N, beside_N)
    method: Method = "clopper-pearson" if kind.is_rate else "jackknife"
    yield fill_row(
        of_model,
        estimator.estimate(value_N, known_N),
        method,
        minus_control=minus_control,
        num_control=_count(control_N, value_N),
        why_not=why_not,
    )
    if other_N is None:
        return
    both_N = known_N & ~np.isnan(other_N)
    of_both = place(both_N)
    base = change = excess = None
    if both_N.any():
        base = estimator.estimate(other_N, both_N)
        change = estimator.compute_change(value_N, other_N, both_N)
        if control_N is not None and is_shown(beside_N := control_N & ~np.isnan(value_N - other_N)):
            excess = estimator.subtract_changes(value_N, other_N, both_N, beside_N)
    elif of_model.num_documents:
        why_not = "not measured with the base model"
    yield fill_row(replace(of_both, model="base"), base, method, why_not=why_not)
    yield fill_row(
        subtract(of_both),
        change,
        "tango" if kind.is_rate else "jackknife",
        minus_control=excess,
        num_control=_count(control_N, value_N - other_N),
        why_not=why_not,
    )


def count_clusters(clusters: NDArray[np.int64]) -> int | None:
    """Return the number of clusters of documents; None if each is a text of its own."""
    num_clusters = len(np.unique(clusters))
    return num_clusters if num_clusters < len(clusters) else None


def _count(where_N: NDArray[np.bool_] | None, value_N: NDArray[np.float64]) -> int:
    """Return how many of the documents have a value."""
    return 0 if where_N is None else int((where_N & ~np.isnan(value_N)).sum())
