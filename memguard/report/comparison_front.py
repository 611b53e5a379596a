"""Figures of the comparison page: risk against utility, and risk over the numbers of repetitions.

Each setting once, over its seeds; what no other beats, and which one to take.
"""

from collections.abc import Callable, Sequence

from memguard.records import NUM_RISK_QUERIES, Comparison, ComparisonCell, FrontPoint, RiskName
from memguard.report import formatting as fmt
from memguard.report.page import (
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
from memguard.report.seed_means import (
    CHART_NAME_LIMIT,
    Setting,
    average,
    base_change,
    get_base,
    has_several_seeds,
    list_doses,
    list_settings,
    name_first,
    near_rate,
)
from memguard.report.tables import Column, make_rows, make_table, show_missing, show_name

_TOLD = 12
_SPOKEN: dict[RiskName, str] = {
    "verbatim": "verbatim",
    "near_verbatim": "near-verbatim",
    "attack_cost": f"within {NUM_RISK_QUERIES:,} queries",
    "attack": "best attack",
}


def tell_recommendation(comparison: Comparison) -> Fact:
    """Return the sentence and its rule."""
    found = comparison.recommendation
    # It names up to four settings with their intervals, and must not be cut.
    limit = 3 * fmt.SENTENCE_LIMIT
    return Fact(
        "Rule", fmt.clean_text(found.sentence, limit), detail=fmt.clean_text(found.rule, limit)
    )


def build_front(comparison: Comparison) -> Figure | None:
    """Build the figure; None where no setting has both risk and utility."""
    placed = [(point, _place(point, comparison)) for point in comparison.front]
    marks = tuple(mark for _, mark in placed if mark)
    if not marks:
        return None
    table = _build_front_table(comparison)
    base = base_change(comparison)
    chart = FrontChart(
        description="Risk against utility, a cross for each setting. "
        + " ".join(_describe(row) for row in table.rows[:_TOLD]),
        marks=marks,
        x_label=f"held-out NLL against {name_first(comparison, CHART_NAME_LIMIT)} (%)",
        y_label="documents at risk (%)",
        reference_x=None if base is None else 100 * base,
        reference_label="base model",
    )
    return Figure(
        key="front",
        title="Risk against utility",
        chart=chart,
        caption=f"Best is the lower left corner. Crosses are 95{fmt.PERCENT} intervals: of the "
        "risk over documents and seeds, of the loss over seeds, each against the first setting "
        "with that seed (none for one seed). The line joins the settings that no other beats in "
        "both; grey ones are beaten. Right of the base model's line a setting is worse on held-out "
        "documents than before training.",
        table=table,
    )


def _build_front_table(comparison: Comparison) -> Table:
    first = comparison.front[0]

    def show_change(point: FrontPoint) -> Cell:
        change = fmt.change(fmt.relative_change(point.utility, first.utility))
        return Cell(
            "reference" if point is first else change,
            detail=fmt.change_range(point.utility_change),
        )

    columns: tuple[Column[FrontPoint], ...] = (
        Column("Setting", lambda p: fmt.clean_name(p.name)),
        Column(("Risk", "documents"), show_risk),
        Column(("Held-out NLL", "nats"), lambda p: fmt.number(p.utility)),
        Column(("Change", f"against '{name_first(comparison, 16)}'"), show_change),
        Column(
            "Dominated by",
            lambda p: show_name(
                name_dominators(p), "beyond the intervals" if p.dominated_beyond_ci_by else ""
            ),
        ),
    )
    rows = make_rows(columns, comparison.front, lambda p: "dominated" if p.is_dominated else "")
    notes = (_tell_risk(), *_tell_seeds(comparison))
    return make_table("Chart data", columns, rows, notes=notes, compact=True)


def _tell_risk() -> str:
    return (
        "Risk: the worst rate of extraction among the documents that a setting trained most often: "
        "verbatim or near-verbatim by greedy decoding, verbatim within "
        f"{fmt.count(NUM_RISK_QUERIES)} queries, verbatim by the best attack; each where every "
        "run measured it. Attacks run on a sample of the documents."
    )


def _tell_seeds(comparison: Comparison) -> tuple[str, ...]:
    """Say so where seeds that not all settings have are left out."""
    settings = list_settings(comparison)
    if not any(one.point and one.point.num_seeds < len(one.runs) for one in settings):
        return ()
    shared = set.intersection(*({run.seed for run in one.runs} for one in settings))
    return (f"Over the seeds that every setting has: {', '.join(map(str, sorted(shared)))}.",)


def show_risk(point: FrontPoint | None) -> Cell:
    """Show a setting's risk, its interval and what it was judged on."""
    if point is None or point.risk is None or point.risk_by is None:
        return show_missing("not measured")
    return Cell(
        fmt.percent(point.risk),
        detail=fmt.percent_range(point.risk_ci),
        note=_SPOKEN[point.risk_by],
    )


def name_dominators(point: FrontPoint | None) -> str:
    """Name one setting that beats this one, if possible beyond the intervals; "" for none."""
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
    ends = point.utility_change.ci if point.utility_change else None
    return Mark(
        label=fmt.clean_name(point.name, CHART_NAME_LIMIT),
        x=100 * x,
        x_ends=None if ends is None else (100 * ends[0], 100 * ends[1]),
        y=100 * point.risk,
        y_ends=None if point.risk_ci is None else (100 * point.risk_ci[0], 100 * point.risk_ci[1]),
        is_dominated=point.is_dominated,
    )


def _describe(row: Row) -> str:
    risk, loss, change, beaten = row.cells
    told = f"{row.head.text}: risk {risk.text}, held-out NLL {loss.text} ({change.text})"
    return f"{told}, beaten by {beaten.text}." if beaten.text else f"{told}."


Select = Callable[[ComparisonCell], float | None]


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
    seeds = " Means over seeds." if has_several_seeds(comparison) else ""
    figures = []
    for key, title, unit, select in metrics:
        lines = _build_lines(comparison, doses, select)
        if not lines:
            continue
        table = _build_table(comparison, doses, select)
        chart = LineChart(
            description=f"Line chart, {title.lower()} by number of repetitions. "
            + " ".join(_describe_row(row) for row in table.rows[:12]),
            ticks=tuple(fmt.clean_name(dose, 8) for dose in doses),
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


def _average(setting: Setting, dose: str, select: Select) -> float | None:
    return average([select(cells[dose]) for cells in setting.extraction if dose in cells])


def _build_lines(comparison: Comparison, doses: Sequence[str], select: Select) -> tuple[Line, ...]:
    settings = list_settings(comparison)
    spread = min(0.06, 0.4 / len(settings))
    lines = []
    for number, one in enumerate([*settings, get_base(comparison)]):
        # Settings step aside so that equal values stay visible; the base model keeps the middle.
        shift = spread * (number - (len(settings) - 1) / 2) if one.runs else 0.0
        points = []
        for x, dose in enumerate(doses):
            value = _average(one, dose, select)
            if value is not None:
                points.append(Point(x=x + shift, y=100 * value))
        if points:
            label = fmt.clean_name(one.name, CHART_NAME_LIMIT)
            style = str(number) if one.runs else "base"
            lines.append(Line(label=label, style=style, points=tuple(points)))
    return tuple(lines)


def _build_table(comparison: Comparison, doses: Sequence[str], select: Select) -> Table:
    def column_of(dose: str) -> Column[Setting]:
        return Column(fmt.clean_name(dose, 8), lambda one: fmt.percent(_average(one, dose, select)))

    columns: tuple[Column[Setting], ...] = (
        Column("Setting", lambda one: fmt.clean_name(one.name)),
        *map(column_of, doses),
    )
    shown = [*list_settings(comparison), get_base(comparison)]
    rows = make_rows(columns, shown, lambda one: "" if one.runs else "base")
    caption = "By number of repetitions; 0 is the control"
    return make_table(caption, columns, rows, compact=True)
