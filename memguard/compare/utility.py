"""The utility of settings over their seeds: the held-out loss, or a benchmark task.

A task is compared only if every run answered the same items in the same way: the hash of all its
samples covers questions, prompts and targets. A task that some run lacks, or answered otherwise, is
left out with a sentence; if it is the one that was chosen as utility, the comparison is refused.

The held-out loss is a mean over seeds; settings are compared seed by seed by the t distribution,
because another seed has other held-out documents. A task's value is a mean over seeds too, but
settings are compared item by item: its items are the same with each seed, so they are drawn or
averaged together. With several seeds its interval also covers that of the t distribution over
seeds.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memguard.audit.benchmarks.items import ItemValues, Kind, estimate, find_kind, subtract_items
from memguard.audit.statistics import compute_mean
from memguard.compare.runs import AuditedRun
from memguard.config.loading import suggest_near
from memguard.errors import RecordError
from memguard.records import ComparedTask, Interval, ResultRow, Utility, fill_row
from memguard.records.comparison import HELDOUT, HELDOUT_LOSS

Losses = Mapping[str, Mapping[int, float]]
"""Value by setting and seed."""
_SEED = 0
"""Of the draws of bootstraps over seeds."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Axis:
    """The utility of all settings."""

    utility: Utility = HELDOUT
    values: Losses
    items: Mapping[str, Mapping[int, ItemValues]] | None = None
    """Items of a task by setting and seed; None for the held-out loss."""

    @property
    def kind(self) -> Kind:
        """Of the items of a task."""
        assert self.items is not None, "only of tasks"
        return find_kind([items for seeds in self.items.values() for items in seeds.values()])

    def compute(self, name: str) -> Interval:
        """Return the value of a setting, mean over seeds, with its interval."""
        values = list(self.values[name].values())
        if self.items is None:
            mean = compute_mean(values, (0.0, math.inf))
            assert mean is not None, "a setting has a run"
            return mean
        value = math.fsum(values) / len(values)
        drawn = estimate(list(self.items[name].values()), self.kind, seed=_SEED)
        ci = None if drawn is None else drawn.ci
        bounds = (0.0, 1.0) if self.kind == "rate" else (-math.inf, math.inf)
        return Interval(value=value, ci=cover_seeds(ci, values, bounds))

    def subtract(self, one: str, other: str) -> Interval | None:
        """Return the mean difference over seeds; None if seeds differ or items have no numbers."""
        first, second = self.values[one], self.values[other]
        if first.keys() != second.keys():
            return None
        differences = [value - second[seed] for seed, value in first.items()]
        if self.items is None:
            return compute_mean(differences)
        pairs = [(self.items[one][seed], self.items[other][seed]) for seed in first]
        difference = subtract_items(pairs, self.kind, seed=_SEED)
        if difference is None:
            return None
        bounds = (-1.0, 1.0) if self.kind == "rate" else (-math.inf, math.inf)
        ci = cover_seeds(difference.interval.ci, differences, bounds)
        return Interval(value=difference.interval.value, ci=ci)

    def is_better(self, one: str, other: str) -> bool:
        """Return whether the first setting has the better utility beyond the interval."""
        difference = self.subtract(one, other)
        if difference is None or difference.ci is None:
            return False
        return max(map(self.utility.worsening, difference.ci)) < 0

    def is_at_chance(self, name: str) -> bool:
        """Return whether a task does not show that a setting differs from a random choice.

        It does not if its interval contains the value of one, or if there is no interval. A share
        of 0, with nothing to choose from, shows as little.
        """
        if self.items is None:
            return False
        measured, chance = self.compute(name), self.utility.chance
        if chance is None:
            return self.utility.is_share and measured.value == 0
        return measured.ci is None or measured.ci[0] <= chance <= measured.ci[1]


def cover_seeds(
    ci: tuple[float, float] | None, values: Sequence[float], bounds: tuple[float, float] = (0, 1)
) -> tuple[float, float] | None:
    """Return the interval, extended to cover Student's t interval over the values of the seeds."""
    over_seeds = compute_mean(values)
    if ci is None or over_seeds is None or over_seeds.ci is None:
        return ci
    low, high = over_seeds.ci
    return max(bounds[0], min(ci[0], low)), min(bounds[1], max(ci[1], high))


def make_task_axis(task: ComparedTask, settings: Mapping[str, Sequence[AuditedRun]]) -> Axis:
    """Return a task as the utility of the settings, each with the runs that are compared."""
    name = task.detail.task
    items = {
        setting: {run.run.seed: run.tasks[name].headline for run in runs}
        for setting, runs in settings.items()
    }
    values = {
        setting: {run.run.seed: _read_value(task, run) for run in runs}
        for setting, runs in settings.items()
    }
    return Axis(utility=task.utility, values=values, items=items)


def _read_value(task: ComparedTask, run: AuditedRun) -> float:
    """Return lm-eval's value of the headline metric, from the run's report."""
    row = task.detail.find(run.report.tables)
    value = None if row is None else row.value
    assert value is not None, "checked by `find_shared_tasks`"
    return value


def list_utility_rows(axis: Axis) -> Iterator[ResultRow]:
    """Yield the values of a task over seeds, and their differences from the first setting."""
    first, *_ = axis.values
    utility = axis.utility
    for name in axis.values:
        row = utility.start_row(name, "mean" if axis.items is None else axis.kind)
        yield fill_row(row, axis.compute(name), "pooled")
        if name == first:
            continue
        against = replace(row, against=f"setting:{first}", statistic="difference")
        why_not = "the settings have other seeds, or the items have no numbers of their own"
        yield fill_row(against, axis.subtract(name, first), "pooled", why_not=why_not)


# -- the tasks that runs share ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TasksOfRuns:
    """The tasks that some run answered, in the order of the runs."""

    shared: list[ComparedTask]
    """Tasks that all runs answered item by item."""
    left_out: Mapping[str, str]
    """A sentence for each other task, by its name."""

    def choose_utility(self, name: str) -> Utility:
        """Return the utility of a name: ``heldout_nll``, or a task that all runs must share."""
        if name == HELDOUT_LOSS:
            return HELDOUT
        for task in self.shared:
            if task.detail.task == name:
                return task.utility
        known = [HELDOUT_LOSS, *(task.detail.task for task in self.shared), *self.left_out]
        listed = suggest_near(name, known) or f"; the runs have {', '.join(known)}"
        why = (
            f"which no run answered{listed}. Audit the runs with 'audit.utility: "
            f"[{{task: {name}}}]', or take another."
        )
        if name in self.left_out:
            why = (
                f"which the runs do not share. {self.left_out[name]} Audit all runs with the same "
                f"task, or take 'utility: {HELDOUT_LOSS}'."
            )
        raise RecordError(f"'utility' is '{name}', {why}")


def find_shared_tasks(runs: Sequence[AuditedRun]) -> TasksOfRuns:
    """Return the tasks that all runs answered item by item, and why others are left out."""
    shared, left_out = [], {}
    for name in dict.fromkeys(name for run in runs for name in run.tasks):
        why = _find_difference(name, runs)
        if why is not None:
            left_out[name] = f"Task '{name}' is left out of the comparison: {why}."
            continue
        detail = runs[0].tasks[name].detail
        metric = detail.find_metric(runs[0].report.tables)
        kinds = {run.tasks[name].headline.kind for run in runs}
        is_bits = detail.aggregations[detail.headline] == "bits_per_byte"
        shared.append(
            ComparedTask(
                detail=detail,
                unit="share" if kinds == {"rate"} else "bits" if is_bits else "number",
                higher_is_better=metric is None or metric.higher_is_better,
            )
        )
    return TasksOfRuns(shared=shared, left_out=left_out)


def _find_difference(name: str, runs: Sequence[AuditedRun]) -> str | None:
    """Return how runs differ in a task; None if all answered the same."""
    for run in runs:
        if name not in run.tasks:
            return f"{run.run.label} did not answer it"
        row = run.tasks[name].detail.find(run.report.tables)
        if row is None or row.value is None:
            return f"{run.run.label} has no value of it"
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
            return f"of {run.run.label}, {', '.join(differing)} as of {first.run.label}"
        if detail.aggregations != expected.aggregations:
            return f"{run.run.label} has other metrics than {first.run.label}"
        if detail.samples_sha256["trained"] != expected.samples_sha256["trained"]:
            return (
                f"{run.run.label} answered other items than {first.run.label} (the hashes of the "
                "samples differ)"
            )
    return None
