"""Over repetitions and over steps: what rises with the dose, and when documents are extracted.

The dose-response figure with the tables beside it, and what audits during training found.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from memguard.records import (
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
    make_rows,
    make_table,
    show_known,
    show_missing,
    show_name,
    tone_of_bucket,
)

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
    rows = make_rows(columns, buckets, tone_of_bucket)
    return make_table("Chart data", columns, rows, compact=True)


_MOST_DOSES = 20


def build_trends(report: AuditReport) -> Table | None:
    """Build the table of monotone fits and trend tests; None where no dose is known."""
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
        Column(("p", "trend"), lambda t: show_known(t.p_value, fmt.p, "rates are all 0, or all 1")),
    )
    shown = [trend for trend in trends[:8] if trend.doses[:_MOST_DOSES] == doses]
    return make_table(
        "Does it rise with the number of repetitions?",
        columns,
        make_rows(columns, shown),
        notes=(
            "The fit never falls with the dose and is the closest such one to the measured rates "
            "(isotonic regression). p: Cochran-Armitage test of a trend over the doses, two-sided; "
            "a large one is no proof that there is none.",
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
    """Build the k-eidetic table; None where clusters are not known."""
    copies = report.extracted_copies[:20]
    if not copies:
        return None
    columns: tuple[Column[ExtractedCopies], ...] = (
        Column(
            ("Copies", "trained documents that hold it"),
            lambda one: "only itself" if one.k == 1 else f"at most {one.k:,}",
        ),
        *count_columns(
            ("Recited", "of the audited documents with so few"),
            ("Share", "of them"),
            lambda one: (one.num_extracted, one.num_documents),
            "no such document",
        ),
    )
    return make_table(
        "Recited verbatim although few trained documents hold the text",
        columns,
        make_rows(columns, copies),
        notes=(
            "k-eidetic memorisation: documents that share a run of words count as copies, so k is "
            "never understated. How often each was trained is not in k.",
        ),
        compact=True,
    )


_MOST_BUCKETS = 8
_MOST_ROWS = 12


def build_watched(report: AuditReport) -> Section | None:
    """Build the section; None where nobody looked during training."""
    training = report.training
    if training is None or not training.watched:
        return None
    names = [fmt.clean_name(one.bucket, 40) for one in _list_trained(training.watched[0])]
    return Section(
        key="during",
        title="During training",
        short_title="During",
        lead=tuple(filter(None, (_tell_first(training.watched), tell_budget(training)))),
        figure=Figure(
            key="during",
            title="Teacher-forced token accuracy by step",
            chart=_build_chart(training.watched, names),
            caption="Teacher-forced, which is not extraction; mean over each bucket's audited "
            "documents, the same ones at every step. Step 0 is the model before training, and the "
            "control is never trained.",
            table=_build_watched_table(training.watched),
        ),
    )


def _list_trained(step: WatchedStep) -> list[WatchedBucket]:
    return [bucket for bucket in step.buckets if bucket.role == "trained"][:_MOST_BUCKETS]


def _tell_first(watched: Sequence[WatchedStep]) -> str:
    """Say when the first document of each bucket was extracted."""
    if not any(bucket.num_learned for step in watched for bucket in step.buckets):
        return "No audited document was extracted that was not extracted before training."
    found = []
    for number, bucket in enumerate(_list_trained(watched[0])):
        steps = [one.step for one in watched if _list_trained(one)[number].num_learned]
        name = fmt.clean_name(bucket.bucket, 40)
        found.append(f"{name} at step {steps[0]:,}" if steps else f"{name} none")
    return (
        "First extraction of a document that was not extracted before training: "
        f"{', '.join(found)}."
    )


def tell_budget(training: TrainingSummary) -> str:
    """Say what the budget allowed and did; "" where there was none."""
    budget = training.budget
    if budget is None or not training.watched:
        return ""
    last = training.watched[-1]
    metric = budget.metric.replace("_", "-")
    text = f"The risk budget allows {fmt.percent(budget.limit)} of a bucket {metric}"
    if training.stopped_by_budget:
        broken = ", ".join(fmt.clean_name(name, 40) for name in last.over_limit)
        return (
            f"{text}: {broken} went beyond it at step {last.step:,}, so the model is that of step "
            f"{training.num_steps:,}."
        )
    if budget.action == "stop":
        return f"{text}: training never went beyond it."
    moved = [one for one in last.buckets if one.num_tightened]
    tightened = ", ".join(
        f"{fmt.count(one.num_tightened)} of {fmt.clean_name(one.bucket, 40)}" for one in moved
    )
    text += f"; documents on the way there were trained more strictly: {tightened or 'none'}."
    over = [fmt.clean_name(name, 40) for name in last.over_limit]
    return f"{text} {'Still beyond it: ' + ', '.join(over) if over else 'It was kept'}."


def _build_chart(watched: Sequence[WatchedStep], names: Sequence[str]) -> LineChart:
    lines = []
    for number, name in enumerate(names):
        shares = [_list_trained(step)[number].mean_token_accuracy for step in watched]
        lines.append(Line(label=name, style=str(number), points=_place_watched(shares)))
    controls = [
        next((one.mean_token_accuracy for one in step.buckets if one.role == "control"), None)
        for step in watched
    ]
    known = [share for share in controls if share is not None]
    if len(known) == len(watched):
        lines.append(Line(label="control", style="base", points=_place_watched(known)))
    return LineChart(
        description=f"Line chart of token accuracy by step. {_tell_first(watched)}",
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
        *(column_of(number, one) for number, one in enumerate(_list_trained(watched[0]))),
    )
    caption = "Documents extracted and not before training; teacher-forced token accuracy"
    rows = make_rows(columns, watched)
    # The newest are what the model is; the first ones are on demand.
    return replace(
        make_table(caption, columns, rows[-_MOST_ROWS:], compact=True),
        more_rows=tuple(rows[:-_MOST_ROWS]),
        more_label=f"{len(rows) - _MOST_ROWS} earlier steps",
    )


def _show_watched(bucket: WatchedBucket) -> Cell:
    return Cell(
        fmt.of(bucket.num_learned, bucket.num_documents),
        detail=f"{fmt.percent(bucket.mean_token_accuracy)} of tokens",
        note=f"{bucket.num_tightened:,} stricter" if bucket.num_tightened else "",
    )
