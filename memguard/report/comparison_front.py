"""Figures of the comparison page: risk against utility, and extraction by number of repetitions.

Each setting occurs once, over its seeds, with the settings that dominate it.
"""

from collections.abc import Callable, Sequence

from memguard.records import NUM_RISK_QUERIES, RISK_NAMES, Comparison, ComparisonCell, FrontPoint
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
)
from memguard.report.tables import (
    Column,
    drop_zero_columns,
    make_table,
    show_missing,
    show_name,
)

_MOST_DESCRIBED = 12


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
            detail=fmt.change_range(point.utility_change),
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
        Column(("Held-out NLL", "nats"), lambda p: fmt.number(p.utility)),
        Column(("Change", f"from '{name_first(comparison, 16)}'"), show_change),
        *([dominators] if any(point.dominated_by for point in comparison.front) else []),
    )
    return make_table(
        "Chart data",
        columns,
        comparison.front,
        tone=lambda p: "dominated" if p.is_dominated else "",
        notes=(_describe_risk(), *_describe_seeds(comparison)),
        compact=True,
    )


def _describe_risk() -> str:
    return (
        "Risk: the highest extraction rate of the documents that a setting trained most often: "
        "verbatim or near-verbatim by greedy decoding, verbatim within "
        f"{fmt.count(NUM_RISK_QUERIES)} queries, verbatim by the best attack; rates that some run "
        "did not measure are left out. Attacks run on a sample of the documents."
    )


def _describe_seeds(comparison: Comparison) -> tuple[str, ...]:
    """Name the seeds that are used, if some settings have others that are left out."""
    settings = list_settings(comparison)
    if not any(s.point and s.point.num_seeds < len(s.runs) for s in settings):
        return ()
    shared = set.intersection(*({run.seed for run in s.runs} for s in settings))
    return (f"Over the seeds that every setting has: {', '.join(map(str, sorted(shared)))}.",)


def show_risk(point: FrontPoint | None) -> Cell:
    """Show a setting's risk, its interval and the method that has it."""
    if point is None or point.risk is None or point.risk_by is None:
        return show_missing("not measured")
    own, joint = point.own_ci or point.risk_ci, point.risk_ci
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
    ends = point.utility_change.ci if point.utility_change else None
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


Select = Callable[[ComparisonCell], float | None]


def build_trends(comparison: Comparison) -> tuple[Figure, ...]:
    """Build one figure per metric: every setting by number of repetitions."""
    accuracy = "Teacher-forced token accuracy"
    metrics: tuple[tuple[str, str, str, Select], ...] = (
        ("verbatim", "Verbatim", "documents (%)", lambda cell: cell.rate),
        ("near", "Near-verbatim", "documents (%)", _find_near_rate),
        ("accuracy", accuracy, "tokens (%)", lambda cell: cell.mean_token_accuracy),
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
            f"settings are shifted a little so that equal values stay visible.{seeds}"
        )
        data = drop_zero_columns(table)
        figures.append(Figure(key=key, title=title, chart=chart, caption=caption, table=data))
    return tuple(figures)


def _find_near_rate(cell: ComparisonCell) -> float | None:
    return None if cell.near_verbatim is None else cell.near_verbatim.rate


def _describe_row(row: Row) -> str:
    values = ", ".join(cell.text for cell in row.cells)
    return f"{row.head.text}: {values}."


def _average(setting: Setting, dose: str, select: Select) -> float | None:
    return average([select(cells[dose]) for cells in setting.extraction if dose in cells])


def _build_lines(comparison: Comparison, doses: Sequence[str], select: Select) -> tuple[Line, ...]:
    settings = list_settings(comparison)
    spread = min(0.06, 0.4 / len(settings))
    lines = []
    for number, setting in enumerate([*settings, get_base(comparison)]):
        # Settings are shifted so that equal values stay visible; the base model is not.
        shift = spread * (number - (len(settings) - 1) / 2) if setting.runs else 0.0
        points = []
        for x, dose in enumerate(doses):
            value = _average(setting, dose, select)
            if value is not None:
                points.append(Point(x=x + shift, y=100 * value))
        if points:
            label = fmt.clean_name(setting.name, CHART_NAME_LIMIT)
            style = str(number) if setting.runs else "base"
            lines.append(Line(label=label, style=style, points=tuple(points)))
    return tuple(lines)


def _build_table(comparison: Comparison, doses: Sequence[str], select: Select) -> Table:
    def column_of(dose: str) -> Column[Setting]:
        return Column(fmt.clean_name(dose, 8), lambda s: fmt.percent(_average(s, dose, select)))

    columns: tuple[Column[Setting], ...] = (
        Column("Setting", lambda s: fmt.clean_name(s.name)),
        *map(column_of, doses),
    )
    return make_table(
        "Chart data by number of repetitions; 0 is the control",
        columns,
        [*list_settings(comparison), get_base(comparison)],
        tone=lambda s: "" if s.runs else "base",
        compact=True,
    )
