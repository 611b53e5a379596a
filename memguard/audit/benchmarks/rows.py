"""Results of tasks -> rows of the results table, with paired differences from the base model.

    value        one row for each task, metric and model; its interval is over the items
    difference   trained minus base on the same items, if both answered the same
    detail       how each task was answered, and what its number of items can show

The rows count items as `num_documents`. They are no extraction risk: they take no part in the
verdict, and their control is the base model, not the documents that were never trained.

The smallest difference that N items show is that with a power of 0.8 (two-sided, 0.05). Of two
models of which the share s of the items is answered rightly by exactly one, the number M of these
is binomial (N, s). With a difference d of the rates, each of them is answered by the better model
with probability (s + d) / 2 s. McNemar's exact test rejects for M items if at most c(M) of them are
of one model:

    power(d) = sum over M of P[M] (P[Bin(M, q) <= c(M)] + P[Bin(M, 1 - q) <= c(M)])

A difference d needs a share s of at least d, so s is raised to d where fewer items differ.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import special

from memguard.audit.benchmarks.items import (
    Difference,
    ItemValues,
    Kind,
    draw_items,
    estimate,
    find_kind,
    subtract_items,
)
from memguard.audit.statistics import compute_rate
from memguard.records import DetailRow, Interval, MetricRow, Rate, ResultRow, Tables, fill_row
from memguard.records.results import Method
from memguard.records.utility import ITEMS, UTILITY, TaskDetail, TaskMetric, TaskResult, name_task

VERSION = 1
"""Of the rows."""
NO_ITEM_NUMBERS = "lm-eval gives no number of each item from which this value follows"
OTHER_ITEMS = "the two models answered other items"
NO_ITEMS = "no items"
_Z = 1.959964
_INTERVALS: Mapping[Kind, Method] = {"rate": "clopper-pearson", "mean": "t", "score": "bootstrap"}
DIFFERENCE_METHODS: Mapping[Kind, Method] = {"rate": "tango", "mean": "t", "score": "bootstrap"}
"""Methods of the intervals of differences."""


def tabulate_utility(results: Sequence[TaskResult], *, seed: int) -> Tables:
    """Return the rows, metrics and details of tasks."""
    tasks: dict[str, dict[str, TaskResult]] = {}
    for result in results:
        tasks.setdefault(result.task, {})[result.model] = result
    answered = [models for models in tasks.values() if "trained" in models]
    rows: list[ResultRow] = []
    metrics: list[MetricRow] = []
    details = []
    for models in answered:
        trained, base = models["trained"], models.get("base")
        for metric in trained.metrics:
            compared = _Compared(trained, base, metric, seed)
            rows += compared.list_rows()
            metrics.append(compared.describe())
        details.append(_detail(trained, base, seed).model_dump(mode="json"))
    if not details:
        return Tables()
    return Tables(
        results=tuple(rows),
        metrics=tuple(metrics),
        details=(DetailRow(probe=UTILITY, schema=VERSION, value={"tasks": details}),),
    )


def get_items(metric: TaskMetric) -> ItemValues:
    """Return the items of a metric."""
    return ItemValues(
        aggregation=metric.aggregation, value_N=metric.value_N, weight_N=metric.weight_N
    )


@dataclass(frozen=True, slots=True)
class _Compared:
    """One metric of a task under the trained model and, if it answered, the base model."""

    trained: TaskResult
    base: TaskResult | None
    metric: TaskMetric
    seed: int

    @property
    def base_metric(self) -> TaskMetric | None:
        """The same metric of the base model."""
        metrics = () if self.base is None else self.base.metrics
        return next((metric for metric in metrics if metric.name == self.metric.name), None)

    @property
    def kind(self) -> Kind:
        """A rate only if it is one of both models."""
        both = [self.metric, *([self.base_metric] if self.base_metric is not None else [])]
        return find_kind([get_items(metric) for metric in both])

    def describe(self) -> MetricRow:
        """Return what the rows mean."""
        task, metric, kind = self.trained.task, self.metric.name, self.kind
        aggregation = self.metric.aggregation
        joined = {"rate": "share of the items with value 1", "mean": "mean over the items"}.get(
            kind, f"items joined by {aggregation}"
        )
        unit = "bits" if aggregation == "bits_per_byte" else "number"
        return MetricRow(
            probe=UTILITY,
            metric=metric,
            parameters=name_task(task),
            settings={"task": task},
            version=VERSION,
            meaning=f"Metric '{metric}' of the benchmark task '{task}', by lm-eval ({joined}).",
            unit="share" if kind == "rate" else unit,
            statistic=kind,
            bounds=(0.0, 1.0) if kind == "rate" else None,
            higher_is_better=self.metric.higher_is_better,
            heading=f"{task}: {metric}",
            spoken=f"{metric} of task '{task}'",
        )

    def list_rows(self) -> Iterator[ResultRow]:
        """Yield the values of both models, and their difference."""
        row = ResultRow(
            probe=UTILITY,
            parameters=name_task(self.trained.task),
            metric=self.metric.name,
            statistic=self.kind,
            bucket=ITEMS,
            num_documents=len(self.trained.item_N),
        )
        yield self._fill_value(row, self.metric)
        if self.base is None or self.base_metric is None:
            return
        of_base = replace(row, model="base", num_documents=len(self.base.item_N))
        yield self._fill_value(of_base, self.base_metric)
        against = replace(row, against="base", statistic="difference")
        difference = self.subtract()
        yield fill_row(
            against,
            None if difference is None else difference.interval,
            DIFFERENCE_METHODS[self.kind],
            why_not=NO_ITEM_NUMBERS if self.is_same else OTHER_ITEMS,
        )

    @property
    def is_same(self) -> bool:
        """Whether both models answered the same items."""
        return self.base is not None and self.base.samples_sha256 == self.trained.samples_sha256

    def subtract(self) -> Difference | None:
        """Return trained minus base by item; None if the items do not give it."""
        if not self.is_same or self.base_metric is None:
            return None
        if not all(get_items(m).is_as(m.value) for m in (self.metric, self.base_metric)):
            return None
        pair = get_items(self.metric), get_items(self.base_metric)
        return subtract_items([pair], self.kind, seed=self.seed)

    def _fill_value(self, row: ResultRow, metric: TaskMetric) -> ResultRow:
        if not row.num_documents:
            return fill_row(row, None, "", why_not=NO_ITEMS)
        return fill_row(row, _estimate(metric, self.kind, self.seed), _INTERVALS[self.kind])


def _estimate(metric: TaskMetric, kind: Kind, seed: int) -> Rate | Interval:
    """Return lm-eval's value with its interval over items, or by lm-eval's own standard error."""
    items = get_items(metric)
    if not items.is_as(metric.value):
        ci = None
        if metric.stderr is not None and metric.stderr > 0:
            ci = (metric.value - _Z * metric.stderr, metric.value + _Z * metric.stderr)
        return Interval(value=metric.value, ci=ci)
    if kind == "rate":
        return compute_rate(metric.value_N)
    drawn = estimate([items], kind, seed=seed)
    return Interval(value=metric.value, ci=None if drawn is None else drawn.ci)


def _detail(trained: TaskResult, base: TaskResult | None, seed: int) -> TaskDetail:
    models = [trained, *([] if base is None else [base])]
    headline = next(m for m in trained.metrics if m.name == trained.headline)
    compared = _Compared(trained, base, headline, seed)
    is_paired = compared.subtract() is not None
    return TaskDetail(
        task=trained.task,
        version=trained.version,
        limit=trained.limit,
        num_fewshot=trained.num_fewshot,
        is_chat=trained.is_chat,
        headline=trained.headline,
        aggregations={metric.name: metric.aggregation for metric in trained.metrics},
        chance=trained.chance,
        num_items=len(trained.item_N),
        samples_sha256={result.model: result.samples_sha256 for result in models},
        smallest_difference=_find_smallest(compared, is_paired=is_paired),
        is_smallest_paired=is_paired,
        is_at_chance=_is_at_chance(models, seed),
        num_forwards={result.model: result.num_forwards for result in models},
        num_decoded_tokens={result.model: result.num_decoded_tokens for result in models},
        num_truncated={result.model: result.num_truncated for result in models},
        is_cached={result.model: result.is_cached for result in models},
    )


def _is_at_chance(models: Sequence[TaskResult], seed: int) -> bool:
    """Return whether each model's interval contains chance; one item has no interval."""
    chance = models[0].chance
    if chance is None:
        return False
    metrics = [next(m for m in one.metrics if m.name == models[0].headline) for one in models]
    intervals = [_estimate(m, get_items(m).kind, seed).ci for m in metrics]
    return all(ci is None or ci[0] <= chance <= ci[1] for ci in intervals)


def _find_smallest(compared: _Compared, *, is_paired: bool) -> float | None:
    """Return the smallest difference that the items show; without pairs, from an equal model."""
    first = get_items(compared.metric)
    count = len(first.value_N)
    if count < 2 or not first.is_as(compared.metric.value):
        return None
    second = get_items(compared.base_metric) if is_paired and compared.base_metric else None
    if compared.kind == "rate":
        if second is None:
            rate = float(first.value_N.mean())
            return find_smallest_rate_difference(count, 2 * rate * (1 - rate))
        differing = float((first.value_N != second.value_N).mean())
        return find_smallest_rate_difference(count, differing)
    if compared.kind == "mean":
        if second is None:
            deviation = math.sqrt(2) * float(first.value_N.std(ddof=1))
        else:
            deviation = float((first.value_N - second.value_N).std(ddof=1))
        return find_smallest_mean_difference(count, deviation)
    if second is None:
        error = math.sqrt(2) * float(draw_items(first.draw, [first], compared.seed).std())
    else:
        drawn_B = draw_items(
            lambda index_BN: first.draw(index_BN) - second.draw(index_BN),
            [first, second],
            compared.seed,
        )
        error = float(drawn_B.std())
    if error <= 0 or not math.isfinite(error):
        return None
    return (float(special.ndtri(1 - LEVEL / 2)) + float(special.ndtri(POWER))) * error


POWER: Final = 0.8
LEVEL: Final = 0.05
_NEGLIGIBLE = 1e-12
_HALVINGS = 40


def find_smallest_rate_difference(num_items: int, share_differing: float) -> float | None:
    """Return the smallest difference of two rates that McNemar's exact test shows.

    Returns:
        None if not even models that differ on every item are told apart with this power.
    """
    assert 0 <= share_differing <= 1, f"{share_differing} is not a share"
    if _compute_power(num_items, share_differing, 1.0) < POWER:
        return None
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _compute_power(num_items, share_differing, middle) < POWER:
            low = middle
        else:
            high = middle
    return high


def find_smallest_mean_difference(num_items: int, deviation: float) -> float | None:
    """Return the smallest difference of two means that a paired t test shows, about.

    Returns:
        None below two items, or if the deviation is 0 and so not known.
    """
    if num_items < 2 or deviation <= 0:
        return None
    reach = float(special.stdtrit(num_items - 1, 1 - LEVEL / 2)) + float(special.ndtri(POWER))
    return reach * deviation / math.sqrt(num_items)


def _compute_power(num_items: int, share_differing: float, difference: float) -> float:
    share = max(share_differing, difference)
    if share <= 0:
        return 0.0
    count_M = np.arange(num_items + 1, dtype=np.float64)
    log_M = (
        special.gammaln(num_items + 1)
        - special.gammaln(count_M + 1)
        - special.gammaln(num_items - count_M + 1)
        + special.xlogy(count_M, share)
        + special.xlog1py(num_items - count_M, -share)
    )
    is_likely = log_M > math.log(_NEGLIGIBLE)
    count_M, probability_M = count_M[is_likely], np.exp(log_M[is_likely])
    most_M = _find_critical(count_M)
    better = min(1.0, (share + difference) / (2 * share))
    # SciPy wants the number of trials as an integer.
    trials_M = count_M.astype(np.int64)
    rejects_M = special.bdtr(np.maximum(most_M, 0), trials_M, better)
    rejects_M = rejects_M + special.bdtr(np.maximum(most_M, 0), trials_M, 1 - better)
    return float((probability_M * np.where(most_M < 0, 0.0, rejects_M)).sum())


def _find_critical(count_M: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the largest number of items of one model at which the test rejects; -1 for none."""
    most_M = np.floor(count_M / 2 - np.sqrt(count_M)) - 2
    most_M = np.maximum(most_M, -1.0)
    trials_M = count_M.astype(np.int64)
    while True:
        next_M = most_M + 1
        is_rejected = (next_M < count_M / 2) & (special.bdtr(next_M, trials_M, 0.5) <= LEVEL / 2)
        if not is_rejected.any():
            return np.asarray(most_M)
        most_M = np.where(is_rejected, next_M, most_M)
