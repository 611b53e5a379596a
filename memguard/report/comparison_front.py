"""Figures of the comparison page: risk against utility, and extraction by number of repetitions.

Each setting occurs once, over its seeds, with the settings that dominate it.
"""

from collections.abc import Sequence

from memguard.pages import formatting as fmt
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
from memguard.pages.tables import Column, drop_zero_columns, make_table, show_missing, show_name
from memguard.records import NUM_RISK_QUERIES, RISK_NAMES, Comparison, FrontPoint, Tables
from memguard.records.comparison import find_change, find_own_ci
from memguard.report.seed_means import (
    CHART_NAME_LIMIT,
    Setting,
    average,
    base_change,
    get_base,
    has_several_seeds,
    list_doses,
    list_settings,
    list_values,
    name_first,
)

_MOST_DESCRIBED = 12
_RISK_NOTE = (
    "Risk: the highest extraction rate of the documents that a setting trained most often: "
    "verbatim or near-verbatim by greedy decoding, verbatim within "
    f"{fmt.count(NUM_RISK_QUERIES)} queries, verbatim by the best attack; rates that some run "
    "did not measure are left out. Attacks run on a sample of the documents."
)


def describe_recommendation(comparison: Comparison) -> Fact:
    """Return the recommendation and its rule."""
    recommendation = comparison.recommendation
    # The sentence names up to four settings with their intervals and must not be cut.
    limit = 3 * fmt.SENTENCE_LIMIT
    return Fact(
        "Rule",
        fmt.clean_text(recommendation.sentence, limit),
        detail=fmt.clean_text(recommendation.rule, limit),
    )


def build_front(comparison: Comparison) -> Figure | None:
    """Build the figure; None if no setting has both risk and utility."""
    placed = [(point, _place(point, comparison)) for point in comparison.front]
    marks = tuple(mark for _, mark in placed if mark)
    if not marks:
        return None
    table = _build_front_table(comparison)
    described = list(zip(comparison.front, table.rows, strict=True))
    base = base_change(comparison)
    chart = FrontChart(
        description="Risk-utility trade-off, a point for each setting. "
        + " ".join(_describe(point, row) for point, row in described[:_MOST_DESCRIBED]),
        marks=marks,
        x_label=f"held-out NLL relative to {name_first(comparison, CHART_NAME_LIMIT)} (%)",
        y_label="documents at risk (%)",
        reference_x=None if base is None else 100 * base,
        reference_label=f"base model {fmt.change(base)}",
    )
    return Figure(
        key="front",
        title="Risk-utility trade-off",
        chart=chart,
        caption=f"Lower left is better. Lines through points are 95{fmt.PERCENT} intervals: of the "
        "risk over documents and seeds, of the loss over seeds relative to the first setting "
        "(none for one seed). The curve joins the settings that no other dominates; dominated ones "
        "are grey. A setting to the right of the base model is worse on held-out documents than "
        "before training.",
        table=table,
    )


def _build_front_table(comparison: Comparison) -> Table:
    first = comparison.front[0]

    def show_change(point: FrontPoint) -> Cell:
        change = fmt.change(fmt.relative_change(point.utility, first.utility))
        return Cell(
            "reference" if point is first else change,
            detail=fmt.change_range(find_change(comparison.tables, point.name)),
        )

    dominators: Column[FrontPoint] = Column(
        "Dominated by",
        lambda p: show_name(
            name_dominators(p), "beyond the intervals" if p.dominated_beyond_ci_by else ""
        ),
    )
    columns: tuple[Column[FrontPoint], ...] = (
        Column("Setting", lambda p: fmt.clean_name(p.name)),
        Column(("Risk", "documents"), lambda p: show_risk(p, comparison.tables)),
        Column(("Held-out NLL", "nats"), lambda p: fmt.number(p.utility)),
        Column(("Change", f"from '{name_first(comparison, 16)}'"), show_change),
        *([dominators] if any(point.dominated_by for point in comparison.front) else []),
    )
    return make_table(
        "Chart data",
        columns,
        comparison.front,
        tone=lambda p: "dominated" if p.is_dominated else "",
        notes=(_RISK_NOTE, *_describe_seeds(comparison)),
        compact=True,
    )


def _describe_seeds(comparison: Comparison) -> tuple[str, ...]:
    """Name the seeds that are used, if some settings have others that are left out."""
    settings = list_settings(comparison)
    if not any(s.point and s.point.num_seeds < len(s.runs) for s in settings):
        return ()
    shared = sorted(run.seed for run in comparison.list_compared(settings[0].name))
    return (f"Over the seeds that every setting has: {', '.join(map(str, shared))}.",)


def show_risk(point: FrontPoint | None, tables: Tables) -> Cell:
    """Show a setting's risk, its interval and the method that has it."""
    if point is None or point.risk is None or point.risk_by is None:
        return show_missing("not measured")
    own, joint = find_own_ci(point, tables), point.risk_ci
    note = RISK_NAMES[point.risk_by]
    if own is not None and joint is not None and joint[1] > own[1]:
        note += f"; by all methods up to {fmt.percent(joint[1])}"
    return Cell(fmt.percent(point.risk), detail=fmt.percent_range(own), note=note)


def name_dominators(point: FrontPoint | None) -> str:
    """Name one setting that dominates this one, if possible beyond the intervals; "" for none."""
    if point is None or not point.dominated_by:
        return ""
    first = (point.dominated_beyond_ci_by or point.dominated_by)[0]
    more = len(point.dominated_by) - 1
    name = f"'{fmt.clean_name(first, CHART_NAME_LIMIT)}'"
    return f"{name} and {more:,} more" if more else name


def _place(point: FrontPoint, comparison: Comparison) -> Mark | None:
    x = fmt.relative_change(point.utility, comparison.front[0].utility)
    if point.risk is None or x is None:
        return None
    change = find_change(comparison.tables, point.name)
    ends = None if change is None else change.ci
    return Mark(
        label=fmt.clean_name(point.name, CHART_NAME_LIMIT),
        x=100 * x,
        x_ends=None if ends is None else (100 * ends[0], 100 * ends[1]),
        y=100 * point.risk,
        y_ends=None if point.risk_ci is None else (100 * point.risk_ci[0], 100 * point.risk_ci[1]),
        is_dominated=point.is_dominated,
    )


def _describe(point: FrontPoint, row: Row) -> str:
    risk, loss, change = row.cells[:3]
    text = f"{row.head.text}: risk {risk.text}, held-out NLL {loss.text} ({change.text})"
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
    doses = list_doses(comparison)
    settings = [*list_settings(comparison), get_base(comparison)]
    seeds = " Means over seeds." if has_several_seeds(comparison) else ""
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
            + " ".join(_describe_row(row) for row in table.rows[:12]),
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
    return average(list_values(setting.find("extraction", metric, dose)))


def _describe_row(row: Row) -> str:
    return f"{row.head.text}: {', '.join(cell.text for cell in row.cells)}."


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
            label = fmt.clean_name(setting.name, CHART_NAME_LIMIT)
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
