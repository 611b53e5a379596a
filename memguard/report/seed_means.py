"""Cells that show a setting over its seeds: the mean and the range.

Also lists the settings in the order of the record and the numbers of repetitions in ascending
order, and gives both their names.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from memguard.records import (
    BLIND,
    MIN_FOR_QUANTILES,
    Comparison,
    ComparisonCell,
    FrontPoint,
    MatchedShare,
    Rate,
    SettingResult,
)
from memguard.report import formatting as fmt
from memguard.report.audit_attacks import NEVER
from memguard.report.page import Cell
from memguard.report.tables import make_rate_cell, show_missing

CHART_NAME_LIMIT = 22


def list_doses(comparison: Comparison) -> list[str]:
    """Return every number of repetitions that occurs, as written in the record, ascending."""
    written = {dose for setting in comparison.settings for dose in setting.extraction}
    return sorted(written | set(comparison.base_extraction), key=_sort_key)


def _sort_key(dose: str) -> tuple[int, int, str]:
    known = dose.isascii() and dose.isdigit() and len(dose) < 20
    return (0, int(dose), dose) if known else (1, 0, dose)


def pick_highest(comparison: Comparison) -> str | None:
    """Return the first setting's highest number of repetitions, else the highest of all."""
    own = pick_own_highest(comparison.settings[0].extraction)
    return own or pick_own_highest(dict.fromkeys(list_doses(comparison)))


def pick_own_highest(extraction: Mapping[str, object]) -> str | None:
    """Return the highest number of repetitions (never the control's), if there is one.

    A setting may train the same documents less often than another: its result on the documents
    trained most often is at its own highest dose.
    """
    doses = sorted((dose for dose in extraction if dose != "0"), key=_sort_key)
    known = [dose for dose in doses if _sort_key(dose)[0] == 0]
    return known[-1] if known else doses[-1] if doses else None


def list_highest(runs: Iterable[Mapping[str, ComparisonCell]]) -> list[ComparisonCell]:
    """Return each run's documents at its highest dose; runs without any are left out."""
    return [run[dose] for run in runs if (dose := pick_own_highest(run)) is not None]


Cells = Sequence[ComparisonCell]
"""Cells of one setting at one number of repetitions, one per seed."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting over its seeds; or the base model, which has no runs and no point."""

    name: str
    runs: Sequence[SettingResult]
    extraction: Sequence[Mapping[str, ComparisonCell]]
    """Cells by number of repetitions, for each run."""
    point: FrontPoint | None
    """Risk and utility; None for the base model."""

    @property
    def cells(self) -> Cells:
        """Each run's documents at its highest dose; runs without any are left out."""
        return list_highest(self.extraction)

    @property
    def control(self) -> Cells:
        """Each run's control, if it has one."""
        return [run["0"] for run in self.extraction if "0" in run]


def list_settings(comparison: Comparison) -> list[Setting]:
    """Return the settings in order, each with its runs, one per seed."""
    groups: dict[str, list[SettingResult]] = {}
    for run in comparison.settings:
        groups.setdefault(run.name, []).append(run)
    points = {point.name: point for point in reversed(comparison.front)}
    return [
        Setting(name, runs, [run.extraction for run in runs], points.get(name))
        for name, runs in groups.items()
    ]


def get_base(comparison: Comparison) -> Setting:
    """Return the base model as a setting."""
    return Setting("Base model", (), [comparison.base_extraction], None)


def has_several_seeds(comparison: Comparison) -> bool:
    """Return whether a setting has more than one run."""
    return len({run.name for run in comparison.settings}) < len(comparison.settings)


def describe_setting(setting: Setting, comparison: Comparison) -> str:
    """Return the text below a setting's name: number of seeds, and its dose if it differs."""
    seeds = f"{len(setting.runs):,} seeds" if len(setting.runs) > 1 else ""
    return "; ".join(filter(None, (seeds, describe_other_dose(setting, comparison))))


def describe_other_dose(setting: Setting, comparison: Comparison) -> str:
    """Return a setting's highest dose if it differs from the first setting's; "" otherwise."""
    doses = {pick_own_highest(extraction) for extraction in setting.extraction} - {None}
    if doses <= {pick_highest(comparison)}:
        return ""
    return " and ".join(name_dose(dose) for dose in sorted(filter(None, doses), key=_sort_key))


def name_dose(dose: str | None) -> str:
    """Describe the documents of a number of repetitions: ``trained 64 times``."""
    if dose is None:
        return "no trained bucket"
    if dose == "0":
        return "control"
    return "trained once" if dose == "1" else f"trained {fmt.clean_name(dose, 24)} times"


def label_setting(setting: SettingResult, comparison: Comparison) -> str:
    """Return a setting's name, with its seed if several runs have this name."""
    same = sum(other.name == setting.name for other in comparison.settings)
    name = fmt.clean_name(setting.name)
    return f"{name}, seed {setting.seed}" if same > 1 else name


def name_first(comparison: Comparison, limit: int = fmt.NAME_LIMIT) -> str:
    """Return the name of the setting that the others are compared with."""
    return fmt.clean_name(comparison.settings[0].name, limit)


def mean_base_nll(comparison: Comparison) -> float:
    """Return the mean held-out NLL before training, over the first setting's seeds."""
    return statistics.fmean(run.utility.base_heldout_nll for run in _list_first(comparison))


def base_change(comparison: Comparison) -> float | None:
    """Return the change of the base model's held-out NLL relative to the first setting's."""
    trained = statistics.fmean(run.utility.heldout_nll for run in _list_first(comparison))
    return fmt.relative_change(mean_base_nll(comparison), trained)


def _list_first(comparison: Comparison) -> list[SettingResult]:
    """Return the first setting's runs with the seeds that settings are compared on."""
    first = [run for run in comparison.settings if run.name == comparison.settings[0].name]
    compared = comparison.front[0].utility_by_seed
    return [run for run in first if run.seed in compared] or first


def label_base(comparison: Comparison) -> str:
    """Describe the base model's row, whose documents are those of one seed."""
    seed = comparison.settings[0].seed
    several = len(_list_first(comparison)) > 1
    return f"before training; documents of seed {seed}" if several else "before training"


Greedy = Literal["verbatim", "near_verbatim"]


def list_shares(cells: Cells, metric: Greedy) -> list[MatchedShare]:
    """Return the share of documents extracted in each cell; those not measured are left out."""
    shares: list[MatchedShare | None] = [getattr(cell, metric) for cell in cells]
    return [share for share in shares if share]


def average(values: Sequence[float | None]) -> float | None:
    """Return the mean over the seeds that have a value; None if none has."""
    present = _drop_none(values)
    return _mean(present) if present else None


def _mean(values: Sequence[float]) -> float:
    # Divided by the largest, so that the sum of very large values does not overflow.
    largest = max(abs(value) for value in values) or 1.0
    return largest * statistics.fmean(value / largest for value in values)


def _drop_none(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _show_mean(
    values: Sequence[float],
    ci: tuple[float, float] | None,
    floor: str,
    floors: Sequence[float],
    *,
    write: Callable[[float], str] = fmt.percent,
    write_ends: Callable[[tuple[float, float]], str] = fmt.percent_range,
) -> Cell:
    """Show the mean over seeds, its range (for one seed: its interval), and a reference value.

    Args:
        values: value of each seed; at least one.
        ci: interval of the first seed, if it has one.
        floor: name of the reference, shown below.
        floors: values of the reference, one per seed; may be empty.
        write: formats a value.
        write_ends: formats an interval.
    """
    ends = (min(values), max(values)) if len(values) > 1 else ci
    return Cell(
        write(_mean(values)),
        detail="" if ends is None or ends[0] == ends[1] else write_ends(ends),
        note=f"{floor} {write(_mean(floors))}" if floors else "",
    )


def _show_shares(
    shares: Sequence[MatchedShare | Rate], control: Sequence[MatchedShare | Rate]
) -> Cell:
    rates = _drop_none([share.rate for share in shares])
    if not rates:
        return show_missing("no documents" if shares else "not measured")
    floors = _drop_none([share.rate for share in control])
    return _show_mean(rates, shares[0].ci, "control", floors)


def show_mean_share(setting: Setting, metric: Greedy) -> Cell:
    """Show the mean share of documents extracted, and the control's below."""
    shares = list_shares(setting.cells, metric)
    if len(shares) < len(setting.cells):
        return show_missing("not generated")
    return _show_shares(shares, list_shares(setting.control, metric))


def show_accuracy(setting: Setting) -> Cell:
    """Show the mean token accuracy over seeds, and the control's below."""
    accuracies = _drop_none([cell.mean_token_accuracy for cell in setting.cells])
    if not accuracies:
        return show_missing("no documents" if setting.cells else "not measured")
    floors = _drop_none([cell.mean_token_accuracy for cell in setting.control])
    return _show_mean(accuracies, None, "control", floors)


def show_attack(setting: Setting, attack: str) -> Cell:
    """Show the share of documents that any answer of an attack extracts."""
    attacked, control = (
        [row.any_verbatim for cell in cells for row in cell.attacks if row.attack == attack]
        for cells in (setting.cells, setting.control)
    )
    return _show_shares(attacked, control) if attacked else show_missing("not attacked")


def show_membership(setting: Setting, score: str) -> Cell:
    """Show the AUC of one score, and the blind baseline's below."""
    aucs, blind = (
        [row.auc for run in setting.runs for row in run.membership if row.score == name and row.auc]
        for name in (score, BLIND)
    )
    if not aucs:
        return show_missing("could not be computed")
    return _show_mean(
        [auc.value for auc in aucs],
        aucs[0].ci,
        "blind",
        [auc.value for auc in blind],
        write=fmt.number,
        write_ends=lambda ends: "–".join(map(fmt.number, ends)),
    )


def show_cost(cells: Cells, control: Cells) -> Cell:
    """Show the median document's cost and its range: over documents, or over seeds."""
    costs = [cell.attack_cost for cell in cells if cell.attack_cost]
    if not any(cost.num_documents for cost in costs):
        return show_missing("not measured")
    costs = [cost for cost in costs if cost.num_documents >= MIN_FOR_QUANTILES]
    if not costs:
        return show_missing(f"fewer than {MIN_FOR_QUANTILES} documents")
    floors = [cell.attack_cost for cell in control if cell.attack_cost]
    ends = [floor.median for floor in floors if floor.num_documents >= MIN_FOR_QUANTILES]
    finite = _drop_none(ends)
    is_infinite = len(finite) < len(ends)
    note = f"control {_write_log10(None if is_infinite else _mean(finite))}" if ends else ""
    medians = _drop_none([cost.median for cost in costs])
    if len(medians) < len(costs):
        # The mean is infinite if one of them is.
        seeds = f"in {fmt.of(len(costs) - len(medians), len(costs))} seeds"
        return Cell(NEVER, detail=seeds if len(costs) > 1 else "", note=note)
    if len(costs) > 1:
        detail = f"{_write_log10(min(medians))} to {_write_log10(max(medians))}"
    else:
        low, high = (_write_log10(q) for q in (costs[0].quantile_10, costs[0].quantile_90))
        detail = f"{low} to {high}"
    return Cell(_write_log10(_mean(medians)), detail=detail, note=note)


def _write_log10(value: float | None) -> str:
    if value is None:
        return NEVER
    return f"{value:.1f}".replace("-", fmt.MINUS) if abs(value) < 1e6 else fmt.number(value)


def show_loss(comparison: Comparison, setting: Setting) -> Cell:
    """Show the mean loss, its change from the first setting, and the interval of the change."""
    assert setting.point is not None, "only for settings, not for the base model"
    is_first = setting.name == comparison.settings[0].name
    return Cell(
        fmt.number(setting.point.utility),
        detail="reference" if is_first else fmt.change(compute_change(comparison, setting)),
        note=fmt.change_range(setting.point.utility_change),
    )


def compute_change(comparison: Comparison, setting: Setting) -> float | None:
    """Return the relative change of the mean loss from the first setting, over the same seeds."""
    if setting.point is not None and setting.point.utility_change is not None:
        return setting.point.utility_change.value
    seeds = {run.seed for run in setting.runs}
    first = list_settings(comparison)[0].runs
    shared = [run for run in first if run.seed in seeds] or first
    return fmt.relative_change(_mean_loss(setting.runs), _mean_loss(shared))


def _mean_loss(runs: Sequence[SettingResult]) -> float:
    return _mean([run.utility.heldout_nll for run in runs])


def show_counts(setting: Setting, metric: Greedy) -> Cell:
    """Show the documents of all seeds that were extracted; below near-verbatim, the control's.

    With one seed, the interval is that of its cell.
    """
    shares, point = list_shares(setting.cells, metric), setting.point
    if len(shares) < len(setting.cells):
        return show_missing("not generated")
    over_seeds = point.risks.get(metric) if point else None
    num_documents = sum(cell.num_documents for cell in setting.cells)
    if len(shares) > 1 and point is not None and over_seeds is not None:
        # Counts over the same seeds and documents as the interval.
        num_matched = round(over_seeds.value * point.num_documents)
        cell = make_rate_cell(over_seeds.value, over_seeds.ci, num_matched, point.num_documents)
    elif num_documents:
        num_matched = sum(share.num_matched for share in shares)
        ci, texts = (shares[0].ci, shares[0].texts) if len(shares) == 1 else (None, None)
        cell = make_rate_cell(num_matched / num_documents, ci, num_matched, num_documents, texts)
    else:
        cell = make_rate_cell(None, None, 0, 0)
    control = [other for other in setting.control if other.near_verbatim]
    num_control = sum(other.num_documents for other in control)
    if metric == "verbatim" or not num_control:
        return cell
    floor = sum(share.num_matched for share in list_shares(control, metric))
    notes = (cell.note, f"control {fmt.of(floor, num_control)}")
    return replace(cell, note="; ".join(filter(None, notes)))
