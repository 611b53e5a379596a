"""The section "During training": audits at steps of the training, and the risk budget."""

from collections.abc import Sequence
from dataclasses import replace

from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, make_table, show_missing
from memguard.pages.page import Cell, Figure, Line, LineChart, Point, Section, Table
from memguard.records import RISK_NAMES, AuditReport, ResultRow, TrainingSummary, WatchedStep

_MOST_BUCKETS = 8
_MOST_ROWS = 12


def build_watched(report: AuditReport) -> Section | None:
    """Build the section; None if no audit ran during training."""
    training = report.training
    if training is None or not training.watched:
        return None
    first = _describe_first(report)
    return Section(
        key="during",
        title="During training",
        short_title="During",
        lead=tuple(filter(None, (first, describe_budget(training)))),
        figure=Figure(
            key="during",
            title="Teacher-forced token accuracy by step",
            chart=_build_chart(report, training.watched),
            caption="Teacher-forced token accuracy, which is not extraction: mean over the same "
            "audited documents of each bucket at every step. Step 0 is the model before training; "
            "the control is never trained.",
            table=_build_watched_table(report, training.watched),
        ),
    )


def _list_watched(report: AuditReport, role: str) -> list[str]:
    """Return the buckets of a role that were audited during training."""
    rows = report.tables.select("extraction", "learned")
    watched = dict.fromkeys(row.bucket for row in rows if row.step is not None)
    roles = {bucket.bucket: bucket.role for bucket in report.tables.buckets}
    return [name for name in watched if roles.get(name) == role][:_MOST_BUCKETS]


def _find(report: AuditReport, metric: str, bucket: str, step: WatchedStep) -> ResultRow | None:
    return report.tables.find("extraction", metric, bucket, step=step.step)


def _describe_first(report: AuditReport) -> str:
    """Give the step at which the first document of each bucket was extracted."""
    learned = report.tables.select("extraction", "learned")
    if not any(row.num_matched for row in learned):
        return "Training made no audited document extractable."
    first = []
    for bucket in _list_watched(report, "trained"):
        steps = [row.step for row in learned if row.bucket == bucket and row.num_matched]
        name = fmt.clean_name(bucket, 40)
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
        f"{fmt.count(number)} of {fmt.clean_name(bucket, 40)}"
        for bucket, number in last.num_tightened.items()
        if number
    )
    text += f"; documents close to extraction got a stricter mitigation: {tightened or 'none'}."
    over = [fmt.clean_name(name, 40) for name in last.over_limit]
    return f"{text} {'Still exceeded by ' + ', '.join(over) if over else 'It was kept'}."


def _build_chart(report: AuditReport, watched: Sequence[WatchedStep]) -> LineChart:
    def draw(bucket: str, label: str, style: str) -> Line | None:
        rows = [_find(report, "token_accuracy", bucket, step) for step in watched]
        shares = [row.value for row in rows if row is not None and row.value is not None]
        points = tuple(Point(x=number, y=100 * share) for number, share in enumerate(shares))
        is_whole = len(shares) == len(watched)
        return Line(label=label, style=style, points=points) if is_whole else None

    lines = [
        draw(bucket, fmt.clean_name(bucket, 40), str(number))
        for number, bucket in enumerate(_list_watched(report, "trained"))
    ]
    lines += [draw(bucket, "control", "base") for bucket in _list_watched(report, "control")]
    return LineChart(
        description=f"Line chart of token accuracy by step. {_describe_first(report)}",
        ticks=tuple(f"{step.step:,}" for step in watched),
        lines=tuple(line for line in lines if line),
        y_label="tokens (%)",
        control_at=None,
        x_label="optimizer steps",
    )


def _build_watched_table(report: AuditReport, watched: Sequence[WatchedStep]) -> Table:
    def column_of(bucket: str) -> Column[WatchedStep]:
        return Column(fmt.clean_name(bucket, 24), lambda step: _show_watched(report, bucket, step))

    columns: tuple[Column[WatchedStep], ...] = (
        Column("Step", lambda step: Cell(f"{step.step:,}")),
        *map(column_of, _list_watched(report, "trained")),
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


def _show_watched(report: AuditReport, bucket: str, step: WatchedStep) -> Cell:
    learned = _find(report, "learned", bucket, step)
    accuracy = _find(report, "token_accuracy", bucket, step)
    if learned is None or accuracy is None:
        return show_missing("not measured")
    tightened = step.num_tightened.get(bucket, 0)
    return Cell(
        fmt.of(learned.num_matched or 0, learned.num_documents),
        detail=f"{fmt.percent(accuracy.value)} of tokens",
        note=f"{tightened:,} stricter" if tightened else "",
    )
