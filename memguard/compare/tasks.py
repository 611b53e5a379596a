"""Benchmark tasks of runs: their items, and which tasks all runs share.

A task is compared only if every run answered the same items in the same way: the hash of all its
samples covers questions, prompts and targets. A task that some run lacks, or answered otherwise, is
left out with a sentence; if it is the one that was chosen as utility, the comparison is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from memguard.audit.benchmarks.items import ItemValues
from memguard.config.loading import suggest_near
from memguard.errors import RecordError
from memguard.records import AuditReport, ComparedTask, Utility
from memguard.records.audit_files import check_audit_file
from memguard.records.comparison import HELDOUT, HELDOUT_LOSS
from memguard.records.utility import (
    ITEM_SCORES,
    TaskDetail,
    list_task_details,
    load_item_scores,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunTask:
    """A task as the trained model of one run answered it."""

    detail: TaskDetail
    metrics: Mapping[str, ItemValues]
    """Items of each metric, in lm-eval's order."""

    @property
    def headline(self) -> ItemValues:
        """The items of the metric that stands for the task."""
        return self.metrics[self.detail.headline]


@dataclass(frozen=True, kw_only=True, slots=True)
class TasksOfRuns:
    """The tasks that some run answered, in the order of the runs."""

    shared: list[ComparedTask]
    """Tasks that all runs answered item by item."""
    left_out: Mapping[str, str]
    """A sentence for each other task, by its name."""

    def choose_utility(self, name: str) -> Utility:
        """Return the utility of a name: ``heldout_nll``, or a task.

        Raises:
            RecordError: runs do not share the task, or no run answered it.
        """
        if name == HELDOUT_LOSS:
            return HELDOUT
        for task in self.shared:
            if task.detail.task == name:
                return task.utility
        if name in self.left_out:
            raise RecordError(
                f"'utility' is '{name}', which the runs do not share. {self.left_out[name]} Audit "
                f"all runs with the same task, or take 'utility: {HELDOUT_LOSS}'."
            )
        known = [HELDOUT_LOSS, *(task.detail.task for task in self.shared), *self.left_out]
        listed = suggest_near(name, known) or f"; the runs have {', '.join(known)}"
        raise RecordError(
            f"'utility' is '{name}', which no run answered{listed}. Audit the runs with "
            f"'audit.utility: [{{task: {name}}}]', or take another."
        )


class AnsweredRun(Protocol):
    """A run with its tasks."""

    @property
    def label(self) -> str:
        """Name of the run in messages."""

    @property
    def report(self) -> AuditReport:
        """Its report."""

    @property
    def tasks(self) -> Mapping[str, RunTask]:
        """Its tasks by name."""


def load_tasks(audit: Path, report: AuditReport) -> dict[str, RunTask]:
    """Return the tasks of an audit by name; empty if none ran.

    Raises:
        RecordError: the scores of the items are missing, damaged, or not those of the report.
    """
    details = list_task_details(report.tables)
    if not details:
        return {}
    check_audit_file(audit, ITEM_SCORES)
    items: dict[tuple[str, str], list[tuple[float, float | None]]] = {}
    for score in load_item_scores(audit / ITEM_SCORES):
        if score.model == "trained":
            value = np.nan if score.value is None else score.value
            items.setdefault((score.task, score.metric), []).append((value, score.weight))
    tasks = {}
    for detail in details:
        metrics = {}
        for metric, aggregation in detail.aggregations.items():
            scores = items.get((detail.task, metric), [])
            if len(scores) != detail.num_items:
                raise RecordError(
                    f"'{audit / ITEM_SCORES}' does not belong to its report: task '{detail.task}' "
                    f"has {len(scores)} items, not {detail.num_items}. Audit the run again."
                )
            metrics[metric] = _make_items(aggregation, scores)
        tasks[detail.task] = RunTask(detail=detail, metrics=metrics)
    return tasks


def _make_items(aggregation: str, scores: Sequence[tuple[float, float | None]]) -> ItemValues:
    weights = [weight for _, weight in scores if weight is not None]
    return ItemValues(
        aggregation=aggregation,
        value_N=np.array([value for value, _ in scores], dtype=np.float64),
        weight_N=np.array(weights) if scores and len(weights) == len(scores) else None,
    )


def find_shared_tasks(runs: Sequence[AnsweredRun]) -> TasksOfRuns:
    """Return the tasks that all runs answered item by item, and why others are left out.

    Args:
        runs: comparable runs; the others are compared with the first one's way to answer a task.
    """
    shared, left_out = [], {}
    for name in dict.fromkeys(name for run in runs for name in run.tasks):
        why = _find_difference(name, runs)
        if why is not None:
            left_out[name] = f"Task '{name}' is left out of the comparison: {why}."
            continue
        detail = runs[0].tasks[name].detail
        metric = detail.find_metric(runs[0].report.tables)
        kinds = {run.tasks[name].headline.kind for run in runs}
        shared.append(
            ComparedTask(
                detail=detail,
                unit="share" if kinds == {"rate"} else _name_unit(detail),
                higher_is_better=metric is None or metric.higher_is_better,
            )
        )
    return TasksOfRuns(shared=shared, left_out=left_out)


def _name_unit(detail: TaskDetail) -> str:
    return "bits" if detail.aggregations[detail.headline] == "bits_per_byte" else "number"


def _find_difference(name: str, runs: Sequence[AnsweredRun]) -> str | None:
    """Return how runs differ in a task; None if all answered the same."""
    for run in runs:
        if name not in run.tasks:
            return f"{run.label} did not answer it"
        row = run.tasks[name].detail.find(run.report.tables)
        if row is None or row.value is None:
            return f"{run.label} has no value of it"
    first = runs[0]
    expected = first.tasks[name].detail
    for run in runs[1:]:
        detail = run.tasks[name].detail
        differing = [
            f"'{field}' is {getattr(detail, field)}, not {getattr(expected, field)}"
            for field in ("version", "num_fewshot", "is_chat", "headline", "num_items")
            if getattr(detail, field) != getattr(expected, field)
        ]
        if differing:
            return f"of {run.label}, {', '.join(differing)} as of {first.label}"
        if detail.aggregations != expected.aggregations:
            return f"{run.label} has other metrics than {first.label}"
        if detail.samples_sha256["trained"] != expected.samples_sha256["trained"]:
            return (
                f"{run.label} answered other items than {first.label} (the hashes of the samples "
                "differ)"
            )
    return None
