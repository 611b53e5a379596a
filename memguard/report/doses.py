"""Order the numbers of repetitions of a comparison, and name its settings."""

from memguard.records import Comparison, FrontPoint, SettingResult
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
    """Return the highest number of repetitions (never the control's), if there is one."""
    doses = [dose for dose in list_doses(comparison) if dose != "0"]
    known = [dose for dose in doses if _sort_key(dose)[0] == 0]
    return known[-1] if known else doses[-1] if doses else None


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


def base_change(comparison: Comparison) -> float | None:
    """Return the relative change of the base model's held-out NLL against the first setting's."""
    utility = comparison.settings[0].utility
    return relative_change(utility.base_heldout_nll, utility.heldout_nll)
