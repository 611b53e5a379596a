"""Figures of the comparison page: risk against utility, and extraction by number of repetitions.

Each setting occurs once, over its seeds, with the settings that dominate it.
"""

from collections.abc import Sequence

from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, drop_zero_columns, make_table, show_missing, show_name
from memguard.pages.page import (
    Cell,
    Fact,
    Figure,
    FrontChart,
    Line,
    LineChart,
    Mark,
    Point,
    Row,
    Table,
)
from memguard.records import RISK_NAMES, RISK_PLACES, Comparison, FrontPoint, Utility
from memguard.records.comparison import find_change, list_shares
from memguard.report import seed_means as means
from memguard.report.comparison_utility import (
    describe_axis,
    describe_beyond_base,
    describe_chance,
    find_base_difference,
    find_difference,
    label_axis,
    name_utility,
    scale,
    write_difference,
    write_ends,
    write_value,
)
from memguard.report.seed_means import Setting

_MOST_DESCRIBED = 12


def list_sentences(comparison: Comparison) -> tuple[Fact, ...]:
    """Return what is recommended, and why other settings are not."""
    return tuple(
        Fact(fmt.clean_text(head), fmt.clean_text(text, 3 * fmt.SENTENCE_LIMIT))
        for head, text in comparison.recommendation.list_sentences()
    )


def build_front(comparison: Comparison) -> Figure | None:
    """Build the figure; None if no setting has both risk and utility."""
    placed = [(point, _place(point, comparison)) for point in comparison.front]
    marks = tuple(mark for _, mark in placed if mark)
    if not marks:
        return None
    table = _build_front_table(comparison)
    described = list(zip(comparison.front, table.rows, strict=True))
    utility = comparison.utility
    base = find_base_difference(comparison)
    chart = FrontChart(
        description="Risk-utility trade-off, a point for each setting. "
        + " ".join(_describe(point, row, utility) for point, row in described[:_MOST_DESCRIBED]),
        marks=marks,
        x_label=label_axis(comparison, means.CHART_NAME_LIMIT),
        y_label="documents at risk (%)",
        reference_x=None if base is None else scale(utility) * base,
        reference_label=f"base model {write_difference(base, utility)}",
        is_right_better=utility.higher_is_better,
    )
    return Figure(
        key="front",
        title="Risk-utility trade-off",
        chart=chart,
        caption=f"{describe_axis(utility)} The curve joins the settings that no other dominates; "
        f"dominated ones are grey. {describe_beyond_base(utility)}",
        table=table,
    )


def _build_front_table(comparison: Comparison) -> Table:
    first, utility = comparison.front[0], comparison.utility
    heading = (fmt.clean_name(utility.heading, 40), "" if utility.is_share else utility.unit)

    def show_change(point: FrontPoint) -> Cell:
        change = write_difference(find_difference(point, comparison), utility)
        return Cell(
            "reference" if point is first else change,
            detail=write_ends(find_change(comparison.tables, point.name, utility), utility),
        )

    dominators: Column[FrontPoint] = Column(
        "Dominated by",
        lambda p: show_name(
            name_dominators(p), "beyond the intervals" if p.dominated_beyond_ci_by else ""
        ),
    )
    columns: tuple[Column[FrontPoint], ...] = (
        Column("Setting", lambda p: fmt.clean_name(p.name)),
        Column(("Risk", "documents"), show_risk),
        Column(heading, lambda p: write_value(p.utility, utility)),
        Column(("Change", f"from '{means.name_first(comparison, 16)}'"), show_change),
        *([dominators] if any(point.dominated_by for point in comparison.front) else []),
    )
    return make_table(
        "Chart data",
        columns,
        comparison.front,
        tone=lambda p: "dominated" if p.is_dominated else "",
        notes=(
            *_describe_seeds(comparison),
            *filter(None, (describe_chance(comparison),)),
        ),
        compact=True,
    )


def _describe_seeds(comparison: Comparison) -> tuple[str, ...]:
    """Name the seeds that are used, if some settings have others that are left out."""
    settings = means.list_settings(comparison)
    if not any(s.point and s.point.num_seeds < len(s.runs) for s in settings):
        return ()
    shared = sorted(run.seed for run in comparison.list_compared(settings[0].name))
    return (f"Over the seeds that every setting has: {', '.join(map(str, shared))}.",)


def show_risk(point: FrontPoint | None) -> Cell:
    """Show a setting's risk, its interval and the method that has it."""
    if point is None or point.risk is None or point.risk_by is None:
        return show_missing("not measured")
    return Cell(
        fmt.percent(point.risk),
        detail=fmt.percent_range(point.risk_ci),
        note=RISK_NAMES[point.risk_by],
    )


def describe_unshared(comparison: Comparison) -> tuple[str, ...]:
    """Name the methods that some runs measured and others did not: they count for no setting."""
    measured = list_shares(comparison.tables, comparison.front[0].name)
    names = [
        RISK_NAMES[name]
        for name, (probe, metric, parameters) in RISK_PLACES.items()
        if name not in measured
        and any(
            row.is_known and row.seed is not None and row.against is None
            for row in comparison.tables.select(probe, metric, parameters=parameters)
        )
    ]
    if not names:
        return ()
    return (f"Left out of the risk, as not every run measured it: {', '.join(names)}.",)


def name_dominators(point: FrontPoint | None) -> str:
    """Name one setting that dominates this one, if possible beyond the intervals; "" for none."""
    if point is None or not point.dominated_by:
        return ""
    first = (point.dominated_beyond_ci_by or point.dominated_by)[0]
    more = len(point.dominated_by) - 1
    name = f"'{fmt.clean_name(first, means.CHART_NAME_LIMIT)}'"
    return f"{name} and {more:,} more" if more else name


def _place(point: FrontPoint, comparison: Comparison) -> Mark | None:
    utility = comparison.utility
    x = find_difference(point, comparison)
    if point.risk is None or x is None:
        return None
    change = find_change(comparison.tables, point.name, utility)
    ends = None if change is None else change.ci
    unit = scale(utility)
    return Mark(
        label=fmt.clean_name(point.name, means.CHART_NAME_LIMIT),
        x=unit * x,
        x_ends=None if ends is None else (unit * ends[0], unit * ends[1]),
        y=100 * point.risk,
        y_ends=None if point.risk_ci is None else (100 * point.risk_ci[0], 100 * point.risk_ci[1]),
        is_dominated=point.is_dominated,
    )


def _describe(point: FrontPoint, row: Row, utility: Utility) -> str:
    risk, value, change = row.cells[:3]
    spoken = name_utility(utility)
    text = f"{row.head.text}: risk {risk.text}, {spoken} {value.text} ({change.text})"
    dominators = name_dominators(point)
    return f"{text}, dominated by {dominators}." if dominators else f"{text}."


_TRENDS = (
    ("verbatim", "verbatim", "Verbatim", "documents (%)"),
    ("near", "near_verbatim", "Near-verbatim", "documents (%)"),
    ("accuracy", "token_accuracy", "Teacher-forced token accuracy", "tokens (%)"),
)
"""Key of a figure, its metric, title and unit."""


def build_trends(comparison: Comparison) -> tuple[Figure, ...]:
    """Build one figure per metric: every setting by number of repetitions."""
    doses = means.list_doses(comparison)
    settings = [*means.list_settings(comparison), means.get_base(comparison)]
    seeds = " Means over seeds." if means.has_several_seeds(comparison) else ""
    figures = []
    for key, metric, title, unit in _TRENDS:
        trends = [
            (setting, [_average(setting, dose, metric) for dose in doses]) for setting in settings
        ]
        lines = _build_lines(trends)
        if not lines:
            continue
        table = _build_table(trends, doses)
        chart = LineChart(
            description=f"Line chart, {title.lower()} by number of repetitions. "
            + " ".join(
                f"{row.head.text}: {', '.join(cell.text for cell in row.cells)}."
                for row in table.rows[:_MOST_DESCRIBED]
            ),
            ticks=tuple(map(str, doses)),
            lines=lines,
            y_label=unit,
            control_at=doses.index(0) if 0 in doses else None,
        )
        caption = (
            f"{title} by number of repetitions. Positions are evenly spaced, not to scale; "
            f"settings are shifted a little so that equal values stay visible.{seeds}"
        )
        data = drop_zero_columns(table)
        figures.append(Figure(key=key, title=title, chart=chart, caption=caption, table=data))
    return tuple(figures)


def _average(setting: Setting, dose: int, metric: str) -> float | None:
    return means.average(means.list_values(setting.find("extraction", metric, dose)))


_Trend = tuple[Setting, list[float | None]]
"""A setting or the base model, and its value at each number of repetitions."""


def _build_lines(trends: Sequence[_Trend]) -> tuple[Line, ...]:
    num_settings = len(trends) - 1
    spread = min(0.06, 0.4 / num_settings)
    lines = []
    for number, (setting, values) in enumerate(trends):
        # Settings are shifted so that equal values stay visible; the base model is not.
        shift = 0.0 if setting.is_base else spread * (number - (num_settings - 1) / 2)
        points = tuple(
            Point(x=x + shift, y=100 * value) for x, value in enumerate(values) if value is not None
        )
        if points:
            label = fmt.clean_name(setting.name, means.CHART_NAME_LIMIT)
            style = "base" if setting.is_base else str(number)
            lines.append(Line(label=label, style=style, points=points))
    return tuple(lines)


def _build_table(trends: Sequence[_Trend], doses: Sequence[int]) -> Table:
    def column_of(place: int) -> Column[_Trend]:
        return Column(str(doses[place]), lambda trend: fmt.percent(trend[1][place]))

    columns: tuple[Column[_Trend], ...] = (
        Column("Setting", lambda trend: fmt.clean_name(trend[0].name)),
        *map(column_of, range(len(doses))),
    )
    return make_table(
        "Chart data by number of repetitions; 0 is the control",
        columns,
        trends,
        tone=lambda trend: "base" if trend[0].is_base else "",
        compact=True,
    )
