"""Tables of the comparison page: one row a setting, and one row a run."""

import statistics
from collections.abc import Mapping, Sequence

from memguard.records import Comparison, ComparisonCell, FrontPoint, SettingResult
from memguard.report.cells import fold_rows, make_headings
from memguard.report.comparison_front import name_dominators, show_risk
from memguard.report.doses import (
    base_change,
    describe_group,
    find_point,
    group_settings,
    label_base,
    label_setting,
    list_doses,
    list_highest,
    mean_base_nll,
    name_dose,
    name_first,
    pick_highest,
)
from memguard.report.facts import describe_dropped
from memguard.report.formatting import (
    MISSING,
    PERCENT,
    format_change,
    format_count,
    format_duration,
    format_number,
    format_of,
    format_percent,
    format_percent_range,
    format_settings,
)
from memguard.report.page import Cell, Row, Table
from memguard.report.seed_means import (
    average,
    show_accuracy,
    show_loss,
    show_near,
    show_verbatim,
)
from memguard.report.text import clean_name

_MOST_ROWS = 40
_SEEDS_NOTE = (
    "Documents of all seeds are counted together; losses, times and tokens are means over seeds. "
    "Below the loss stands its change, seed by seed, with the interval of that over seeds."
)


def build_headline(comparison: Comparison) -> Table:
    """Build the main table: risk, utility and cost of each setting, base model last."""
    groups = group_settings(comparison)
    rows = [_build_setting_row(group, comparison) for group in groups.values()]
    rows.append(_build_base_row(comparison))
    spoken = name_dose(pick_highest(comparison))
    return Table(
        caption="Risk, utility and cost of each setting",
        columns=make_headings(
            "Setting",
            ("Risk", "worst rate of extraction"),
            ("Verbatim", spoken),
            ("Near-verbatim", spoken),
            ("Token accuracy", "teacher-forced, mean"),
            ("Held-out NLL", f"nats; against '{name_first(comparison, 12)}'"),
            ("Labels dropped", "realised"),
            ("Training", "time; labels with loss"),
        ),
        rows=tuple(rows),
        notes=(_SEEDS_NOTE,) if len(groups) < len(comparison.settings) else (),
    )


def _build_setting_row(group: list[SettingResult], comparison: Comparison) -> Row:
    costs = [setting.cost for setting in group]
    name = group[0].name
    point = find_point(name, comparison)
    beaten = name_dominators(point)
    dropped = average([cost.dropped_fraction for cost in costs])
    cells = (
        show_risk(point),
        *_show_extraction([setting.extraction for setting in group], point),
        show_loss(comparison, group),
        Cell(text=describe_dropped(dropped, bool(group[0].mitigations))),
        Cell(
            text=format_duration(statistics.fmean(cost.train_s for cost in costs)),
            detail=format_count(round(statistics.fmean(c.num_supervised_tokens for c in costs))),
        ),
    )
    head = Cell(
        text=clean_name(name),
        detail=describe_group(group, comparison),
        note=f"beaten by {beaten}" if beaten else "",
        kind="text",
    )
    return Row(head=head, cells=cells, tone="dominated" if beaten else "")


def _build_base_row(comparison: Comparison) -> Row:
    cells = (
        Cell(text=""),
        *_show_extraction([comparison.base_extraction], None),
        Cell(
            text=format_number(mean_base_nll(comparison)),
            detail=format_change(base_change(comparison)),
        ),
        *(Cell(text="") for _ in range(2)),
    )
    head = Cell(text="Base model", detail=label_base(comparison), kind="text")
    return Row(head=head, cells=cells, tone="base")


def _show_extraction(
    runs: Sequence[Mapping[str, ComparisonCell]], point: FrontPoint | None
) -> list[Cell]:
    """Show what is extracted at the highest dose, and below it the same of the control."""
    cells = list_highest(runs)
    control = [run["0"] for run in runs if "0" in run]
    if not cells:
        return [Cell(text=MISSING)] * 3
    return [
        show_verbatim(cells, point),
        show_near(cells, control, point),
        show_accuracy(cells, control),
    ]


def build_extraction(comparison: Comparison) -> Table:
    """Build the full table: every setting at every number of repetitions, with intervals."""
    rows = []
    for dose in list_doses(comparison):
        for setting in comparison.settings:
            if dose in setting.extraction:
                label = label_setting(setting, comparison)
                rows.append(_build_extraction_row(label, dose, setting.extraction[dose]))
        if dose in comparison.base_extraction:
            base = comparison.base_extraction[dose]
            rows.append(_build_extraction_row("Base model", dose, base))
    shown, folded, label = fold_rows(rows, _MOST_ROWS)
    return Table(
        caption="Every setting at every number of repetitions",
        columns=make_headings(
            "Setting",
            "Documents",
            "Verbatim",
            "Near-verbatim",
            (f"90{PERCENT} teacher-forced", "not extraction"),
            ("Token accuracy", "teacher-forced"),
        ),
        rows=shown,
        more_rows=folded,
        more_label=label,
        compact=True,
    )


def _build_extraction_row(label: str, dose: str, cell: ComparisonCell) -> Row:
    near, known = cell.near_verbatim, cell.teacher_forced_90
    return Row(
        head=Cell(text=label, kind="text"),
        cells=(
            Cell(text=name_dose(dose)),
            Cell(text=_write_rate(cell.rate, cell.ci, cell.num_matched, cell.num_documents)),
            Cell(
                text="not generated"
                if near is None
                else _write_rate(near.rate, near.ci, near.num_matched, cell.num_documents)
            ),
            Cell(text=_write_rate(known.rate, known.ci, known.num_matched, cell.num_documents)),
            Cell(text=format_percent(cell.mean_token_accuracy)),
        ),
        tone="base" if label == "Base model" else "",
    )


def _write_rate(
    rate: float | None, ci: tuple[float, float] | None, num_matched: int, num_documents: int
) -> str:
    """Write a rate on one line, where there are too many rows for bars."""
    if rate is None:
        return "no documents"
    counts = format_of(num_matched, num_documents)
    return f"{counts}, {format_percent(rate)} ({format_percent_range(ci)})"


def build_settings(comparison: Comparison) -> Table:
    """Build the table of each run's settings."""
    return Table(
        caption="Run configuration",
        columns=make_headings("Setting", "Seed", "Run", "Mitigations", "Overrides", "Steps"),
        rows=tuple(
            Row(
                head=Cell(text=clean_name(setting.name), kind="text"),
                cells=(
                    Cell(text=str(setting.seed)),
                    Cell(text=clean_name(setting.run), kind="text"),
                    Cell(
                        text="; ".join(format_settings(m) for m in setting.mitigations[:20])
                        or "none (plain loss)",
                        kind="text",
                    ),
                    Cell(text=format_settings(setting.overrides), kind="text"),
                    Cell(text=format_count(setting.cost.num_steps)),
                ),
            )
            for setting in comparison.settings
        ),
    )
