"""One setting's seeds in one cell: the mean, and how far apart they are."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from memguard.records import BLIND, Comparison, ComparisonCell, FrontPoint, RiskName, SettingResult
from memguard.report.attack_cost import NEVER
from memguard.report.cells import make_rate_cell, show_missing
from memguard.report.doses import find_point
from memguard.report.formatting import (
    MINUS,
    format_change,
    format_change_range,
    format_number,
    format_of,
    format_percent,
    format_percent_range,
    relative_change,
)
from memguard.report.page import Cell

Cells = Sequence[ComparisonCell]
"""Of one setting's seeds, at one number of repetitions."""


def show_rates(cells: Cells, control: Cells) -> tuple[Cell, Cell, Cell]:
    """Show verbatim, near-verbatim and token accuracy, the control's below each."""
    generated = all(cell.near_verbatim for cell in cells)
    return (
        _show_share(
            [cell.rate for cell in cells],
            [cell.ci for cell in cells],
            [cell.rate for cell in control],
        ),
        _show_share(
            [near_rate(cell) for cell in cells],
            [cell.near_verbatim.ci if cell.near_verbatim else None for cell in cells],
            [near_rate(cell) for cell in control],
        )
        if generated
        else show_missing("not generated"),
        show_accuracy(cells, control),
    )


def near_rate(cell: ComparisonCell) -> float | None:
    """Return the share of documents extracted near-verbatim; None where none was generated."""
    return None if cell.near_verbatim is None else cell.near_verbatim.rate


def average(values: Sequence[float | None]) -> float | None:
    """Return the mean over the seeds that have a value; None where none has."""
    known = _know(values)
    return _mean(known) if known else None


def _mean(values: Sequence[float]) -> float:
    # In units of the largest: a sum of huge ones would have no number.
    largest = max(abs(value) for value in values) or 1.0
    return largest * statistics.fmean(value / largest for value in values)


def _know(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _show_share(
    values: Sequence[float | None],
    intervals: Sequence[tuple[float, float] | None],
    control: Sequence[float | None],
) -> Cell:
    """Show the mean over seeds and their ends; of one seed its interval, if it has one."""
    known = _know(values)
    if not known:
        return show_missing("no documents" if values else "not measured")
    ends = (min(known), max(known)) if len(known) > 1 else next(iter(intervals), None)
    floors = _know(control)
    return Cell(
        text=format_percent(_mean(known)),
        detail="" if ends is None or ends[0] == ends[1] else format_percent_range(ends),
        note=f"control {format_percent(_mean(floors))}" if floors else "",
    )


def show_cost(cells: Cells, control: Cells) -> Cell:
    """Show the median document's cost and its spread: over documents, or over seeds."""
    costs = [cell.attack_cost for cell in cells if cell.attack_cost]
    costs = [cost for cost in costs if cost.num_documents]
    if not costs:
        return show_missing("not asked")
    floors = [cell.attack_cost for cell in control if cell.attack_cost]
    ends = [floor.median for floor in floors if floor.num_documents]
    known = _know(ends)
    endless = len(known) < len(ends)
    note = f"control {_write_log10(None if endless else _mean(known))}" if ends else ""
    medians = _know([cost.median for cost in costs])
    if len(medians) < len(costs):
        # No mean where one of them is endless.
        seeds = f"in {format_of(len(costs) - len(medians), len(costs))} seeds"
        return Cell(text=NEVER, detail=seeds if len(costs) > 1 else "", note=note)
    if len(costs) > 1:
        detail = f"{_write_log10(min(medians))} to {_write_log10(max(medians))}"
    else:
        low, high = (_write_log10(q) for q in (costs[0].quantile_10, costs[0].quantile_90))
        detail = f"{low} to {high}"
    return Cell(text=_write_log10(_mean(medians)), detail=detail, note=note)


def _write_log10(value: float | None) -> str:
    if value is None:
        return NEVER
    return f"{value:.1f}".replace("-", MINUS) if abs(value) < 1e6 else format_number(value)


def show_attack(cells: Cells, control: Cells, attack: str) -> Cell:
    """Show how many documents any answer of an attack was right for."""
    found = [one for cell in cells for one in cell.attacks if one.attack == attack]
    if not found:
        return show_missing("not attacked")
    return _show_share(
        [one.any_verbatim.rate for one in found],
        [one.any_verbatim.ci for one in found],
        [one.any_verbatim.rate for c in control for one in c.attacks if one.attack == attack],
    )


def show_membership(group: list[SettingResult], score: str) -> Cell:
    """Show the AUC of one score, the blind baseline's below."""
    aucs = [one.auc for setting in group for one in setting.membership if one.score == score]
    known = [auc for auc in aucs if auc]
    if not known:
        return show_missing("could not be asked")
    blinds = [one.auc for setting in group for one in setting.membership if one.score == BLIND]
    floors = [auc.value for auc in blinds if auc]
    values = [auc.value for auc in known]
    ends = (min(values), max(values)) if len(values) > 1 else known[0].ci
    return Cell(
        text=format_number(_mean(values)),
        detail=""
        if ends is None or ends[0] == ends[1]
        else "–".join(format_number(end) for end in ends),
        note=f"blind {format_number(_mean(floors))}" if floors else "",
    )


def show_loss(comparison: Comparison, group: list[SettingResult]) -> Cell:
    """Show the mean loss, its change from the first setting's and the interval of that."""
    point = find_point(group[0].name, comparison)
    interval = format_change_range(point.utility_change if point else None)
    is_first = group[0].name == comparison.settings[0].name
    change = "reference" if is_first else format_change(compute_change(comparison, group))
    loss = _mean_loss(group) if point is None else point.utility
    return Cell(text=format_number(loss), detail=change, note=interval)


def compute_change(comparison: Comparison, group: list[SettingResult]) -> float | None:
    """Return the relative change of the mean loss from the first setting's over the same seeds."""
    point = find_point(group[0].name, comparison)
    if point is not None and point.utility_change is not None:
        return point.utility_change.value
    seeds = {setting.seed for setting in group}
    first = [s for s in comparison.settings if s.name == comparison.settings[0].name]
    shared = [setting for setting in first if setting.seed in seeds] or first
    return relative_change(_mean_loss(group), _mean_loss(shared))


def _mean_loss(group: Sequence[SettingResult]) -> float:
    return _mean([setting.utility.heldout_nll for setting in group])


def show_near(cells: Cells, control: Cells, point: FrontPoint | None) -> Cell:
    """Show the documents of all seeds that are extracted near-verbatim, the control's below."""
    near = [cell.near_verbatim for cell in cells if cell.near_verbatim]
    if len(near) < len(cells):
        return show_missing("not generated")
    cell = _show_pooled(
        [(one.num_matched, cell.num_documents) for one, cell in zip(near, cells, strict=True)],
        [one.ci for one in near],
        point,
        "near_verbatim",
    )
    floors = [(one.near_verbatim, one.num_documents) for one in control if one.near_verbatim]
    num_documents = sum(count for _, count in floors)
    if not num_documents:
        return cell
    floor = format_of(sum(one.num_matched for one, _ in floors), num_documents)
    return replace(cell, note=f"control {floor}")


def show_verbatim(cells: Cells, point: FrontPoint | None) -> Cell:
    """Show the documents of all seeds that are extracted verbatim."""
    return _show_pooled(
        [(cell.num_matched, cell.num_documents) for cell in cells],
        [cell.ci for cell in cells],
        point,
        "verbatim",
    )


def _show_pooled(
    counts: Sequence[tuple[int, int]],
    intervals: Sequence[tuple[float, float] | None],
    point: FrontPoint | None,
    risk: RiskName,
) -> Cell:
    """Show counts of all seeds; the counts and interval of one seed are its own."""
    over_seeds = point.risks.get(risk) if point else None
    if len(counts) > 1 and point is not None and over_seeds is not None:
        # Of the seeds and documents that settings are judged on, as the interval is.
        num_matched = round(over_seeds.value * point.num_documents)
        return make_rate_cell(over_seeds.value, over_seeds.ci, num_matched, point.num_documents)
    num_matched, num_documents = (sum(column) for column in zip(*counts, strict=True))
    if not num_documents:
        return make_rate_cell(None, None, 0, 0)
    ci = intervals[0] if len(counts) == 1 else None
    return make_rate_cell(num_matched / num_documents, ci, num_matched, num_documents)


def show_accuracy(cells: Cells, control: Cells) -> Cell:
    """Show the mean token accuracy over seeds, the control's below."""
    return _show_share(
        [cell.mean_token_accuracy for cell in cells],
        [],
        [cell.mean_token_accuracy for cell in control],
    )
