"""Order the numbers of repetitions of a comparison, and name its settings."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from memguard.records import Comparison, ComparisonCell, FrontPoint, SettingResult
from memguard.report.formatting import relative_change
from memguard.report.text import NAME_LIMIT, clean_name

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


def describe_group(group: Sequence[SettingResult], comparison: Comparison) -> str:
    """Say what stands below a setting's name: its seeds, and another dose than the first one's."""
    seeds = f"{len(group):,} seeds" if len(group) > 1 else ""
    return "; ".join(filter(None, (seeds, tell_other_dose(group, comparison))))


def tell_other_dose(group: Sequence[SettingResult], comparison: Comparison) -> str:
    """Say how often a setting trained what the first one trained most often; "" if as often."""
    doses = {pick_own_highest(one.extraction) for one in group} - {None}
    if doses <= {pick_highest(comparison)}:
        return ""
    return " and ".join(name_dose(dose) for dose in sorted(filter(None, doses), key=_sort_key))


def name_dose(dose: str | None) -> str:
    """Say which documents a column is about."""
    if dose is None:
        return "no trained bucket"
    if dose == "0":
        return "control"
    return "trained once" if dose == "1" else f"trained {clean_name(dose, 24)} times"


def label_setting(setting: SettingResult, comparison: Comparison) -> str:
    """Name a setting; with its seed where the name stands for several runs."""
    same = sum(other.name == setting.name for other in comparison.settings)
    name = clean_name(setting.name)
    return f"{name}, seed {setting.seed}" if same > 1 else name


def name_first(comparison: Comparison, limit: int = NAME_LIMIT) -> str:
    """Name the setting that the others are held against."""
    return clean_name(comparison.settings[0].name, limit)


def group_settings(comparison: Comparison) -> dict[str, list[SettingResult]]:
    """Return the runs of each setting, one for each seed, by name and in order."""
    groups: dict[str, list[SettingResult]] = {}
    for setting in comparison.settings:
        groups.setdefault(setting.name, []).append(setting)
    return groups


def find_point(name: str, comparison: Comparison) -> FrontPoint | None:
    """Return a setting's risk and utility; None in an older record."""
    return next((point for point in comparison.front if point.name == name), None)


def mean_base_nll(comparison: Comparison) -> float:
    """Return the held-out NLL before training, over the first setting's seeds."""
    return statistics.fmean(one.utility.base_heldout_nll for one in _list_first(comparison))


def base_change(comparison: Comparison) -> float | None:
    """Return the relative change of the base model's held-out NLL against the first setting's."""
    trained = statistics.fmean(one.utility.heldout_nll for one in _list_first(comparison))
    return relative_change(mean_base_nll(comparison), trained)


def _list_first(comparison: Comparison) -> list[SettingResult]:
    """Return the first setting's runs, of the seeds that settings are judged on."""
    first = [one for one in comparison.settings if one.name == comparison.settings[0].name]
    judged = comparison.front[0].utility_by_seed if comparison.front else {}
    return [one for one in first if one.seed in judged] or first


def label_base(comparison: Comparison) -> str:
    """Say what the base model's row stands for: its documents are those of one seed."""
    seed = comparison.settings[0].seed
    several = len(_list_first(comparison)) > 1
    return f"before training; documents of seed {seed}" if several else "before training"
