"""Benchmark tasks on one model: values, and the scores of their items.

    task    one of lm-eval, by name or by the path of its YAML
    item    one question of a task, or one text of a task that scores texts
    metric  what a task makes of an answer: ``acc``, ``exact_match``, ``word_perplexity``

`utility.parquet` has one line for each item, metric and model. Items are named by a hash of
question, prompt and target, so that two audits are compared item by item, and a task that changed
is noticed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from memguard.errors import RecordError
from memguard.records.record import PRIVATE_MODE, Record
from memguard.records.results import ResultRow, write_parameters
from memguard.records.row_files import ColumnTypes, build_table, load_rows, save_table
from memguard.records.tables import MetricRow, Tables

UTILITY: Final = "utility"
"""Probe of the rows."""
ITEMS: Final = "(items)"
"""Bucket of the rows: the items of the task."""
ITEM_SCORES: Final = "utility.parquet"
"""File of an audit folder; only the owner of the audit can read it."""
SCHEMA_NAME = "memguard.utility/1"

UtilityModel = Literal["trained", "base"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TaskMetric:
    """One metric of a task on one model; N items."""

    name: str
    """With its filter where that is not lm-eval's default: ``exact_match,strict-match``."""
    aggregation: str
    """How lm-eval joins the items: ``mean``, ``weighted_perplexity``, ..."""
    higher_is_better: bool
    value: float
    stderr: float | None
    """lm-eval's, else by a bootstrap over items; None for fewer than two items."""
    stderr_is_bootstrap: bool
    value_N: NDArray[np.float64]
    """[N] of each item; NaN where the item has no number of its own, as for BLEU of a corpus. Of a
    perplexity it is the item's log-likelihood (nats)."""
    weight_N: NDArray[np.float64] | None = None
    """[N] words or bytes of each item, of a perplexity; None for other metrics."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TaskResult:
    """One task on one model."""

    task: str
    """lm-eval's name of the task, that in its YAML."""
    model: UtilityModel
    version: str
    limit: int | None
    num_fewshot: int
    is_chat: bool
    """Whether the prompts were rendered with the chat template."""
    metrics: tuple[TaskMetric, ...]
    headline: str
    """Name of the metric that stands for the task in comparisons and charts."""
    item_N: tuple[str, ...]
    """[N] hash of each item, in lm-eval's order."""
    samples_sha256: str
    """Of the hashes of all items: equal where two audits have the same items."""
    chance: float | None
    """Expected value of the headline metric for a random choice among the options; None for tasks
    without options."""
    num_forwards: int
    """Forward passes of one batch row each: passages that were scored."""
    num_decoded_tokens: int
    """Tokens that were generated."""
    num_truncated: int = 0
    """Items whose prompt was cut because it is longer than the model's context."""
    is_cached: bool = False
    """Whether the answers were read from the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemScore:
    """A line of `utility.parquet`."""

    task: str
    metric: str
    model: str
    index: int
    """Place in the task."""
    item: str
    value: float | None
    weight: float | None


class TaskDetail(Record):
    """What a report says of a task besides its rows: how it was answered; no text of an item."""

    task: str
    version: str
    limit: int | None
    num_fewshot: int
    is_chat: bool
    headline: str
    """Metric that stands for the task."""
    aggregations: Mapping[str, str]
    """How the items of each metric are joined, by metric."""
    chance: float | None
    """Value of the headline metric for a random choice; null without options."""
    num_items: int
    samples_sha256: Mapping[UtilityModel, str]
    """Of the hashes of all items, by model."""
    smallest_difference: float | None
    """Smallest difference of the headline metric that a paired test of so many items shows with
    power 0.8 (two-sided, 0.05); null if there is none, or if it cannot be estimated."""
    is_smallest_paired: bool
    """Whether it follows from the items on which both models differ; else from two models that
    answer independently of each other."""
    is_at_chance: bool
    """Whether no model's interval excludes a random choice: the task cannot tell the models from
    one that answers at random."""
    num_forwards: Mapping[UtilityModel, int]
    num_decoded_tokens: Mapping[UtilityModel, int]
    num_truncated: Mapping[UtilityModel, int]
    is_cached: Mapping[UtilityModel, bool]

    @property
    def parameters(self) -> str:
        """The parameters of its rows."""
        return name_task(self.task)

    def find(self, tables: Tables, *, metric: str | None = None, **key: Any) -> ResultRow | None:
        """Return the row of a metric, the headline if None; ``key`` as in `Tables.find`."""
        name = self.headline if metric is None else metric
        return tables.find(UTILITY, name, ITEMS, parameters=self.parameters, **key)

    def find_metric(self, tables: Tables, *, metric: str | None = None) -> MetricRow | None:
        """Return what a metric means, the headline if None; None if it was not promised."""
        return tables.find_metric(
            UTILITY, self.headline if metric is None else metric, self.parameters
        )


def name_task(task: str) -> str:
    """Return the parameters of the rows of a task."""
    return write_parameters({"task": task})


def list_task_details(tables: Tables) -> list[TaskDetail]:
    """Return the tasks of an audit, in the order of its settings; empty if none ran."""
    detail = tables.find_detail(UTILITY)
    if detail is None:
        return []
    try:
        return [TaskDetail.model_validate(task) for task in detail["tasks"]]
    except (KeyError, TypeError, ValidationError) as error:
        raise RecordError(
            "the report says of its benchmark tasks what this version does not read. Audit the "
            "run again."
        ) from error


def list_item_scores(results: Iterable[TaskResult]) -> list[ItemScore]:
    """Return the scores of all items of all tasks, in order."""
    return [
        ItemScore(
            task=result.task,
            metric=metric.name,
            model=result.model,
            index=index,
            item=item,
            value=None if np.isnan(metric.value_N[index]) else float(metric.value_N[index]),
            weight=None if metric.weight_N is None else float(metric.weight_N[index]),
        )
        for result in results
        for metric in result.metrics
        for index, item in enumerate(result.item_N)
    ]


def save_item_scores(scores: Sequence[ItemScore], path: Path) -> None:
    """Write the scores, whole or not at all, readable by their owner only."""
    types: ColumnTypes = {"index": "int64", "value": "float64", "weight": "float64"}
    table = build_table(scores, ItemScore, types, schema=SCHEMA_NAME)
    save_table(table, path, mode=PRIVATE_MODE)


def load_item_scores(path: Path) -> list[ItemScore]:
    """Return the scores of a file that `save_item_scores` wrote."""
    return load_rows(path, ItemScore, of="scores of tasks")
