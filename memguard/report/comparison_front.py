"""Risk against utility: each setting once, what nothing beats, and which to take."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memguard.records import NUM_RISK_QUERIES, Comparison, ComparisonCell, FrontPoint, RiskName
from memguard.report.formatting import (
    PERCENT,
    SENTENCE_LIMIT,
    clean_name,
    clean_text,
    format_change,
    format_change_range,
    format_count,
    format_number,
    format_percent,
    format_percent_range,
    relative_change,
)
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
    make_headings,
    show_missing,
)
from memguard.report.seed_means import (
    CHART_NAME_LIMIT,
    average,
    base_change,
    group_settings,
    list_doses,
    name_first,
    near_rate,
)

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
    limit = 3 * SENTENCE_LIMIT
    return Fact(
        term="Rule", value=clean_text(found.sentence, limit), detail=clean_text(found.rule, limit)
    )


def build_front(comparison: Comparison) -> Figure | None:
    """Build the figure; None where no setting has both risk and utility."""
    placed = [(point, _place(point, comparison)) for point in comparison.front]
    marks = tuple(mark for _, mark in placed if mark)
    if not marks:
        return None
    rows = tuple(_build_row(point, comparison) for point in comparison.front)
    base = base_change(comparison)
    chart = FrontChart(
        description="Risk against utility, a cross for each setting. "
        + " ".join(_describe(row) for row in rows[:_TOLD]),
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
        caption=f"Best is the lower left corner. Crosses are 95{PERCENT} intervals: of the risk "
        "over documents and seeds, of the loss over seeds, each against the first setting with "
        "that seed (none for one seed). The line joins the settings that no other beats in both; "
        "grey ones are beaten. Right of the base model's "
        "line a setting is worse on held-out documents than before training.",
        table=Table(
            caption="Chart data",
            columns=make_headings(
                "Setting",
                ("Risk", "documents"),
                ("Held-out NLL", "nats"),
                ("Change", f"against '{name_first(comparison, 16)}'"),
                "Dominated by",
            ),
            rows=rows,
            notes=(_tell_risk(), *_tell_seeds(comparison)),
            compact=True,
        ),
    )


def _tell_risk() -> str:
    return (
        "Risk: the worst rate of extraction among the documents that a setting trained most often: "
        "verbatim or near-verbatim by greedy decoding, verbatim within "
        f"{format_count(NUM_RISK_QUERIES)} queries, verbatim by the best attack; each where every "
        "run measured it. Attacks run on a sample of the documents."
    )


def _tell_seeds(comparison: Comparison) -> tuple[str, ...]:
    """Say so where seeds that not all settings have are left out."""
    groups = group_settings(comparison)
    left_out = any(point.num_seeds < len(groups.get(point.name, ())) for point in comparison.front)
    if not left_out:
        return ()
    shared = set.intersection(*({one.seed for one in group} for group in groups.values()))
    return (f"Over the seeds that every setting has: {', '.join(map(str, sorted(shared)))}.",)


def show_risk(point: FrontPoint) -> Cell:
    """Show a setting's risk, its interval and what it was judged on."""
    if point.risk is None or point.risk_by is None:
        return show_missing("not measured")
    return Cell(
        text=format_percent(point.risk),
        detail=format_percent_range(point.risk_ci),
        note=_SPOKEN[point.risk_by],
    )


def name_dominators(point: FrontPoint) -> str:
    """Name one setting that beats this one, if possible beyond the intervals; "" for none."""
    if not point.dominated_by:
        return ""
    first = (point.dominated_beyond_ci_by or point.dominated_by)[0]
    more = len(point.dominated_by) - 1
    name = f"'{clean_name(first, CHART_NAME_LIMIT)}'"
    return f"{name} and {more:,} more" if more else name


def _place(point: FrontPoint, comparison: Comparison) -> Mark | None:
    x = relative_change(point.utility, comparison.front[0].utility)
    if point.risk is None or x is None:
        return None
    ends = point.utility_change.ci if point.utility_change else None
    return Mark(
        label=clean_name(point.name, CHART_NAME_LIMIT),
        x=100 * x,
        x_ends=None if ends is None else (100 * ends[0], 100 * ends[1]),
        y=100 * point.risk,
        y_ends=None if point.risk_ci is None else (100 * point.risk_ci[0], 100 * point.risk_ci[1]),
        is_dominated=point.is_dominated,
    )


def _build_row(point: FrontPoint, comparison: Comparison) -> Row:
    first = comparison.front[0]
    change = relative_change(point.utility, first.utility)
    return Row(
        head=Cell(text=clean_name(point.name), kind="text"),
        cells=(
            show_risk(point),
            Cell(text=format_number(point.utility)),
            Cell(
                text="reference" if point is first else format_change(change),
                detail=format_change_range(point.utility_change),
            ),
            Cell(
                text=name_dominators(point),
                detail="beyond the intervals" if point.dominated_beyond_ci_by else "",
                kind="text",
            ),
        ),
        tone="dominated" if point.is_dominated else "",
    )


def _describe(row: Row) -> str:
    risk, loss, change, beaten = row.cells
    told = f"{row.head.text}: risk {risk.text}, held-out NLL {loss.text} ({change.text})"
    return f"{told}, beaten by {beaten.text}." if beaten.text else f"{told}."


# Figures of the comparison page over the numbers of repetitions, and the tables beside them.

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
