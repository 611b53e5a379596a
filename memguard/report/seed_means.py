"""Cells that show a setting over its seeds: the mean and the range.

Also lists the settings in the order of the record and the numbers of repetitions in ascending
order, and gives both their names.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from memguard.pages import formatting as fmt
from memguard.pages.columns import show_missing
from memguard.pages.extraction_cost import Attack
from memguard.pages.formatting import NEVER
from memguard.pages.page import Cell
from memguard.records import (
    BLIND,
    MIN_FOR_QUANTILES,
    NO_DOCUMENTS,
    ComparedRun,
    Comparison,
    FrontPoint,
    ResultRow,
    Tables,
    write_parameters,
)
from memguard.records.comparison import HELDOUT, find_change

CHART_NAME_LIMIT = 22


def list_doses(comparison: Comparison) -> list[int]:
    """Return every number of repetitions that occurs, ascending; 0 is the control."""
    return sorted({dose for run in comparison.runs for dose in run.doses.values()})


def pick_highest(comparison: Comparison) -> int | None:
    """Return the first setting's highest number of repetitions, else the highest of all."""
    own = pick_own_highest(comparison.runs[0])
    return own or max(filter(None, list_doses(comparison)), default=None)


def pick_own_highest(run: ComparedRun) -> int | None:
    """Return the highest number of repetitions (never the control's), if there is one.

    A setting may train the same documents less often than another: its result on the documents
    trained most often is at its own highest dose.
    """
    return max(filter(None, run.doses.values()), default=None)


def find_bucket(run: ComparedRun, dose: int | None) -> str | None:
    """Return the bucket that a run trained so often; None if there is none."""
    return next((bucket for bucket, count in run.doses.items() if count == dose), None)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting over its seeds; or the base model on the documents of the first run."""

    name: str
    runs: Sequence[ComparedRun]
    comparison: Comparison
    model: str = "trained"

    @property
    def tables(self) -> Tables:
        """All rows."""
        return self.comparison.tables

    @property
    def point(self) -> FrontPoint | None:
        """Risk and utility; None for the base model."""
        points = () if self.is_base else self.comparison.front
        return next((point for point in points if point.name == self.name), None)

    @property
    def is_base(self) -> bool:
        """Whether it is the base model."""
        return self.model == "base"

    def find(self, probe: str, metric: str, dose: int | None = None, **key: Any) -> list[ResultRow]:
        """Return the row of each run that has one; dose None is each run's highest."""
        found = (
            self.tables.find(probe, metric, bucket, **{**own, **key})
            for bucket, own in self._list_places(dose)
        )
        return [row for row in found if row is not None]

    def find_attacked(self, attack: Attack, dose: int | None = None) -> list[ResultRow]:
        """Return what any answer of an attack extracted, of each run that it attacked."""
        found = (attack.find(self.tables, bucket, **own) for bucket, own in self._list_places(dose))
        return [row for row in found if row is not None]

    def _list_places(self, dose: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the bucket of each run and the key of its rows."""
        for run in self.runs:
            bucket = find_bucket(run, pick_own_highest(run) if dose is None else dose)
            if bucket is not None:
                yield bucket, {"setting": run.setting, "seed": run.seed, "model": self.model}


def list_settings(comparison: Comparison) -> list[Setting]:
    """Return the settings in order, each with its runs, one per seed."""
    groups: dict[str, list[ComparedRun]] = {}
    for run in comparison.runs:
        groups.setdefault(run.setting, []).append(run)
    return [Setting(name, runs, comparison) for name, runs in groups.items()]


def get_base(comparison: Comparison) -> Setting:
    """Return the base model as a setting."""
    return Setting("Base model", comparison.runs[:1], comparison, "base")


def has_several_seeds(comparison: Comparison) -> bool:
    """Return whether a setting has more than one run."""
    return len({run.setting for run in comparison.runs}) < len(comparison.runs)


def describe_setting(setting: Setting) -> str:
    """Return the text below a setting's name: number of seeds, and its dose if it differs."""
    parts = [f"{len(setting.runs):,} seeds"] if len(setting.runs) > 1 else []
    doses = set(filter(None, map(pick_own_highest, setting.runs)))
    if not doses <= {pick_highest(setting.comparison)}:
        parts.append(" and ".join(map(name_dose, sorted(doses))))
    return "; ".join(parts)


def name_dose(dose: int | None) -> str:
    """Describe the documents of a number of repetitions: ``trained 64 times``."""
    if dose is None:
        return "no trained bucket"
    if dose == 0:
        return "control"
    return "trained once" if dose == 1 else f"trained {dose} times"


def label_run(run: ComparedRun, comparison: Comparison) -> str:
    """Return a run's setting, with its seed if several runs have this setting."""
    same = sum(other.setting == run.setting for other in comparison.runs)
    name = fmt.clean_name(run.setting)
    return f"{name}, seed {run.seed}" if same > 1 else name


def name_first(comparison: Comparison, limit: int = fmt.NAME_LIMIT) -> str:
    """Return the name of the setting that the others are compared with."""
    return fmt.clean_name(comparison.runs[0].setting, limit)


def label_base(comparison: Comparison) -> str:
    """Describe the base model's row, whose documents are those of one seed."""
    first = comparison.runs[0]
    several = len(comparison.list_compared(first.setting)) > 1
    return f"before training; documents of seed {first.seed}" if several else "before training"


def is_measured(row: ResultRow) -> bool:
    """Return whether a rate could be had, if there were documents."""
    return row.is_known or row.missing_because == NO_DOCUMENTS


def list_values(rows: Iterable[ResultRow]) -> list[float]:
    """Return the values that are known."""
    return [row.value for row in rows if row.value is not None]


def average(values: Sequence[float]) -> float | None:
    """Return the mean over seeds, which is infinite if a value is; None without any."""
    if not values or math.inf in values:
        return math.inf if values else None
    # Divided by the largest, so that the sum of very large values does not overflow.
    largest = max(abs(value) for value in values) or 1.0
    return largest * statistics.fmean(value / largest for value in values)


def _show_mean(
    rows: Sequence[ResultRow],
    control: Iterable[ResultRow],
    floor: str = "control",
    *,
    write: Callable[[float | None], str] = fmt.percent,
    write_ends: Callable[[tuple[float, float]], str] = fmt.percent_range,
    with_ci: bool = True,
) -> Cell:
    """Show the mean over seeds, its range (for one seed: its interval), and below a reference."""
    values, floors = list_values(rows), list_values(control)
    if not values:
        return show_missing("no documents" if rows else "not measured")
    ci = next(row.ci for row in rows if row.is_known) if with_ci else None
    ends = (min(values), max(values)) if len(values) > 1 else ci
    return Cell(
        write(average(values)),
        detail="" if ends is None or ends[0] == ends[1] else write_ends(ends),
        note=f"{floor} {write(average(floors))}" if floors else "",
    )


def show_mean_share(setting: Setting, metric: str) -> Cell:
    """Show the mean share of documents extracted, and the control's below."""
    rows = setting.find("extraction", metric)
    if not all(map(is_measured, rows)):
        return show_missing("not generated")
    return _show_mean(rows, setting.find("extraction", metric, 0))


def show_accuracy(setting: Setting) -> Cell:
    """Show the mean token accuracy over seeds, and the control's below."""
    rows, control = (setting.find("extraction", "token_accuracy", dose) for dose in (None, 0))
    return _show_mean(rows, control, with_ci=False)


def show_attack(setting: Setting, attack: Attack) -> Cell:
    """Show the share of documents that any answer of an attack extracts."""
    attacked, control = (setting.find_attacked(attack, dose) for dose in (None, 0))
    return _show_mean(attacked, control) if attacked else show_missing("not attacked")


def show_membership(setting: Setting, score: str) -> Cell:
    """Show the AUC of one score, and the blind baseline's below."""

    def list_aucs(name: str) -> list[ResultRow]:
        parameters = write_parameters({"score": name})
        key = {"setting": setting.name, "parameters": parameters}
        return [row for row in setting.tables.select("membership", "auc", **key) if row.is_known]

    aucs = list_aucs(score)
    if not aucs:
        return show_missing("could not be computed")
    return _show_mean(
        aucs,
        list_aucs(BLIND),
        "blind",
        write=fmt.number,
        write_ends=lambda ends: "–".join(map(fmt.number, ends)),
    )


def list_costs(
    setting: Setting, dose: int | None = None, statistic: str = "median", of: str = "log10_queries"
) -> list[float]:
    """Return the attack cost (log10) of enough documents; inf if more than half can never be."""
    rows = setting.find("sampling", of, dose, statistic=statistic)
    return [
        math.inf if row.value is None else row.value
        for row in rows
        if row.num_documents >= MIN_FOR_QUANTILES
    ]


def show_cost(setting: Setting) -> Cell:
    """Show the median document's cost and its range: over documents, or over seeds."""
    if not any(row.num_documents for row in setting.find("sampling", "never")):
        return show_missing("not measured")
    medians, control = list_costs(setting), list_costs(setting, 0)
    if not medians:
        return show_missing(f"fewer than {MIN_FOR_QUANTILES} documents")
    medians_of = {"floor": list_costs(setting, of="log10_floor"), "control": control}
    note = ", ".join(f"{name} {_write_mean_log10(of)}" for name, of in medians_of.items() if of)
    num_infinite = medians.count(math.inf)
    if num_infinite:
        seeds = f"in {fmt.of(num_infinite, len(medians))} seeds"
        return Cell(NEVER, detail=seeds if len(medians) > 1 else "", note=note)
    if len(medians) > 1:
        ends = [min(medians), max(medians)]
    else:
        ends = [list_costs(setting, statistic=name)[0] for name in ("q10", "q90")]
    detail = " to ".join(_write_mean_log10([end]) for end in ends)
    return Cell(_write_mean_log10(medians), detail=detail, note=note)


def _write_mean_log10(values: Sequence[float]) -> str:
    value = average(values)
    if value is None or value == math.inf:
        return NEVER
    return f"{value:.1f}".replace("-", fmt.MINUS) if abs(value) < 1e6 else fmt.number(value)


def show_loss(setting: Setting) -> Cell:
    """Show the mean loss, its change from the first setting, and the interval of the change."""
    assert setting.point is not None, "only for settings, not for the base model"
    is_first = setting.name == setting.comparison.runs[0].setting
    is_utility, mean = not setting.comparison.utility.is_task, setting.comparison.find_mean
    return Cell(
        fmt.number(setting.point.utility if is_utility else mean(HELDOUT, setting.name)),
        detail="reference" if is_first else fmt.change(compute_change(setting)),
        note=fmt.change_range(find_change(setting.tables, setting.name)),
    )


def compute_change(setting: Setting) -> float | None:
    """Return the relative change of the mean loss from the first setting, over the same seeds."""
    change = find_change(setting.tables, setting.name)
    if change is not None:
        return change.value
    seeds = {run.seed for run in setting.runs}
    comparison = setting.comparison
    first = list_settings(comparison)[0].runs
    shared = [run for run in first if run.seed in seeds] or first
    own, reference = (
        average(list_values(row for run in runs if (row := comparison.find_loss(run))))
        for runs in (setting.runs, shared)
    )
    return None if own is None or reference is None else fmt.relative_change(own, reference)
