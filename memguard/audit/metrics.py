"""A metric of documents, and how it is estimated over documents.

Metric       meaning, unit, bounds and words
Estimator    a metric's mean or rate, its change from the base model, and the differences to the
control, each with the interval that its kind of values has
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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
from memguard.records import Interval, Rate


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
        self,
        value_N: NDArray[np.float64],
        base_N: NDArray[np.float64],
        where_N: NDArray[np.bool_],
    ) -> Interval | None:
        """Return the values minus the base model's, over the same documents."""
        values, others, clusters = value_N[where_N], base_N[where_N], self.cluster_N[where_N]
        if self.kind.is_rate:
            return compute_paired_rates(values, others, clusters=clusters)
        return compute_paired_difference(values, others, bounds=self.bounds, clusters=clusters)

    def subtract_control(
        self,
        value_N: NDArray[np.float64],
        where_N: NDArray[np.bool_],
        control_N: NDArray[np.bool_],
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
