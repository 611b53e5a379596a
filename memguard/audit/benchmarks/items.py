"""Values of tasks from the scores of their items, and paired differences, with intervals.

lm-eval joins N items with values v and, of a perplexity, weights w (words or bytes):

    mean                 sum v / N            perplexity           exp(- sum v / N)
    weighted_perplexity  exp(- sum v / sum w) bits_per_byte        - sum v / (sum w ln 2)

All are functions of two sums, so that a bootstrap (B draws of N items) needs only these. Items of
several seeds are drawn together: the same question under two seeds is not two questions.

    rates (0 or 1)       Clopper and Pearson; differences by Tango; McNemar's exact test
    other means          Student's t over the items, or their differences; paired t test
    all others           percentiles of B = 4,999 paired draws; p = 2 (1 + k) / (B + 1), k the
                         number of draws of the difference on the rarer side of 0

A task whose items have no numbers of their own (BLEU of a corpus) has no differences.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

from memguard.audit.statistics import (
    compute_mcnemar,
    compute_mean,
    compute_paired_difference,
    compute_paired_rates,
    compute_rate,
)
from memguard.records import Interval
from memguard.seeds import derive_generator

NUM_DRAWS: Final = 4999
_CHUNK = 250
"""Draws that are computed together: a chunk of 10,000 items takes 20 MB."""
_AS_LM_EVAL = 1e-6
"""Relative difference up to which a value that is computed here is that of lm-eval."""

Floats = NDArray[np.float64]
Kind = Literal["rate", "mean", "score"]


def _join_perplexity(total: Floats, weight: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(-total / weight))


_JOINS: Mapping[str, Callable[[Floats, Floats], Floats]] = {
    "mean": lambda total, weight: total / weight,
    "perplexity": _join_perplexity,
    "weighted_perplexity": _join_perplexity,
    "bits_per_byte": lambda total, weight: -total / (weight * math.log(2)),
}
"""Value from the sum of the items' values and that of their weights, by lm-eval's name."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemValues:
    """The items of one metric under one model and seed; N items."""

    aggregation: str
    value_N: Floats
    """NaN where an item has no number of its own."""
    weight_N: Floats | None = None

    @property
    def kind(self) -> Kind:
        """Whether each item is right or wrong, or has a value that is averaged, or neither."""
        if self.aggregation != "mean":
            return "score"
        return "rate" if bool(np.isin(self.value_N, (0.0, 1.0)).all()) else "mean"

    @property
    def can_be_drawn(self) -> bool:
        """Whether the value is a function of the items' numbers, so that items can be drawn."""
        is_known = self.aggregation in _JOINS and not np.isnan(self.value_N).any()
        return is_known and len(self.value_N) > 0

    def compute(self) -> float | None:
        """Return the value; None if it is not a function of the items, or not finite."""
        if not self.can_be_drawn:
            return None
        weight = float(len(self.value_N) if self.weight_N is None else self.weight_N.sum())
        if weight <= 0:
            return None
        join = _JOINS[self.aggregation]
        value = float(join(self.value_N.sum(keepdims=True), np.full(1, weight))[0])
        return value if math.isfinite(value) else None

    def is_as(self, value: float) -> bool:
        """Return whether the items give lm-eval's value, which then can be drawn again."""
        own = self.compute()
        return own is not None and math.isclose(
            own, value, rel_tol=_AS_LM_EVAL, abs_tol=_AS_LM_EVAL
        )

    def draw(self, index_BN: NDArray[np.int64]) -> Floats:
        """Return the value of each draw of items, [B]."""
        total_B = self.value_N[index_BN].sum(axis=1)
        weight_B = (
            np.full(len(index_BN), float(index_BN.shape[1]))
            if self.weight_N is None
            else self.weight_N[index_BN].sum(axis=1)
        )
        return _JOINS[self.aggregation](total_B, weight_B)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A paired difference with its interval and test."""

    interval: Interval
    test: Literal["mcnemar", "paired-t", "paired-bootstrap"]
    p_value: float | None
    """Two-sided; None if it cannot be computed."""
    statistic: float | None = None
    """t of a paired t test."""
    num_only_first: int | None = None
    """Items that only the first answers rightly; of rates."""
    num_only_second: int | None = None


def find_kind(values: Sequence[ItemValues]) -> Kind:
    """Return the kind of a metric of several models: a rate only if it is one of each."""
    kinds = {one.kind for one in values}
    return "score" if "score" in kinds else "mean" if "mean" in kinds else "rate"


def estimate(seeds: Sequence[ItemValues], kind: Kind, *, seed: int) -> Interval | None:
    """Return the mean value over seeds of the same items, its interval over the items.

    Returns:
        None if a value cannot be computed; without interval for fewer than two items.
    """
    computed = [one.compute() for one in seeds]
    known = [value for value in computed if value is not None]
    if not known or len(known) < len(computed):
        return None
    if kind == "rate" and len(seeds) == 1:
        rate = compute_rate(seeds[0].value_N)
        return None if rate.rate is None else Interval(value=rate.rate, ci=rate.ci)
    if kind == "score":
        drawn_B = draw_items(
            lambda index_BN: _average([s.draw(index_BN) for s in seeds]), seeds, seed
        )
        return _cut(math.fsum(known) / len(known), drawn_B)
    mean_N = _average([one.value_N for one in seeds])
    return compute_mean(mean_N, bounds=(0, 1) if kind == "rate" else None)


def subtract_items(
    pairs: Sequence[tuple[ItemValues, ItemValues]], kind: Kind, *, seed: int
) -> Difference | None:
    """Return first minus second, mean over seeds, paired by item.

    Returns:
        None if a value cannot be computed from the items.
    """
    assert len({len(one.value_N) for pair in pairs for one in pair}) == 1, "the same items"
    if any(one.compute() is None for pair in pairs for one in pair):
        return None
    if kind == "score":
        return _subtract_scores(pairs, seed)
    first_N, second_N = (_average([pair[place].value_N for pair in pairs]) for place in (0, 1))
    if kind == "rate" and len(pairs) == 1:
        interval = compute_paired_rates(first_N, second_N)
        assert interval is not None, "there are items"
        only_first, only_second = int((first_N > second_N).sum()), int((first_N < second_N).sum())
        return Difference(
            interval=interval,
            test="mcnemar",
            p_value=compute_mcnemar(only_first, only_second),
            num_only_first=only_first,
            num_only_second=only_second,
        )
    bounds = (0, 1) if kind == "rate" else None
    between = compute_paired_difference(first_N, second_N, bounds=bounds)
    assert between is not None, "there are items"
    statistic, p_value = _test_mean(first_N - second_N)
    return Difference(interval=between, test="paired-t", p_value=p_value, statistic=statistic)


def _average(arrays: Sequence[Floats]) -> Floats:
    return np.asarray(np.mean(np.stack(arrays), axis=0))


def _test_mean(difference_N: Floats) -> tuple[float | None, float | None]:
    """Return t and its two-sided p; None if differences that are all equal and not 0 give none."""
    count = len(difference_N)
    mean = float(difference_N.mean())
    error = float(difference_N.std(ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    if error <= 0:
        return None, 1.0 if mean == 0 else None
    t = mean / error
    return t, min(1.0, 2 * float(special.stdtr(count - 1, -abs(t))))


def _subtract_scores(pairs: Sequence[tuple[ItemValues, ItemValues]], seed: int) -> Difference:
    def draw(index_BN: NDArray[np.int64]) -> Floats:
        return _average([first.draw(index_BN) - second.draw(index_BN) for first, second in pairs])

    values = [(first.compute() or 0.0) - (second.compute() or 0.0) for first, second in pairs]
    drawn_B = draw_items(draw, [one for pair in pairs for one in pair], seed)
    rarer = min(int((drawn_B <= 0).sum()), int((drawn_B >= 0).sum()))
    return Difference(
        interval=_cut(math.fsum(values) / len(values), drawn_B),
        test="paired-bootstrap",
        p_value=min(1.0, 2 * (1 + rarer) / (NUM_DRAWS + 1)) if len(drawn_B) else None,
    )


def draw_items(
    compute: Callable[[NDArray[np.int64]], Floats], values: Sequence[ItemValues], seed: int
) -> Floats:
    """Return what is computed from each draw of items; empty below two items."""
    count = len(values[0].value_N)
    if count < 2:
        return np.empty(0)
    generator = derive_generator(seed, "bootstrap of items")
    sizes = [_CHUNK] * (NUM_DRAWS // _CHUNK) + [NUM_DRAWS % _CHUNK]
    return np.concatenate(
        [compute(generator.integers(count, size=(size, count))) for size in sizes if size]
    )


def _cut(value: float, drawn_B: Floats) -> Interval:
    """Return the value with percentiles of the draws; none where they do not vary."""
    if not len(drawn_B) or not np.isfinite(drawn_B).all() or np.ptp(drawn_B) <= 0:
        return Interval(value=value, ci=None)
    low, high = np.quantile(drawn_B, (0.025, 0.975))
    return Interval(value=value, ci=(min(float(low), value), max(float(high), value)))
