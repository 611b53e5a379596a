"""What happened during training, step by step: losses, extraction, budget, and the exported step.

The chart has losses above and extraction below, over the same steps. A run that was not audited has
a page with this section only, also while it is trained.
"""

from collections.abc import Iterator
from dataclasses import replace

from memguard.errors import plural
from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, Content, make_table, show_missing
from memguard.pages.page import (
    Cell,
    CurveChart,
    Figure,
    Line,
    Panel,
    Point,
    Section,
    Table,
    TrainingPage,
)
from memguard.records import RISK_NAMES, ResultRow, Tables, TrainingSummary
from memguard.report.texts import COMPARISON_CONFIDENTIALITY

_MOST_BUCKETS = 8
_MOST_ROWS = 12


def build_page(
    training: TrainingSummary, tables: Tables, *, name: str, version: str, has_ended: bool
) -> TrainingPage:
    """Build the page of a run called ``name``."""
    section = _build_section(training, tables, has_ended=has_ended)
    heading = f"Run '{fmt.clean_name(name, 120)}'"
    ended = "has ended" if has_ended else f"is at step {training.last_step:,}"
    return TrainingPage(
        title=f"{heading}: training",
        heading=heading,
        tool_version=fmt.clean_name(version, 40),
        confidentiality=COMPARISON_CONFIDENTIALITY,
        glossary=(),
        state=f"Training {ended}. What the model memorized was not measured: run memguard audit.",
        section=section,
    )


def build_during(training: TrainingSummary | None, tables: Tables) -> Section | None:
    """Build the section of a report; None if nothing was measured between first and last step.

    ``tables`` has the rows of audits during training.
    """
    if training is None or not (training.watched or len(training.curve.heldout) > 2):
        return None
    return _build_section(training, tables, has_ended=True)


def _build_section(training: TrainingSummary, tables: Tables, *, has_ended: bool) -> Section:
    first = _describe_first(training, tables) if training.watched else ""
    lead = (describe_exported(training), first, describe_budget(training))
    return Section(
        key="during",
        title="During training",
        lead=tuple(filter(None, lead)),
        figure=Figure(
            key="during",
            title="Loss and extraction by step" if training.watched else "Loss by step",
            chart=_build_chart(training, tables, first, has_ended=has_ended),
            caption=_write_caption(training),
            table=_build_table(training, tables),
        ),
    )


def describe_exported(training: TrainingSummary) -> str:
    """Say which step was exported and what ended training; "" for the last of all steps."""
    worse = sum(point.step > training.num_steps for point in training.curve.heldout)
    why = {
        "last": "",
        "heldout": f"The model is that of step {training.num_steps:,} of {training.last_step:,} "
        "taken, which had the lowest held-out loss.",
        "budget": f"The model is that of step {training.num_steps:,} of {training.last_step:,} "
        "taken, the last audited one within the risk budget.",
    }[training.kept_by]
    if training.stopped_by != "heldout":
        return why
    after = f" after {plural(worse, 'measurement')} without a lower held-out loss" if worse else ""
    return f"{why} Training ended early{after}.".strip()


def describe_budget(training: TrainingSummary) -> str:
    """Describe the budget and its effect; "" if there was none."""
    budget = training.budget
    if budget is None or not training.watched:
        return ""
    last = training.watched[-1]
    metric = RISK_NAMES[budget.metric]
    text = f"The risk budget allows {fmt.percent(budget.limit)} {metric} extraction per bucket"
    if training.stopped_by == "budget":
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


def _list_buckets(training: TrainingSummary, tables: Tables, *, trained: bool) -> list[str]:
    """Return the buckets that were audited during training, of trained documents or of others."""
    rows = tables.select("extraction", "learned")
    watched = dict.fromkeys(row.bucket for row in rows if row.step is not None)
    names = training.watched[-1].trained if training.watched else []
    return [name for name in watched if (name in names) == trained][:_MOST_BUCKETS]


def _find(tables: Tables, metric: str, bucket: str, step: int) -> ResultRow | None:
    return tables.find("extraction", metric, bucket, step=step)


def _describe_first(training: TrainingSummary, tables: Tables) -> str:
    """Give the step at which the first document of each bucket was extracted."""
    learned = tables.select("extraction", "learned")
    if not any(row.num_matched for row in learned):
        return "Of the sample that was audited during training, no document became extractable."
    first = []
    for bucket in _list_buckets(training, tables, trained=True):
        steps = [row.step for row in learned if row.bucket == bucket and row.num_matched]
        name = fmt.clean_name(bucket, 40)
        first.append(f"{name} at step {steps[0]:,}" if steps else f"{name} none")
    return (
        "First extraction of a document that was not extracted before training: "
        f"{', '.join(first)}."
    )


def _build_chart(
    training: TrainingSummary, tables: Tables, first: str, *, has_ended: bool
) -> CurveChart:
    drawn = (
        (training.curve.training, "training loss", "0"),
        (training.curve.heldout, "held-out loss", "1"),
    )
    losses = tuple(
        Line(label=label, style=style, points=tuple(Point(x=one.step, y=one.nll) for one in points))
        for points, label, style in drawn
        if points
    )
    rates = tuple(_draw_rates(training, tables))
    kinds = "losses and newly extracted documents" if rates else "losses"
    exported = f"; step {training.num_steps:,} is exported" if has_ended else ""
    text = f"Chart of {kinds} by step{exported}. {first}"
    panels = (
        Panel(y_label="nats a token", lines=losses),
        Panel(y_label="extracted (%)", lines=rates, is_percent=True),
    )
    return CurveChart(
        description=text.strip(),
        panels=tuple(panel for panel in panels if panel.lines),
        x_label="optimizer steps",
        mark_at=training.num_steps if has_ended else None,
        mark_label=f"exported: {training.num_steps:,}",
    )


def _draw_rates(training: TrainingSummary, tables: Tables) -> Iterator[Line]:
    steps = [watched.step for watched in training.watched]

    def draw(bucket: str, label: str, style: str) -> Line:
        rows = [(step, _find(tables, "learned", bucket, step)) for step in steps]
        known = [(step, row.value) for step, row in rows if row and row.value is not None]
        points = tuple(Point(x=step, y=100 * value) for step, value in known)
        return Line(label=label, style=style, points=points)

    lines = [
        draw(bucket, fmt.clean_name(bucket, 40), str(number + 2))
        for number, bucket in enumerate(_list_buckets(training, tables, trained=True))
    ]
    others = _list_buckets(training, tables, trained=False)
    lines += [draw(bucket, "control", "base-accuracy") for bucket in others]
    yield from (line for line in lines if line.points)


def _write_caption(training: TrainingSummary) -> str:
    texts = ["The training loss is that of the labels that received loss, with its mitigations."]
    if training.watched:
        texts.append(
            "Extracted: documents that are extracted now and were not before training, among the "
            "same audited documents of each bucket at every step. Step 0 is the model before "
            "training; the control is never trained."
        )
    return " ".join(texts)


def _build_table(training: TrainingSummary, tables: Tables) -> Table:
    losses = {point.step: point.nll for point in training.curve.heldout}
    watched = {one.step: one for one in training.watched}

    def show_bucket(bucket: str, step: int) -> Content:
        if step not in watched:
            return ""
        learned = _find(tables, "learned", bucket, step)
        accuracy = _find(tables, "token_accuracy", bucket, step)
        if learned is None or accuracy is None:
            return show_missing("not measured")
        tightened = watched[step].num_tightened.get(bucket, 0)
        return Cell(
            fmt.of(*learned.counts),
            detail=f"{fmt.percent(accuracy.value)} of tokens",
            note=f"{tightened:,} stricter" if tightened else "",
        )

    def column_of(bucket: str) -> Column[int]:
        return Column(fmt.clean_name(bucket, 24), lambda step: show_bucket(bucket, step))

    columns: tuple[Column[int], ...] = (
        Column("Step", lambda step: Cell(f"{step:,}")),
        Column("Held-out loss", lambda step: fmt.number(losses[step]) if step in losses else ""),
        *map(column_of, _list_buckets(training, tables, trained=True)),
    )
    steps = sorted({*losses, *watched})
    caption = "Held-out loss"
    if watched:
        caption += "; documents newly extracted since training began; teacher-forced token accuracy"
    table = make_table(caption, columns, steps, compact=True)
    # The latest steps describe the final model; earlier ones are collapsed.
    return replace(
        table,
        rows=table.rows[-_MOST_ROWS:],
        more_rows=table.rows[:-_MOST_ROWS],
        more_label=f"{len(steps) - _MOST_ROWS} earlier steps",
    )
