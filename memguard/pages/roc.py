"""The ROC of membership scores: true against false positives, on logarithmic axes.

Audits ask who is told apart with few false positives (Carlini et al. 2022), and a linear axis hides
that end. The figure shows at most four curves:

    the verdict's score, with the intervals of its true-positive rates
    the two other scores whose AUC is furthest from 0.5
    the blind baseline, which has no model access

The curves are read from the report's details, which contain ranks only.
"""

import math
from collections.abc import Sequence

from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, make_table, show_missing
from memguard.pages.page import Cell, Figure, Line, Point, RocChart, Table
from memguard.records import BLIND, MEMBERS, AuditReport, ResultRow, RocCurve, write_parameters

_NAMES = {
    "loss": "Loss",
    "loss_minus_base": "Loss minus base",
    "min_k": f"Min-K{fmt.PERCENT}",
    "min_k_plus_plus": f"Min-K{fmt.PERCENT}++",
    "zlib": "zlib",
    "lowercase": "Lower case",
    "reference": "Reference model",
    "recall": "ReCaLL",
    BLIND: "Blind",
}
ROC = "roc"
"""Name of the curves in the detail of the membership probe."""
MIN_TO_DRAW = 10
"""Minimum number of documents of either kind: the axes then cover one decade."""
_MOST_OTHERS = 2
_SHARES = (0.001, 0.01, 0.1, 0.5)
"""False-positive rates in the table, after that of a single control document."""
_TICK_DISTANCE = 0.17
"""Minimum distance between the first label of an axis and the next, as a share of the axis."""


def read_score(row: ResultRow) -> str:
    """Return the name of the score that an AUC is of."""
    return row.parameters.removeprefix("score=")


def name_score(score: str) -> str:
    """Return the display name of a membership score."""
    return _NAMES.get(score, fmt.clean_name(score, 40))


def build_roc(report: AuditReport, aucs: Sequence[ResultRow]) -> Figure | None:
    """Build the figure; None without a curve of at least ten documents of either kind."""
    curves = _choose_curves(report, aucs)
    if not curves:
        return None
    least = 1 / max(curve.num_control for curve in curves)
    shares = (least, *(share for share in _SHARES if share > least * (1 + 1e-9)))
    table = _build_table(curves, shares)
    marks = _list_marks(report, curves[0])
    others = "; ".join(_describe(curve, shares) for curve in curves)
    return Figure(
        key="roc",
        title="True against false positives",
        chart=RocChart(
            description="ROC with logarithmic axes: trained documents against control documents "
            f"above a threshold. {others}.",
            least=least,
            ticks=_list_ticks(least),
            lines=tuple(
                Line(
                    label=_name(curve),
                    style="blind" if curve.score == BLIND else str(number),
                    points=_list_points(curve),
                )
                for number, curve in enumerate(curves)
            ),
            marks=marks,
            x_label="false-positive rate (control documents)",
            y_label="true-positive rate (trained)",
        ),
        caption=_write_caption(report, curves, has_marks=bool(marks)),
        table=table,
    )


def _choose_curves(report: AuditReport, aucs: Sequence[ResultRow]) -> list[RocCurve]:
    """Return the curves to draw: the verdict's score first, the blind baseline last."""
    detail = report.tables.find_detail("membership") or {}
    read = [RocCurve.model_validate(value) for value in detail.get(ROC, ())]
    curves = {
        curve.score: curve
        for curve in read
        if min(curve.num_members, curve.num_control) >= MIN_TO_DRAW
    }
    distance = {read_score(row): abs(row.value - 0.5) for row in aucs if row.value is not None}
    first = report.verdict.membership.score
    others = [score for score in curves if score not in (first, BLIND)]
    # Sorting is stable: equal distances stay in the order of the suite.
    others.sort(key=lambda score: -distance.get(score, 0.0))
    others = others[: _MOST_OTHERS if first in curves else _MOST_OTHERS + 1]
    chosen = [curves[score] for score in (first, *others) if score in curves]
    return [*chosen, curves[BLIND]] if chosen and BLIND in curves else chosen


def _list_points(curve: RocCurve) -> tuple[Point, ...]:
    """Return the points with false positives: 0 has no place on a logarithmic axis."""
    pairs = zip(curve.num_allowed, curve.num_matched, strict=True)
    return tuple(
        Point(x=allowed / curve.num_control, y=matched / curve.num_members)
        for allowed, matched in pairs
        if allowed
    )


def _list_marks(report: AuditReport, curve: RocCurve) -> tuple[Point, ...]:
    """Return the true-positive rates in the results of a score, with their intervals."""
    marks = []
    for metric in report.tables.list_metrics("membership"):
        rate = metric.settings.get("fpr")
        if metric.metric != "tpr" or metric.settings.get("score") != curve.score or rate is None:
            continue
        parameters = write_parameters({"score": curve.score, "fpr": rate})
        row = report.tables.find("membership", "tpr", MEMBERS, parameters=parameters)
        if row is not None and row.value is not None and row.ci is not None:
            marks.append(Point(x=float(rate), y=row.value, low=row.ci[0], high=row.ci[1]))
    return tuple(marks)


def _list_ticks(least: float) -> tuple[tuple[float, str], ...]:
    """Return the positions and labels of the axes: the first rate, then powers of ten."""
    length = -math.log10(least)
    powers = [n for n in range(-math.floor(length), 1) if length + n >= _TICK_DISTANCE * length]
    return tuple((share, _write_share(share)) for share in (least, *(10.0**n for n in powers)))


def _write_share(share: float) -> str:
    """Format a rate of an axis: at most two digits."""
    return fmt.threshold(float(f"{share:.2g}"))


def _find_matched(curve: RocCurve, share: float) -> int | None:
    """Return the trained documents at a false-positive rate; None if no threshold shows it."""
    allowed = math.floor(share * curve.num_control * (1 + 1e-12))
    pairs = zip(curve.num_allowed, curve.num_matched, strict=True)
    return max((matched for count, matched in pairs if 0 < count <= allowed), default=None)


def _name(curve: RocCurve) -> str:
    """Return the name of a curve outside the table of the scores."""
    return f"{name_score(curve.score)}{' baseline' if curve.score == BLIND else ''}"


def _describe(curve: RocCurve, shares: Sequence[float]) -> str:
    known = [(share, _find_matched(curve, share)) for share in shares]
    counts = ", ".join(
        f"{fmt.of(matched, curve.num_members)} at {_write_share(share)}"
        for share, matched in known
        if matched is not None
    )
    return f"{_name(curve)}: {counts}"


def _build_table(curves: Sequence[RocCurve], shares: Sequence[float]) -> Table:
    def column_of(curve: RocCurve) -> Column[float]:
        def show(share: float) -> Cell:
            matched = _find_matched(curve, share)
            if matched is None:
                return show_missing("too few control documents")
            return Cell(fmt.count(matched), detail=fmt.percent(matched / curve.num_members))

        return Column((_name(curve), f"of {curve.num_members:,}"), show)

    head: Column[float] = Column(("FPR", "control, at most"), _write_share)
    return make_table(
        "Chart data: trained documents", [head, *map(column_of, curves)], shares, compact=True
    )


def _write_caption(report: AuditReport, curves: Sequence[RocCurve], *, has_marks: bool) -> str:
    first, score = curves[0], name_score(curves[0].score)
    parts = [
        "Share of trained documents against the share of control documents above a threshold. "
        f"Both axes are logarithmic and begin at one of {first.num_control:,} control documents; "
        "smaller rates are drawn at the edge. On the dotted line a score does no better than "
        "chance."
    ]
    if has_marks:
        parts.append(
            f"Vertical lines are 95{fmt.PERCENT} intervals of '{score}', which include "
            "the error of the threshold."
        )
    if len(curves) > 1 and first.score == report.verdict.membership.score:
        parts.append(
            f"'{score}' is the score of the verdict; of the others, at most two are "
            "drawn: those with an AUC furthest from 0.5."
        )
    parts.append(f"{first.num_members:,} trained and {first.num_control:,} control documents.")
    return " ".join(parts)
