"""What audits during training found: when documents began to be extracted."""

from collections.abc import Sequence

from memguard.records import AuditReport, TrainingSummary, WatchedBucket, WatchedStep
from memguard.report.cells import make_headings
from memguard.report.formatting import format_count, format_of, format_percent
from memguard.report.page import Cell, Figure, Line, LineChart, Point, Row, Section, Table
from memguard.report.text import clean_name

_MOST_BUCKETS = 8
_MOST_ROWS = 12


def build_watched(report: AuditReport) -> Section | None:
    """Build the section; None where nobody looked during training."""
    training = report.training
    if training is None or not training.watched:
        return None
    names = [clean_name(one.bucket, 40) for one in _list_trained(training.watched[0])]
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
            table=_build_table(training.watched),
        ),
    )


def _list_trained(step: WatchedStep) -> list[WatchedBucket]:
    return [bucket for bucket in step.buckets if bucket.role == "trained"][:_MOST_BUCKETS]


def _tell_first(watched: Sequence[WatchedStep]) -> str:
    """Say when the first document of each bucket was extracted."""
    if not any(bucket.num_learnt for step in watched for bucket in step.buckets):
        return "No audited document was extracted that was not extracted before training."
    found = []
    for number, bucket in enumerate(_list_trained(watched[0])):
        steps = [one.step for one in watched if _list_trained(one)[number].num_learnt]
        name = clean_name(bucket.bucket, 40)
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
    text = f"The risk budget allows {format_percent(budget.limit)} of a bucket {metric}"
    if training.stopped_by_budget:
        broken = ", ".join(clean_name(name, 40) for name in last.over_limit)
        return (
            f"{text}: {broken} went beyond it at step {last.step:,}, so the model is that of step "
            f"{training.num_steps:,}."
        )
    if budget.action == "stop":
        return f"{text}: training never went beyond it."
    moved = [one for one in last.buckets if one.num_tightened]
    tightened = ", ".join(
        f"{format_count(one.num_tightened)} of {clean_name(one.bucket, 40)}" for one in moved
    )
    text += f"; documents on the way there were trained more strictly: {tightened or 'none'}."
    over = [clean_name(name, 40) for name in last.over_limit]
    return f"{text} {'Still beyond it: ' + ', '.join(over) if over else 'It was kept'}."


def _build_chart(watched: Sequence[WatchedStep], names: Sequence[str]) -> LineChart:
    lines = []
    for number, name in enumerate(names):
        shares = [_list_trained(step)[number].mean_token_accuracy for step in watched]
        lines.append(Line(label=name, style=str(number), points=_place(shares)))
    controls = [
        next((one.mean_token_accuracy for one in step.buckets if one.role == "control"), None)
        for step in watched
    ]
    known = [share for share in controls if share is not None]
    if len(known) == len(watched):
        lines.append(Line(label="control", style="base", points=_place(known)))
    return LineChart(
        description=f"Line chart of token accuracy by step. {_tell_first(watched)}",
        ticks=tuple(f"{step.step:,}" for step in watched),
        lines=tuple(lines),
        y_label="tokens (%)",
        control_at=None,
        x_label="optimizer steps",
    )


def _place(shares: Sequence[float]) -> tuple[Point, ...]:
    return tuple(Point(x=number, y=100 * share) for number, share in enumerate(shares))


def _build_table(watched: Sequence[WatchedStep]) -> Table:
    rows = tuple(
        Row(
            head=Cell(text=f"{step.step:,}"),
            cells=tuple(
                Cell(
                    text=format_of(bucket.num_learnt, bucket.num_documents),
                    detail=f"{format_percent(bucket.mean_token_accuracy)} of tokens",
                    note=f"{bucket.num_tightened:,} stricter" if bucket.num_tightened else "",
                )
                for bucket in _list_trained(step)
            ),
        )
        for step in watched
    )
    # The newest are what the model is; the first ones are on demand.
    return Table(
        caption="Documents extracted and not before training; teacher-forced token accuracy",
        columns=make_headings(
            "Step", *(clean_name(one.bucket, 24) for one in _list_trained(watched[0]))
        ),
        rows=rows[-_MOST_ROWS:],
        more_rows=rows[:-_MOST_ROWS],
        more_label=f"{len(rows) - _MOST_ROWS} earlier steps",
        compact=True,
    )
