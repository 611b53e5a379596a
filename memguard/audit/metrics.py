"""Every metric of a document, and how it is estimated over documents.

METRICS      meaning, unit and bounds by name
Estimator    a metric's mean or rate, its change from the base model, and the differences to the
control, each with the interval that its kind of values has
"""

import math
from dataclasses import dataclass

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
    """Meaning and unit of a metric."""

    meaning: str
    unit: str
    is_rate: bool = False
    """Whether the values of documents are 1 or 0."""
    is_length: bool = False
    """Whether it counts tokens of the continuation."""
    bounds: tuple[float, float] | None = None
    """Smallest and largest value; of a length, see `ProbeTable.find_bounds`."""
    higher_is_better: bool = False
    is_confidential: bool = False
    """Whether the value of a single text would confirm a guess of it: shown for two texts or more.
    """


def _rate(meaning: str) -> Metric:
    return Metric(meaning=meaning, unit="documents", is_rate=True)


def _share(meaning: str, *, higher_is_better: bool = False) -> Metric:
    bounds = (0.0, 1.0)
    return Metric(meaning=meaning, unit="share", bounds=bounds, higher_is_better=higher_is_better)


def _length(meaning: str) -> Metric:
    return Metric(meaning=meaning, unit="tokens", is_length=True)


METRICS: dict[str, Metric] = {
    "verbatim": _rate("All tokens match."),
    "near_verbatim": _rate("Greedy text within 10 % edits of the true one."),
    "teacher_forced_90": _rate(
        "At least 90 % of the tokens are the most likely ones, given the true text before each."
    ),
    "token_accuracy": _share(
        "Tokens that are the most likely ones, given the true text before each."
    ),
    "extraction_strength": _share("Share at the end that is predicted without a wrong token."),
    "first_divergence": _length("Tokens that greedy decoding matches before its first wrong one."),
    "longest_run": _length("Longest run of correct tokens."),
    "logprob": Metric(
        meaning="Mean log-probability of a token.",
        unit="nats",
        bounds=(-math.inf, 0.0),
        is_confidential=True,
    ),
    "rouge_l": _share("Longest common subsequence with the generated text (ROUGE-L F1)."),
    "longest_copied_run": _length("Longest run of the true text in the generated text."),
    "edit_distance": _share(
        "Edits from the generated to the true text, over its length.", higher_is_better=True
    ),
    "bleu_above_0.75": _rate("BLEU above 0.75 (approximate memorization, Ippolito et al. 2022)."),
    "type_token_ratio": _share(
        "Share of distinct tokens in the generated text; low for repetitive text.",
        higher_is_better=True,
    ),
}
"""Every metric by its name."""


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
