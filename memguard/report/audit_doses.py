"""Memorization by number of repetitions, and by training step.

The dose-response figure with its tables, and the results of audits during training.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from memguard.records import (
    RISK_NAMES,
    AuditReport,
    BucketScores,
    DoseTrend,
    ExtractedCopies,
    Interval,
    ModelScores,
    Rate,
    TrainingSummary,
    WatchedBucket,
    WatchedStep,
)
from memguard.report import formatting as fmt
from memguard.report.page import Cell, Figure, Line, LineChart, Point, Section, Table
from memguard.report.tables import (
    Column,
    count_columns,
    make_table,
    show_known,
    show_missing,
    show_name,
    tone_of_bucket,
)

Select = Callable[[BucketScores], Rate | Interval | None]


def build_dose_response(report: AuditReport) -> Figure | None:
    """Build the figure; None if `explain_no_chart` gives a reason."""
    if explain_no_chart(report):
        return None
    buckets = _order(report.buckets)
    doses = _list_doses(buckets)
    has_control = any(bucket.role == "control" for bucket in buckets)
    chart = LineChart(
        description=_describe(buckets),
        ticks=tuple(f"{dose:,}" for dose in doses),
        lines=_build_lines(buckets, doses),
        y_label="documents, or tokens (%)",
        control_at=doses.index(0) if has_control and 0 in doses else None,
    )
    return Figure(
        key="dose",
        title="Extraction rate by exposure",
        chart=chart,
        caption="Share of documents extracted, and teacher-forced token accuracy, which is not "
        "extraction, by the number of times the documents were trained. Bands are 95 % intervals; "
        f"positions are evenly spaced, not to scale. Documents per position: {_list_n(buckets)}.",
        table=_build_table(buckets),
    )


def explain_no_chart(report: AuditReport) -> str:
    """Return the reason why there is no chart; "" if there is one."""
    if not report.dose_response:
        if report.training is None:
            return (
                "No chart is shown: memguard did not train this model, so the number of "
                "repetitions of each document is not known."
            )
        return (
            "No chart is shown: the number of repetitions of each document is not known, or "
            "contradicts the number of training steps."
        )
    if len(_list_doses(_order(report.buckets))) < 2:
        uneven = [b for b in report.buckets if b.role == "trained" and b.num_repetitions is None]
        if uneven:
            return (
                "No chart is shown: the documents of a bucket were not all trained the same number "
                "of times, so the bucket has no position on the axis."
            )
        return (
            "No chart is shown: it needs at least two different numbers of repetitions, including "
            "the control's 0."
        )
    return ""


def _list_doses(buckets: Sequence[BucketScores]) -> list[int]:
    return sorted({_dose(bucket) for bucket in buckets})


def _order(buckets: Sequence[BucketScores]) -> list[BucketScores]:
    """Return the buckets with a dose and at least one document, sorted by dose."""
    dosed = [
        bucket
        for bucket in buckets
        if bucket.role in ("trained", "control")
        and bucket.num_documents
        and (bucket.num_repetitions is not None or bucket.role == "control")
    ]
    return sorted(dosed, key=lambda bucket: (_dose(bucket), bucket.bucket))


def _dose(bucket: BucketScores) -> int:
    return bucket.num_repetitions or 0


def _list_n(buckets: Sequence[BucketScores]) -> str:
    counts = [f"{bucket.num_documents:,}" for bucket in buckets[:12]]
    return ", ".join(counts) + (" …" if len(buckets) > 12 else "")


def _build_lines(buckets: Sequence[BucketScores], doses: Sequence[int]) -> tuple[Line, ...]:
    def of_base(pick: Callable[[ModelScores], Rate | Interval | None]) -> Select:
        return lambda bucket: pick(bucket.base) if bucket.base else None

    # The two curves are shifted a little so that equal values stay visible.
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
        f"{_dose(bucket):,} repetitions: verbatim {fmt.percent(bucket.model.verbatim.rate)}, "
        f"near-verbatim {_near(bucket.model)}"
        for bucket in buckets[:12]
    ]
    return "Line chart of extracted documents by number of repetitions. " + "; ".join(parts) + "."


def _near(scores: ModelScores | None) -> str:
    near = scores.near_verbatim if scores else None
    return fmt.MISSING if near is None else fmt.percent(near.rate)


def _build_table(buckets: Sequence[BucketScores]) -> Table:
    def accuracy(scores: ModelScores | None) -> str:
        interval = scores.mean_token_accuracy if scores else None
        return fmt.percent(interval.value) if interval else fmt.MISSING

    columns: tuple[Column[BucketScores], ...] = (
        Column(
            "Repetitions", lambda b: show_name(fmt.repetitions(_dose(b)), fmt.clean_name(b.bucket))
        ),
        Column("Verbatim", lambda b: fmt.percent(b.model.verbatim.rate)),
        Column("Near-verbatim", lambda b: _near(b.model)),
        Column(("Token accuracy", "teacher-forced"), lambda b: accuracy(b.model)),
        Column(("Base", "near-verbatim"), lambda b: _near(b.base)),
        Column(("Base", "token accuracy"), lambda b: accuracy(b.base)),
    )
    return make_table("Chart data", columns, buckets, tone=tone_of_bucket, compact=True)


_MOST_DOSES = 20


def build_trends(report: AuditReport) -> Table | None:
    """Build the table of monotone fits and trend tests; None if no dose is known."""
    trends = report.trends if report.dose_response else []
    if not trends:
        return None
    doses = trends[0].doses[:_MOST_DOSES]

    def column_of_dose(number: int, dose: int) -> Column[DoseTrend]:
        heading = (f"{dose:,}", "control" if dose == 0 else "repetitions")
        return Column(heading, lambda t: _show_fitted(t, number, len(doses)))

    columns: tuple[Column[DoseTrend], ...] = (
        Column(("Rate", "monotone fit"), lambda t: _name(t.metric)),
        *(column_of_dose(number, dose) for number, dose in enumerate(doses)),
        Column(("z", "trend"), lambda t: fmt.number(t.z, 2)),
        Column(
            ("p", "trend"), lambda t: show_known(t.p_value, fmt.p, "all rates are 0, or all are 1")
        ),
    )
    shown = [trend for trend in trends[:8] if trend.doses[:_MOST_DOSES] == doses]
    return make_table(
        "Trend test",
        columns,
        shown,
        notes=(
            "Monotone fit: isotonic regression of the rate on the number of repetitions. p: "
            "Cochran-Armitage test for a trend over the numbers of repetitions, two-sided; a large "
            "p does not prove that there is no trend.",
        ),
        compact=True,
    )


def _show_fitted(trend: DoseTrend, number: int, num_doses: int) -> Cell | str:
    if len(trend.fitted[:_MOST_DOSES]) != num_doses:
        return show_missing("no documents")
    return fmt.percent(trend.fitted[number])


def _name(metric: str) -> str:
    return fmt.clean_name(metric.replace("_", "-"), 40).capitalize()


def build_copies(report: AuditReport) -> Table | None:
    """Build the k-eidetic table; None if clusters are not known."""
    copies = report.extracted_copies[:20]
    if not copies:
        return None
    columns: tuple[Column[ExtractedCopies], ...] = (
        Column(
            ("Copies", "trained documents with the text"),
            lambda row: "only itself" if row.k == 1 else f"at most {row.k:,}",
        ),
        *count_columns(
            ("Extracted verbatim", "of the audited documents with so few copies"),
            ("Share", "of them"),
            lambda row: (row.num_extracted, row.num_documents),
            "no such document",
        ),
    )
    shown = _drop_repeated(copies)
    left_out = [f"{row.k:,}" for row in copies if row not in shown]
    repeated = f"A limit of {', '.join(left_out)} gives the same counts as the row before."
    return make_table(
        "k-eidetic memorization",
        columns,
        shown,
        notes=(
            "Documents extracted verbatim although few trained documents contain their text. "
            "Documents that share a run of words count as copies, so k is never understated. k "
            "does not count how often each was trained.",
            *([repeated] if left_out else []),
        ),
        compact=True,
    )


def _drop_repeated(copies: Sequence[ExtractedCopies]) -> list[ExtractedCopies]:
    """Return the rows whose counts differ from those of the row before."""

    def count(row: ExtractedCopies) -> tuple[int, int]:
        return row.num_documents, row.num_extracted

    return [row for i, row in enumerate(copies) if i == 0 or count(row) != count(copies[i - 1])]


_MOST_BUCKETS = 8
_MOST_ROWS = 12


def build_watched(report: AuditReport) -> Section | None:
    """Build the section; None if no audit ran during training."""
    training = report.training
    if training is None or not training.watched:
        return None
    names = [fmt.clean_name(bucket.bucket, 40) for bucket in _list_trained(training.watched[0])]
    return Section(
        key="during",
        title="During training",
        short_title="During",
        lead=tuple(filter(None, (_describe_first(training.watched), describe_budget(training)))),
        figure=Figure(
            key="during",
            title="Teacher-forced token accuracy by step",
            chart=_build_chart(training.watched, names),
            caption="Teacher-forced token accuracy, which is not extraction: mean over the same "
            "audited documents of each bucket at every step. Step 0 is the model before training; "
            "the control is never trained.",
            table=_build_watched_table(training.watched),
        ),
    )


def _list_trained(step: WatchedStep) -> list[WatchedBucket]:
    return [bucket for bucket in step.buckets if bucket.role == "trained"][:_MOST_BUCKETS]


def _describe_first(watched: Sequence[WatchedStep]) -> str:
    """Give the step at which the first document of each bucket was extracted."""
    if not any(bucket.num_learned for step in watched for bucket in step.buckets):
        return "Training made no audited document extractable."
    first = []
    for number, bucket in enumerate(_list_trained(watched[0])):
        steps = [audit.step for audit in watched if _list_trained(audit)[number].num_learned]
        name = fmt.clean_name(bucket.bucket, 40)
        first.append(f"{name} at step {steps[0]:,}" if steps else f"{name} none")
    return (
        "First extraction of a document that was not extracted before training: "
        f"{', '.join(first)}."
    )


def describe_budget(training: TrainingSummary) -> str:
    """Describe the budget and its effect; "" if there was none."""
    budget = training.budget
    if budget is None or not training.watched:
        return ""
    last = training.watched[-1]
    metric = RISK_NAMES[budget.metric]
    text = f"The risk budget allows {fmt.percent(budget.limit)} {metric} extraction per bucket"
    if training.stopped_by_budget:
        exceeded = ", ".join(fmt.clean_name(name, 40) for name in last.over_limit)
        return (
            f"{text}: {exceeded} exceeded it at step {last.step:,}, so the model is that of step "
            f"{training.num_steps:,}."
        )
    if budget.action == "stop":
        return f"{text}: training never exceeded it."
    tightened = ", ".join(
        f"{fmt.count(bucket.num_tightened)} of {fmt.clean_name(bucket.bucket, 40)}"
        for bucket in last.buckets
        if bucket.num_tightened
    )
    text += f"; documents close to extraction got a stricter mitigation: {tightened or 'none'}."
    over = [fmt.clean_name(name, 40) for name in last.over_limit]
    return f"{text} {'Still exceeded by ' + ', '.join(over) if over else 'It was kept'}."


def _build_chart(watched: Sequence[WatchedStep], names: Sequence[str]) -> LineChart:
    lines = []
    for number, name in enumerate(names):
        shares = [_list_trained(step)[number].mean_token_accuracy for step in watched]
        lines.append(Line(label=name, style=str(number), points=_place_watched(shares)))
    controls = [
        next((b.mean_token_accuracy for b in step.buckets if b.role == "control"), None)
        for step in watched
    ]
    measured = [share for share in controls if share is not None]
    if len(measured) == len(watched):
        lines.append(Line(label="control", style="base", points=_place_watched(measured)))
    return LineChart(
        description=f"Line chart of token accuracy by step. {_describe_first(watched)}",
        ticks=tuple(f"{step.step:,}" for step in watched),
        lines=tuple(lines),
        y_label="tokens (%)",
        control_at=None,
        x_label="optimizer steps",
    )


def _place_watched(shares: Sequence[float]) -> tuple[Point, ...]:
    return tuple(Point(x=number, y=100 * share) for number, share in enumerate(shares))


def _build_watched_table(watched: Sequence[WatchedStep]) -> Table:
    def column_of(number: int, bucket: WatchedBucket) -> Column[WatchedStep]:
        name = fmt.clean_name(bucket.bucket, 24)
        return Column(name, lambda step: _show_watched(_list_trained(step)[number]))

    columns: tuple[Column[WatchedStep], ...] = (
        Column("Step", lambda step: Cell(f"{step.step:,}")),
        *(column_of(number, bucket) for number, bucket in enumerate(_list_trained(watched[0]))),
    )
    caption = "Documents newly extracted since training began; teacher-forced token accuracy"
    table = make_table(caption, columns, watched, compact=True)
    # The latest steps describe the final model; earlier ones are collapsed.
    return replace(
        table,
        rows=table.rows[-_MOST_ROWS:],
        more_rows=table.rows[:-_MOST_ROWS],
        more_label=f"{len(watched) - _MOST_ROWS} earlier steps",
    )


def _show_watched(bucket: WatchedBucket) -> Cell:
    return Cell(
        fmt.of(bucket.num_learned, bucket.num_documents),
        detail=f"{fmt.percent(bucket.mean_token_accuracy)} of tokens",
        note=f"{bucket.num_tightened:,} stricter" if bucket.num_tightened else "",
    )
