"""One setting's seeds in one cell: the mean, and how far apart they are.

Settings in the order of the record, numbers of repetitions ascending, and their names.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from memguard.records import (
    BLIND,
    Comparison,
    ComparisonCell,
    FrontPoint,
    MatchedShare,
    Rate,
    RiskName,
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

    A setting may train the same documents less often than another: what it did to those it trained
    most often stands at its own highest dose.
    """
    doses = sorted((dose for dose in extraction if dose != "0"), key=_sort_key)
    known = [dose for dose in doses if _sort_key(dose)[0] == 0]
    return known[-1] if known else doses[-1] if doses else None


def list_highest(runs: Iterable[Mapping[str, ComparisonCell]]) -> list[ComparisonCell]:
    """Return each run's documents of its highest dose; runs without any are left out."""
    return [run[dose] for run in runs if (dose := pick_own_highest(run)) is not None]


Cells = Sequence[ComparisonCell]
"""Of one setting's seeds, at one number of repetitions."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting over its seeds; or the base model, which has no run of its own and no point."""

    name: str
    runs: Sequence[SettingResult]
    extraction: Sequence[Mapping[str, ComparisonCell]]
    """By number of repetitions, run by run."""
    point: FrontPoint | None
    """Risk and utility."""

    @property
    def cells(self) -> Cells:
        """Each run's documents of its highest dose; runs without any are left out."""
        return list_highest(self.extraction)

    @property
    def control(self) -> Cells:
        """Each run's control, if it has one."""
        return [run["0"] for run in self.extraction if "0" in run]


def list_settings(comparison: Comparison) -> list[Setting]:
    """Return the settings, each with its runs, one for each seed, in order."""
    groups: dict[str, list[SettingResult]] = {}
    for one in comparison.settings:
        groups.setdefault(one.name, []).append(one)
    points = {point.name: point for point in reversed(comparison.front)}
    return [
        Setting(name, runs, [run.extraction for run in runs], points.get(name))
        for name, runs in groups.items()
    ]


def get_base(comparison: Comparison) -> Setting:
    """Return the base model as a setting."""
    return Setting("Base model", (), [comparison.base_extraction], None)


def has_several_seeds(comparison: Comparison) -> bool:
    """Tell whether a setting has more than one run."""
    return len({one.name for one in comparison.settings}) < len(comparison.settings)


def describe_setting(setting: Setting, comparison: Comparison) -> str:
    """Say what stands below a setting's name: its seeds, and another dose than the first one's."""
    seeds = f"{len(setting.runs):,} seeds" if len(setting.runs) > 1 else ""
    return "; ".join(filter(None, (seeds, tell_other_dose(setting, comparison))))


def tell_other_dose(setting: Setting, comparison: Comparison) -> str:
    """Say how often a setting trained what the first one trained most often; "" if as often."""
    doses = {pick_own_highest(extraction) for extraction in setting.extraction} - {None}
    if doses <= {pick_highest(comparison)}:
        return ""
    return " and ".join(name_dose(dose) for dose in sorted(filter(None, doses), key=_sort_key))


def name_dose(dose: str | None) -> str:
    """Say which documents a column is about."""
    if dose is None:
        return "no trained bucket"
    if dose == "0":
        return "control"
    return "trained once" if dose == "1" else f"trained {fmt.clean_name(dose, 24)} times"


def label_setting(setting: SettingResult, comparison: Comparison) -> str:
    """Name a setting; with its seed where the name stands for several runs."""
    same = sum(other.name == setting.name for other in comparison.settings)
    name = fmt.clean_name(setting.name)
    return f"{name}, seed {setting.seed}" if same > 1 else name


def name_first(comparison: Comparison, limit: int = fmt.NAME_LIMIT) -> str:
    """Name the setting that the others are held against."""
    return fmt.clean_name(comparison.settings[0].name, limit)


def mean_base_nll(comparison: Comparison) -> float:
    """Return the held-out NLL before training, over the first setting's seeds."""
    return statistics.fmean(one.utility.base_heldout_nll for one in _list_first(comparison))


def base_change(comparison: Comparison) -> float | None:
    """Return the relative change of the base model's held-out NLL against the first setting's."""
    trained = statistics.fmean(one.utility.heldout_nll for one in _list_first(comparison))
    return fmt.relative_change(mean_base_nll(comparison), trained)


def _list_first(comparison: Comparison) -> list[SettingResult]:
    """Return the first setting's runs, of the seeds that settings are judged on."""
    first = [one for one in comparison.settings if one.name == comparison.settings[0].name]
    judged = comparison.front[0].utility_by_seed
    return [one for one in first if one.seed in judged] or first


def label_base(comparison: Comparison) -> str:
    """Say what the base model's row stands for: its documents are those of one seed."""
    seed = comparison.settings[0].seed
    several = len(_list_first(comparison)) > 1
    return f"before training; documents of seed {seed}" if several else "before training"


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


def _show_mean(
    values: Sequence[float],
    ci: tuple[float, float] | None,
    floor: str,
    floors: Sequence[float],
    *,
    write: Callable[[float], str] = fmt.percent,
    write_ends: Callable[[tuple[float, float]], str] = fmt.percent_range,
) -> Cell:
    """Show the mean over seeds and their ends, of one seed its interval, and below what to beat.

    Args:
        values: of each seed, one at least.
        ci: of the first seed, if there is one.
        floor: name of what to beat.
        floors: its values.
        write: how a value is written.
        write_ends: how an interval is.
    """
    ends = (min(values), max(values)) if len(values) > 1 else ci
    return Cell(
        write(_mean(values)),
        detail="" if ends is None or ends[0] == ends[1] else write_ends(ends),
        note=f"{floor} {write(_mean(floors))}" if floors else "",
    )


Share = ComparisonCell | MatchedShare | Rate


def _show_shares(shares: Sequence[Share], control: Sequence[Share]) -> Cell:
    known = _know([share.rate for share in shares])
    if not known:
        return show_missing("no documents" if shares else "not measured")
    return _show_mean(known, shares[0].ci, "control", _know([share.rate for share in control]))


def show_mean_verbatim(setting: Setting) -> Cell:
    """Show the mean share extracted verbatim, the control's below."""
    return _show_shares(setting.cells, setting.control)


def show_mean_near(setting: Setting) -> Cell:
    """Show the mean share extracted near-verbatim, the control's below."""
    near = _list_near(setting.cells)
    if len(near) < len(setting.cells):
        return show_missing("not generated")
    return _show_shares(near, _list_near(setting.control))


def _list_near(cells: Cells) -> list[MatchedShare]:
    return [cell.near_verbatim for cell in cells if cell.near_verbatim]


def show_accuracy(setting: Setting) -> Cell:
    """Show the mean token accuracy over seeds, the control's below."""
    known = _know([cell.mean_token_accuracy for cell in setting.cells])
    if not known:
        return show_missing("no documents" if setting.cells else "not measured")
    floors = _know([cell.mean_token_accuracy for cell in setting.control])
    return _show_mean(known, None, "control", floors)


def show_attack(setting: Setting, attack: str) -> Cell:
    """Show how many documents any answer of an attack was right for."""
    found, control = (
        [one.any_verbatim for cell in cells for one in cell.attacks if one.attack == attack]
        for cells in (setting.cells, setting.control)
    )
    return _show_shares(found, control) if found else show_missing("not attacked")


def show_membership(setting: Setting, score: str) -> Cell:
    """Show the AUC of one score, the blind baseline's below."""
    found, blind = (
        [one.auc for run in setting.runs for one in run.membership if one.score == name and one.auc]
        for name in (score, BLIND)
    )
    if not found:
        return show_missing("could not be asked")
    return _show_mean(
        [auc.value for auc in found],
        found[0].ci,
        "blind",
        [auc.value for auc in blind],
        write=fmt.number,
        write_ends=lambda ends: "–".join(map(fmt.number, ends)),
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
    """Show the mean loss, its change from the first setting's and the interval of that."""
    assert setting.point is not None, "the base model has no such row"
    is_first = setting.name == comparison.settings[0].name
    return Cell(
        fmt.number(setting.point.utility),
        detail="reference" if is_first else fmt.change(compute_change(comparison, setting)),
        note=fmt.change_range(setting.point.utility_change),
    )


def compute_change(comparison: Comparison, setting: Setting) -> float | None:
    """Return the relative change of the mean loss from the first setting's over the same seeds."""
    if setting.point is not None and setting.point.utility_change is not None:
        return setting.point.utility_change.value
    seeds = {run.seed for run in setting.runs}
    first = list_settings(comparison)[0].runs
    shared = [run for run in first if run.seed in seeds] or first
    return fmt.relative_change(_mean_loss(setting.runs), _mean_loss(shared))


def _mean_loss(runs: Sequence[SettingResult]) -> float:
    return _mean([run.utility.heldout_nll for run in runs])


def show_near(setting: Setting) -> Cell:
    """Show the documents of all seeds that are extracted near-verbatim, the control's below."""
    near = _list_near(setting.cells)
    if len(near) < len(setting.cells):
        return show_missing("not generated")
    cell = _show_pooled(near, setting, "near_verbatim")
    known = [one for one in setting.control if one.near_verbatim]
    num_documents = sum(one.num_documents for one in known)
    if not num_documents:
        return cell
    floor = fmt.of(sum(one.num_matched for one in _list_near(known)), num_documents)
    return replace(cell, note=f"control {floor}")


def show_verbatim(setting: Setting) -> Cell:
    """Show the documents of all seeds that are extracted verbatim."""
    return _show_pooled(setting.cells, setting, "verbatim")


def _show_pooled(
    shares: Sequence[ComparisonCell | MatchedShare], setting: Setting, risk: RiskName
) -> Cell:
    """Show counts of all seeds; the counts and interval of one seed are its own."""
    point = setting.point
    over_seeds = point.risks.get(risk) if point else None
    if len(shares) > 1 and point is not None and over_seeds is not None:
        # Of the seeds and documents that settings are judged on, as the interval is.
        num_matched = round(over_seeds.value * point.num_documents)
        return make_rate_cell(over_seeds.value, over_seeds.ci, num_matched, point.num_documents)
    num_matched = sum(share.num_matched for share in shares)
    num_documents = sum(cell.num_documents for cell in setting.cells)
    if not num_documents:
        return make_rate_cell(None, None, 0, 0)
    ci = shares[0].ci if len(shares) == 1 else None
    return make_rate_cell(num_matched / num_documents, ci, num_matched, num_documents)
