"""Tables of the comparison page, one row a setting."""

from memguard.records import Comparison, ComparisonCell, SettingResult
from memguard.report.cells import make_headings, make_rate_cell
from memguard.report.doses import (
    base_change,
    change_from_first,
    label_setting,
    list_doses,
    name_dose,
    name_first,
    pick_highest,
)
from memguard.report.facts import describe_dropped
from memguard.report.formatting import (
    MISSING,
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
from memguard.report.text import clean_name


def build_headline(comparison: Comparison) -> Table:
    """Build the main table: risk, utility and cost of each setting, base model last."""
    dose = pick_highest(comparison)
    has_control = "0" in list_doses(comparison)
    rows = [_build_setting_row(setting, comparison) for setting in comparison.settings]
    rows.append(_build_base_row(comparison))
    spoken = name_dose(dose)
    return Table(
        caption="Risk, utility and cost of each setting",
        columns=make_headings(
            "Setting",
            ("Near-verbatim", spoken),
            ("Verbatim", spoken),
            ("Token accuracy", "mean"),
            *([("Near-verbatim", "control")] if has_control else []),
            ("Held-out NLL", f"nats; against '{name_first(comparison, 12)}'"),
            ("Labels dropped", "realised"),
            ("Training", "time; tokens"),
        ),
        rows=tuple(rows),
    )


def _build_setting_row(setting: SettingResult, comparison: Comparison) -> Row:
    utility, cost = setting.utility, setting.cost
    first = setting.name == comparison.settings[0].name
    tokens = format_count(cost.num_supervised_tokens)
    cells = (
        *_show_risk(setting.extraction, comparison),
        Cell(
            text=format_number(utility.heldout_nll),
            detail="reference" if first else format_change(change_from_first(setting, comparison)),
        ),
        Cell(text=describe_dropped(cost.dropped_fraction, bool(setting.mitigations))),
        Cell(text=format_duration(cost.train_s), detail=tokens),
    )
    return Row(head=Cell(text=label_setting(setting, comparison), kind="text"), cells=cells)


def _build_base_row(comparison: Comparison) -> Row:
    cells = (
        *_show_risk(comparison.base_extraction, comparison),
        Cell(
            text=format_number(comparison.settings[0].utility.base_heldout_nll),
            detail=format_change(base_change(comparison)),
        ),
        *(Cell(text="") for _ in range(2)),
    )
    head = Cell(text="Base model", detail="before training", kind="text")
    return Row(head=head, cells=cells, tone="base")


def _show_risk(extraction: dict[str, ComparisonCell], comparison: Comparison) -> list[Cell]:
    dose = pick_highest(comparison)
    cell = extraction.get(dose) if dose is not None else None
    control = extraction.get("0")
    tokens = format_percent(control.mean_token_accuracy) if control else ""
    accuracy = Cell(
        text=format_percent(cell.mean_token_accuracy if cell else None),
        detail=f"control {tokens}" if tokens else "",
    )
    cells = [_show_near(cell), _show_verbatim(cell), accuracy]
    return [*cells, _show_near(control)] if "0" in list_doses(comparison) else cells


def _show_verbatim(cell: ComparisonCell | None) -> Cell:
    if cell is None:
        return Cell(text=MISSING)
    return make_rate_cell(cell.rate, cell.ci, cell.num_matched, cell.num_documents)


def _show_near(cell: ComparisonCell | None) -> Cell:
    if cell is None:
        return Cell(text=MISSING)
    near = cell.near_verbatim
    return make_rate_cell(near.rate, near.ci, near.num_matched, cell.num_documents)


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
    return Table(
        caption="Every setting at every number of repetitions",
        columns=make_headings(
            "Setting", "Documents", "Near-verbatim", "Verbatim", "Token accuracy"
        ),
        rows=tuple(rows),
        compact=True,
    )


def _build_extraction_row(label: str, dose: str, cell: ComparisonCell) -> Row:
    near = cell.near_verbatim
    return Row(
        head=Cell(text=label, kind="text"),
        cells=(
            Cell(text=name_dose(dose)),
            Cell(text=_write_rate(near.rate, near.ci, near.num_matched, cell.num_documents)),
            Cell(text=_write_rate(cell.rate, cell.ci, cell.num_matched, cell.num_documents)),
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
    """Build the table of what was asked."""
    return Table(
        caption="What was asked of each setting",
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
