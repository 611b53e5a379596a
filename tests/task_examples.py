"""Results of benchmark tasks, made up from the scores of their items."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from memguard.records.utility import TaskMetric, TaskResult, UtilityModel

JOINS = {
    "mean": lambda value_N, weight_N: value_N.mean(),
    "weighted_perplexity": lambda value_N, weight_N: np.exp(-value_N.sum() / weight_N.sum()),
    "bleu": lambda value_N, weight_N: 31.5,
}


def make_metric(
    name: str,
    values: Sequence[float],
    *,
    aggregation: str = "mean",
    weights: Sequence[float] | None = None,
    higher: bool = True,
    value: float | None = None,
    stderr: float | None = None,
) -> TaskMetric:
    """Return a metric with the value that lm-eval would compute, or another one."""
    value_N = np.array(values, dtype=np.float64)
    weight_N = None if weights is None else np.array(weights, dtype=np.float64)
    own = float(JOINS[aggregation](value_N, weight_N)) if value is None else value
    return TaskMetric(
        name=name,
        aggregation=aggregation,
        higher_is_better=higher,
        value=own,
        stderr=stderr,
        stderr_is_bootstrap=False,
        value_N=value_N,
        weight_N=weight_N,
    )


def make_task(
    name: str,
    model: UtilityModel,
    *metrics: TaskMetric,
    chance: float | None = None,
    samples: str = "aa",
    **changes: Any,
) -> TaskResult:
    """Return a task on one model; its headline is its first metric."""
    count = len(metrics[0].value_N)
    result = TaskResult(
        task=name,
        model=model,
        version="1.0",
        limit=None,
        num_fewshot=0,
        is_chat=False,
        metrics=metrics,
        headline=metrics[0].name,
        item_N=tuple(f"{name}-{number}" for number in range(count)),
        samples_sha256=samples,
        chance=chance,
        num_forwards=4 * count,
        num_decoded_tokens=0,
    )
    return replace(result, **changes)
