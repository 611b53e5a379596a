"""Figures of the comparison page over the numbers of repetitions, and the tables beside them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memguard.records import Comparison, ComparisonCell
from memguard.report.cells import make_headings
from memguard.report.doses import CHART_NAME_LIMIT, group_settings, list_doses
from memguard.report.formatting import format_percent
from memguard.report.page import Cell, Figure, Line, LineChart, Point, Row, Table
from memguard.report.seed_means import average, near_rate
from memguard.report.text import clean_name

Select = Callable[[ComparisonCell], float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Series:
    """A setting as a chart shows it."""

    name: str
    style: str
    runs: Sequence[Mapping[str, ComparisonCell]]
    """What was extracted, by number of repetitions, one for each seed."""


def build_trends(comparison: Comparison) -> tuple[Figure, ...]:
    """Build one figure a metric: every setting over the numbers of repetitions."""
    metrics: tuple[tuple[str, str, str, Select], ...] = (
        ("verbatim", "Verbatim", "documents (%)", lambda cell: cell.rate),
        ("near", "Near-verbatim", "documents (%)", near_rate),
        (
            "accuracy",
            "Teacher-forced token accuracy",
            "tokens (%)",
            lambda cell: cell.mean_token_accuracy,
        ),
    )
    doses = list_doses(comparison)
    several = len(group_settings(comparison)) < len(comparison.settings)
    seeds = " Means over seeds." if several else ""
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
            f"settings step aside so that equal values stay visible.{seeds}"
        )
        figures.append(Figure(key=key, title=title, chart=chart, caption=caption, table=table))
    return tuple(figures)


def _describe_row(row: Row) -> str:
    values = ", ".join(cell.text for cell in row.cells)
    return f"{row.head.text}: {values}."


def _average(
    runs: Sequence[Mapping[str, ComparisonCell]], dose: str, select: Select
) -> float | None:
    return average([select(cells[dose]) for cells in runs if dose in cells])


def _list_series(comparison: Comparison) -> list[_Series]:
    """Return the settings, each over its seeds, and the base model last."""
    series = [
        _Series(name=name, style=str(number), runs=[run.extraction for run in runs])
        for number, (name, runs) in enumerate(group_settings(comparison).items())
    ]
    return [*series, _Series(name="Base model", style="base", runs=[comparison.base_extraction])]


def _build_lines(comparison: Comparison, doses: Sequence[str], select: Select) -> tuple[Line, ...]:
    listed = _list_series(comparison)
    num_names = len(listed) - 1
    spread = min(0.06, 0.4 / num_names)
    lines = []
    for one in listed:
        # Settings step aside so that equal values stay visible; the base model keeps the middle.
        shift = 0.0 if one.style == "base" else spread * (int(one.style) - (num_names - 1) / 2)
        points = []
        for x, dose in enumerate(doses):
            value = _average(one.runs, dose, select)
            if value is not None:
                points.append(Point(x=x + shift, y=100 * value))
        if points:
            label = clean_name(one.name, CHART_NAME_LIMIT)
            lines.append(Line(label=label, style=one.style, points=tuple(points)))
    return tuple(lines)


def _build_table(comparison: Comparison, doses: Sequence[str], select: Select) -> Table:
    return Table(
        caption="By number of repetitions; 0 is the control",
        columns=make_headings("Setting", *(clean_name(dose, 8) for dose in doses)),
        rows=tuple(
            Row(
                head=Cell(text=clean_name(one.name), kind="text"),
                cells=tuple(
                    Cell(text=format_percent(_average(one.runs, dose, select))) for dose in doses
                ),
                tone="base" if one.style == "base" else "",
            )
            for one in _list_series(comparison)
        ),
        compact=True,
    )
