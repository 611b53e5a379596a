"""Risk against utility: each setting once, what nothing beats, and which to take."""

from memguard.records import NUM_RISK_QUERIES, Comparison, FrontPoint, RiskName
from memguard.report.cells import make_headings, show_missing
from memguard.report.doses import CHART_NAME_LIMIT, base_change, group_settings, name_first
from memguard.report.formatting import (
    PERCENT,
    format_change,
    format_change_range,
    format_count,
    format_number,
    format_percent,
    format_percent_range,
    relative_change,
)
from memguard.report.page import Cell, Fact, Figure, FrontChart, Mark, Row, Table
from memguard.report.text import SENTENCE_LIMIT, clean_name, clean_text

_TOLD = 12
_SPOKEN: dict[RiskName, str] = {
    "verbatim": "verbatim",
    "near_verbatim": "near-verbatim",
    "attack_cost": f"within {NUM_RISK_QUERIES:,} queries",
    "attack": "best attack",
}


def tell_recommendation(comparison: Comparison) -> Fact | None:
    """Return the sentence and its rule; None in an older record."""
    found = comparison.recommendation
    if found is None:
        return None
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


def show_risk(point: FrontPoint | None) -> Cell:
    """Show a setting's risk, its interval and what it was judged on."""
    if point is None or point.risk is None or point.risk_by is None:
        return show_missing("not measured")
    return Cell(
        text=format_percent(point.risk),
        detail=format_percent_range(point.risk_ci),
        note=_SPOKEN[point.risk_by],
    )


def name_dominators(point: FrontPoint | None) -> str:
    """Name one setting that beats this one, if possible beyond the intervals; "" for none."""
    if point is None or not point.dominated_by:
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
