"""The dose-response figure of an audit: what is drawn, and the table beside it."""

from collections.abc import Callable, Sequence

from memguard.records import AuditReport, BucketScores, Interval, ModelScores, Rate
from memguard.report.cells import make_headings
from memguard.report.formatting import (
    MISSING,
    format_percent,
    format_repetitions,
)
from memguard.report.page import Cell, Figure, Line, LineChart, Point, Row, Table
from memguard.report.text import clean_name

Select = Callable[[BucketScores], Rate | Interval | None]


def build_dose_response(report: AuditReport) -> Figure | None:
    """Build the figure; None where `explain_no_chart` gives a reason."""
    if explain_no_chart(report):
        return None
    buckets = _order(report.buckets)
    doses = _list_doses(buckets)
    control = any(bucket.role == "control" for bucket in buckets)
    chart = LineChart(
        description=_describe(buckets),
        ticks=tuple(f"{dose:,}" for dose in doses),
        lines=_build_lines(buckets, doses),
        y_label="documents, or tokens (%)",
        control_at=doses.index(0) if control and 0 in doses else None,
    )
    return Figure(
        key="dose",
        title="Memorization vs. repetitions",
        chart=chart,
        caption="Documents extracted, and teacher-forced token accuracy, which is not extraction, "
        "against how often they were really trained. Bands "
        "are 95 % intervals; positions are evenly spaced, not to scale. Documents per position: "
        f"{_list_n(buckets)}.",
        table=_build_table(buckets),
    )


def explain_no_chart(report: AuditReport) -> str:
    """Say why there is no dose axis; "" where there is one."""
    if not report.dose_response:
        if report.training is None:
            return (
                "No chart is shown: memguard did not train this model, so how often each document "
                "was trained is not known."
            )
        return (
            "No chart is shown: how often each document was really trained is not known, or the "
            "tally contradicts the trained steps, so the axis would be a guess."
        )
    if len(_list_doses(_order(report.buckets))) < 2:
        uneven = [b for b in report.buckets if b.role == "trained" and b.num_repetitions is None]
        if uneven:
            return (
                "No chart is shown: the documents of a bucket were not all trained equally often, "
                "so the bucket has no place on the axis."
            )
        return (
            "No chart is shown: it needs at least two different numbers of repetitions, the "
            "control's 0 included."
        )
    return ""


def _list_doses(buckets: Sequence[BucketScores]) -> list[int]:
    return sorted({_dose(bucket) for bucket in buckets})


def _order(buckets: Sequence[BucketScores]) -> list[BucketScores]:
    """Keep the buckets that have a dose and a document, by dose."""
    known = [
        bucket
        for bucket in buckets
        if bucket.role in ("trained", "control")
        and bucket.num_documents
        and (bucket.num_repetitions is not None or bucket.role == "control")
    ]
    return sorted(known, key=lambda bucket: (_dose(bucket), bucket.bucket))


def _dose(bucket: BucketScores) -> int:
    return bucket.num_repetitions or 0


def _list_n(buckets: Sequence[BucketScores]) -> str:
    counts = [f"{bucket.num_documents:,}" for bucket in buckets[:12]]
    return ", ".join(counts) + (" …" if len(buckets) > 12 else "")


def _build_lines(buckets: Sequence[BucketScores], doses: Sequence[int]) -> tuple[Line, ...]:
    def of_base(pick: Callable[[ModelScores], Rate | Interval | None]) -> Select:
        return lambda bucket: pick(bucket.base) if bucket.base else None

    # Neighbouring markers step aside so that equal values stay visible.
    selections: tuple[tuple[str, str, float, Select], ...] = (
        ("Near-verbatim", "near", -0.04, lambda b: b.model.near_verbatim),
        ("Verbatim", "verbatim", 0.04, lambda b: b.model.verbatim),
        ("Teacher-forced accuracy", "accuracy", 0.0, lambda b: b.model.mean_token_accuracy),
        ("Base, near-verbatim", "base-near", 0.0, of_base(lambda m: m.near_verbatim)),
        (
            "Base, teacher-forced accuracy",
            "base-accuracy",
            0.0,
            of_base(lambda m: m.mean_token_accuracy),
        ),
    )
    lines = []
    for label, style, shift, select in selections:
        points = []
        for bucket in buckets:
            point = _place(doses.index(_dose(bucket)) + shift, select(bucket))
            if point:
                points.append(point)
        if points:
            lines.append(Line(label=label, style=style, points=tuple(points)))
    return tuple(lines)


def _place(x: float, score: Rate | Interval | None) -> Point | None:
    value = score.rate if isinstance(score, Rate) else score.value if score else None
    if score is None or value is None:
        return None
    low, high = (None, None) if score.ci is None else (100 * score.ci[0], 100 * score.ci[1])
    return Point(x=x, y=100 * value, low=low, high=high)


def _describe(buckets: Sequence[BucketScores]) -> str:
    parts = [
        f"{_dose(bucket):,} repetitions: verbatim {format_percent(bucket.model.verbatim.rate)}, "
        f"near-verbatim {_near(bucket.model)}"
        for bucket in buckets[:12]
    ]
    return "Line chart of extracted documents by number of repetitions. " + "; ".join(parts) + "."


def _near(scores: ModelScores | None) -> str:
    near = scores.near_verbatim if scores else None
    return MISSING if near is None else format_percent(near.rate)


def _build_table(buckets: Sequence[BucketScores]) -> Table:
    def accuracy(scores: ModelScores | None) -> str:
        interval = scores.mean_token_accuracy if scores else None
        return format_percent(interval.value) if interval else MISSING

    rows = tuple(
        Row(
            head=Cell(text=format_repetitions(_dose(b)), detail=clean_name(b.bucket), kind="text"),
            cells=(
                Cell(text=format_percent(b.model.verbatim.rate)),
                Cell(text=_near(b.model)),
                Cell(text=accuracy(b.model)),
                Cell(text=_near(b.base)),
                Cell(text=accuracy(b.base)),
            ),
            tone="control" if b.role == "control" else "",
        )
        for b in buckets
    )
    return Table(
        caption="Chart data",
        columns=make_headings(
            "Repetitions",
            "Verbatim",
            "Near-verbatim",
            ("Token accuracy", "teacher-forced"),
            ("Base", "near-verbatim"),
            ("Base", "token accuracy"),
        ),
        rows=rows,
        compact=True,
    )
