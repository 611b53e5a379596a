"""Figures of the comparison page: what is drawn, and the tables beside them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from memguard.records import Comparison, ComparisonCell
from memguard.report.cells import make_headings
from memguard.report.doses import (
    CHART_NAME_LIMIT,
    base_change,
    change_from_first,
    label_setting,
    list_doses,
    list_series,
    name_dose,
    name_first,
    pick_highest,
)
from memguard.report.formatting import NBSP, format_change, format_of, format_percent
from memguard.report.page import (
    Cell,
    Figure,
    Line,
    LineChart,
    Point,
    Row,
    ScatterChart,
    Table,
)
from memguard.report.text import clean_name

Select = Callable[[ComparisonCell], float | None]


def build_tradeoff(comparison: Comparison) -> Figure | None:
    """Build risk against utility; None where no setting has both."""
    dose = pick_highest(comparison)
    if dose is None:
        return None
    points, rows = [], []
    for series in list_series(comparison):
        setting = series.setting
        cell = setting.extraction.get(dose)
        change = change_from_first(setting, comparison)
        risk = _place_risk(cell, 100 * change) if cell and change is not None else None
        if risk:
            points.append(Line(label=series.label, style=series.style, points=(risk,)))
        near = cell.near_verbatim if cell else None
        counts = format_of(near.num_matched, cell.num_documents) if cell and near else ""
        rows.append(
            Row(
                head=Cell(text=label_setting(setting, comparison), kind="text"),
                cells=(
                    Cell(text=format_change(change)),
                    Cell(text=format_percent(near.rate if near else None), detail=counts),
                ),
            )
        )
    if not points:
        return None
    base = base_change(comparison)
    first = name_first(comparison, CHART_NAME_LIMIT)
    spoken = name_dose(dose)
    chart = ScatterChart(
        description=f"Scatter chart of risk against utility, documents {spoken}. "
        + " ".join(_describe_row(row) for row in rows[:12]),
        points=_name_once(points),
        x_label=f"held-out NLL against {first} (%), lower is better",
        y_label="near-verbatim (%)",
        reference_x=None if base is None else 100 * base,
        reference_label="base model",
    )
    return Figure(
        key="tradeoff",
        title="Risk against utility",
        chart=chart,
        caption=f"Documents {spoken} that come back near-verbatim, verbatim ones included; lines "
        f"are 95{NBSP}% intervals. Best is the lower left corner; right of the base model's line "
        "a setting is worse on held-out documents than before training.",
        table=Table(
            caption="The same numbers",
            columns=make_headings(
                "Setting",
                ("Held-out NLL", f"against '{name_first(comparison, 16)}'"),
                ("Near-verbatim", spoken),
            ),
            rows=tuple(rows),
            compact=True,
        ),
    )


def _place_risk(cell: ComparisonCell, x: float) -> Point | None:
    near = cell.near_verbatim
    if near.rate is None:
        return None
    low, high = (None, None) if near.ci is None else (100 * near.ci[0], 100 * near.ci[1])
    return Point(x=x, y=100 * near.rate, low=low, high=high)


def build_trends(comparison: Comparison) -> tuple[Figure, ...]:
    """Build one figure a metric: every setting over the numbers of repetitions."""
    metrics: tuple[tuple[str, str, str, Select], ...] = (
        ("near", "Near-verbatim", "documents (%)", lambda cell: cell.near_verbatim.rate),
        ("verbatim", "Verbatim", "documents (%)", lambda cell: cell.rate),
        ("accuracy", "Mean token accuracy", "tokens (%)", lambda cell: cell.mean_token_accuracy),
    )
    doses = list_doses(comparison)
    figures = []
    for key, title, unit, select in metrics:
        lines = _build_lines(comparison, doses, select)
        if not lines:
            continue
        table = _build_table(comparison, doses, select)
        chart = LineChart(
            description=f"Line chart, {title.lower()} by number of repetitions. "
            + " ".join(_describe_row(row) for row in table.rows[:12]),
            ticks=tuple(clean_name(dose, 8) for dose in doses),
            lines=lines,
            y_label=unit,
            control_at=doses.index("0") if "0" in doses else None,
        )
        caption = (
            f"{title} by number of repetitions. Positions are evenly spaced, not to scale; "
            "settings step aside so that equal values stay visible."
        )
        figures.append(Figure(key=key, title=title, chart=chart, caption=caption, table=table))
    return tuple(figures)


def _describe_row(row: Row) -> str:
    values = ", ".join(cell.text for cell in row.cells)
    return f"{row.head.text}: {values}."


def _build_lines(comparison: Comparison, doses: Sequence[str], select: Select) -> tuple[Line, ...]:
    named = [(one.label, one.style, one.setting.extraction) for one in list_series(comparison)]
    num_names = len({style for _, style, _ in named})
    spread = min(0.06, 0.4 / num_names)
    lines = []
    for label, style, cells in [*named, ("Base model", "base", comparison.base_extraction)]:
        # Settings step aside so that equal values stay visible; the base model keeps the middle.
        shift = 0.0 if style == "base" else spread * (int(style) - (num_names - 1) / 2)
        points = []
        for x, dose in enumerate(doses):
            value = select(cells[dose]) if dose in cells else None
            if value is not None:
                points.append(Point(x=x + shift, y=100 * value))
        if points:
            lines.append(Line(label=label, style=style, points=tuple(points)))
    return _name_once(lines)


def _name_once(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Leave the label to the first of the lines that look the same."""
    seen: set[str] = set()
    named = []
    for line in lines:
        named.append(replace(line, label="") if line.style in seen else line)
        seen.add(line.style)
    return tuple(named)


def _build_table(comparison: Comparison, doses: Sequence[str], select: Select) -> Table:
    named = [
        (label_setting(setting, comparison), setting.extraction) for setting in comparison.settings
    ]
    rows = []
    for label, cells in [*named, ("Base model", comparison.base_extraction)]:
        values = (select(cells[dose]) if dose in cells else None for dose in doses)
        rows.append(
            Row(
                head=Cell(text=label, kind="text"),
                cells=tuple(Cell(text=format_percent(value)) for value in values),
                tone="base" if cells is comparison.base_extraction else "",
            )
        )
    return Table(
        caption="By number of repetitions; 0 is the control",
        columns=make_headings("Setting", *(clean_name(dose, 8) for dose in doses)),
        rows=tuple(rows),
        compact=True,
    )
