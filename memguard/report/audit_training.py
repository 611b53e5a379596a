"""What training did: its cost, and benchmark tasks before and after.

A small task cannot show a small difference, and one that both models answer at random shows nothing
of what training changed. Both are said beside the numbers, on the page and in the terminal.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memguard.errors import plural
from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, Content, make_table, show_name, show_row
from memguard.pages.page import Cell, Fact, Section, Table
from memguard.records import (
    RISK_NAMES,
    AuditReport,
    LoadAs,
    StartLine,
    Tables,
    TrainingSummary,
)
from memguard.records.utility import TaskDetail, list_task_details
from memguard.report.texts import describe_loss_change
from memguard.report.training_curve import describe_budget, describe_exported

_PRIVACY_LIMITS = (
    "The guarantee is per row. It does not cover copies of a document, its other pieces, what the "
    "base model knew, or this report, which is computed from the documents."
)


def build_training(report: AuditReport) -> Section:
    """Build the section of mitigations, cost and utility; cards show what it cost."""
    training = report.training
    lead = (
        "Held-out NLL measures utility: a mitigation should lower the extraction rate without "
        "raising it."
    )
    if training is None:
        lead = "memguard did not train this model, so its cost and utility are not known."
    return Section(
        key="training",
        title="Training, utility and mitigation",
        lead=(lead,),
        facts=() if training is None else _describe_training(training, report.model.load_as),
        brief=tuple(_list_brief(report)),
    )


def _list_brief(report: AuditReport) -> Iterator[Fact]:
    """Yield what cards show: budget, held-out loss, benchmark tasks, privacy loss."""
    training = report.training
    if training is not None:
        for text in (describe_exported(training), describe_budget(training)):
            if text:
                yield Fact("", text)
    if training is not None and training.heldout_nll is not None:
        change = describe_loss_change(training.heldout_nll, training.base_heldout_nll)
        value = f"held-out NLL {fmt.number(training.heldout_nll)} nats a token"
        yield Fact("Utility", f"{value}{f', {change}' if change else ''}.")
    for line in describe_utility(report.tables):
        yield Fact("Utility", f"{line}.")
    for fact in _describe_privacy(training) if training is not None else ():
        yield Fact(fact.term, f"{fact.value}. {fact.detail}")


def _describe_training(training: TrainingSummary, load_as: LoadAs) -> tuple[Fact, ...]:
    """List mitigations, privacy, cost of training and loss on held-out documents."""
    heldout = [f"{fmt.count(training.heldout_num_documents)} documents"]
    heldout.append(f"{fmt.count(training.heldout_num_tokens)} tokens")
    if training.heldout_bucket:
        heldout.append(f"bucket {fmt.clean_name(training.heldout_bucket)}")
    bounded = []
    if (budget := training.budget) is not None:
        limit = f"at most {fmt.percent(budget.limit)} {RISK_NAMES[budget.metric]} extraction"
        detail = f"action if exceeded: {budget.action}"
        bounded = [Fact("Risk budget", f"{limit} per bucket", detail=detail)]
    removed = Fact("Copies removed", f"{fmt.count(training.num_removed or 0)} documents")
    return (
        Fact("Mitigations", name_mitigations(training.mitigations)),
        *bounded,
        *([] if training.num_removed is None else [removed]),
        *_describe_privacy(training),
        Fact(
            "Labels dropped",
            describe_dropped(training.dropped_fraction, bool(training.mitigations)),
            detail=_describe_target(training),
        ),
        Fact(
            "Held-out NLL",
            fmt.number(training.heldout_nll),
            detail=describe_loss_change(training.heldout_nll, training.base_heldout_nll),
        )
        if load_as == "stored"
        else Fact("Held-out NLL", "not measured", detail="Training measured the stored model."),
        Fact("Held-out on", ", ".join(heldout)),
        Fact("Steps", fmt.count(training.num_steps), detail=describe_exported(training)),
        Fact("Supervised tokens", fmt.count(training.num_supervised_tokens)),
        Fact("Time", fmt.duration(training.train_s)),
        *(Fact("Start", _describe_start(start)) for start in training.starts),
    )


def _describe_start(start: StartLine) -> str:
    lost = f", {plural(start.num_lost_steps, 'step')} lost" if start.num_lost_steps else ""
    first = f"first step after {fmt.duration(start.first_step_s)}"
    return f"from step {start.step:,} ({start.why}{lost}): {first}"


def _describe_target(training: TrainingSummary) -> str:
    """Return the share of labels that goldfish should drop; "" if it differs by document."""
    goldfish = [m for m in training.mitigations if isinstance(m.get("k"), int) and m["k"] > 0]
    is_tightened = training.budget is not None and training.budget.action == "tighten"
    if not goldfish or goldfish[0].get("k_by_dose") or is_tightened:
        return ""
    k = goldfish[0]["k"]
    return f"masked by goldfish; target {fmt.threshold(1 / k)} (1 in {k:,})"


def _describe_privacy(training: TrainingSummary) -> tuple[Fact, ...]:
    """Report the privacy loss of dp_sgd and what it does not cover; nothing without dp_sgd."""
    if training.epsilon is None or training.delta is None:
        return ()
    sampled = fmt.number(training.epsilon_if_sampled)
    return (
        Fact(
            "Differential privacy",
            f"ε = {fmt.number(training.epsilon)} at δ = {training.delta:g}, per row",
            detail=f"With Poisson sampling of rows, as papers assume: {sampled}. {_PRIVACY_LIMITS}",
        ),
    )


def name_mitigations(mitigations: Sequence[Mapping[str, Any]]) -> str:
    """List the mitigations of a training with their settings."""
    return "; ".join(map(fmt.settings, mitigations)) or "none (plain loss)"


def describe_dropped(share: float | None, mitigated: bool) -> str:
    """Format the share of labels that were dropped; plain loss drops none."""
    return "none" if share is None and not mitigated else fmt.percent(share)


_SHOWN, _LONGEST = 12, 60
_TaskRow = tuple[TaskDetail, str]
"""A task and one of its metrics."""


def build_utility(report: AuditReport) -> Section | None:
    """Build the section; None if no task ran."""
    details = list_task_details(report.tables)
    if not details:
        return None
    return Section(
        key="utility",
        title="Utility",
        lead=(
            "Benchmark tasks of lm-eval, answered by the trained model and by the base model. They "
            "measure what the model can do; they have no part in the verdict.",
            *(
                f"{fmt.clean_name(detail.task, _LONGEST)}: {_say_at_chance(detail)}."
                for detail in details
                if detail.is_at_chance
            ),
        ),
        tables=(_build_values(report.tables, details), _build_details(details)),
    )


def describe_utility(tables: Tables) -> list[str]:
    """Return one line for each task, for the terminal: values, difference, and what it can tell."""
    return [_describe_task(detail, tables) for detail in list_task_details(tables)]


def _describe_task(detail: TaskDetail, tables: Tables) -> str:
    name = fmt.clean_name(detail.task, _LONGEST)
    metric = detail.find_metric(tables)
    of_model, of_base, change = (
        detail.find(tables, **key) for key in ({}, {"model": "base"}, {"against": "base"})
    )

    def write(cell: Cell) -> str:
        return f"{cell.text} ({cell.detail})" if cell.detail else cell.text

    headline = fmt.clean_name(detail.headline, _LONGEST)
    text = f"{name}: {headline} {write(show_row(of_model, metric))}"
    if of_base is not None:
        text += f", base model {write(show_row(of_base, metric))}"
    if change is not None and change.is_known:
        text += f", difference {write(show_row(change, metric))}"
    items = plural(detail.num_items, "item")
    if detail.smallest_difference is not None:
        items += f" can show a difference of {write_smallest(detail, tables)} or more"
    text += f"; {items}"
    if detail.is_at_chance:
        text += f"; {_say_at_chance(detail)}"
    return text.replace(fmt.NBSP, " ")


def _say_at_chance(detail: TaskDetail) -> str:
    models = "both models are" if len(detail.samples_sha256) > 1 else "the model is"
    return (
        f"{models} at chance ({fmt.percent(detail.chance)} within the interval): this task cannot "
        "tell whether training changed what the model can do"
    )


def write_smallest(detail: TaskDetail, tables: Tables) -> str:
    """Format the smallest difference that a task can show, of shares in percentage points."""
    assert detail.smallest_difference is not None, "checked by the caller"
    metric = detail.find_metric(tables)
    if metric is not None and metric.unit == "share":
        return f"{fmt.number(100 * detail.smallest_difference, 1)}{fmt.NBSP}pp"
    return fmt.number(detail.smallest_difference)


def _build_values(tables: Tables, details: Sequence[TaskDetail]) -> Table:
    rows = [(detail, metric) for detail in details for metric in detail.aggregations]

    def column(heading: str, of: str, **key: str) -> Column[_TaskRow]:
        def show(row: _TaskRow) -> Content:
            detail, name = row
            result = detail.find(tables, metric=name, **key)
            meaning = detail.find_metric(tables, metric=name)
            return show_row(result, meaning, why_not="" if result else "not answered")

        return Column((heading, of), show)

    def name(row: _TaskRow) -> Cell:
        detail, metric = row
        meaning = detail.find_metric(tables, metric=metric)
        direction = "higher" if meaning is None or meaning.higher_is_better else "lower"
        return show_name(
            f"{fmt.clean_name(detail.task, _LONGEST)}: {fmt.clean_name(metric, _LONGEST)}",
            f"{direction} is better",
        )

    def show_smallest(row: _TaskRow) -> Content:
        detail, metric = row
        if metric != detail.headline:
            return ""
        if detail.smallest_difference is None:
            return show_name(fmt.NOT_AVAILABLE, "too few items, or equal answers")
        basis = "" if detail.is_smallest_paired else "for independent models"
        return Cell(write_smallest(detail, tables), detail=basis)

    return make_table(
        f"Benchmark tasks ({fmt.CI})",
        (
            Column(("Task", "metric"), name),
            column("Trained model", "value"),
            column("Base model", "value", model="base"),
            column("Difference", "trained minus base, by item", against="base"),
            Column(("Items show", "smallest difference"), show_smallest),
        ),
        rows,
        shown=_SHOWN,
        notes=(
            "Differences are paired by item: what an item's difficulty does to both models "
            f"cancels. Intervals are {fmt.CI} over the items.",
            "Smallest difference: what a paired test of so many items shows (two-sided, p below "
            "0.05) in 8 of 10 repetitions, if two models differ on as many items as these two. A "
            "smaller difference may exist and not be seen.",
        ),
        compact=True,
    )


def _build_details(details: Sequence[TaskDetail]) -> Table:
    def show_cut(detail: TaskDetail) -> Content:
        trained, base = (detail.num_truncated.get(model, 0) for model in ("trained", "base"))
        return Cell(fmt.count(trained), detail=f"base: {fmt.count(base)}" if base else "")

    def show_forwards(detail: TaskDetail) -> Content:
        decoded = sum(detail.num_decoded_tokens.values())
        cached = [model for model, is_read in detail.is_cached.items() if is_read]
        return Cell(
            fmt.count(sum(detail.num_forwards.values())),
            detail=f"{fmt.count(decoded)} tokens generated" if decoded else "",
            note=f"from the cache: {' and '.join(cached)}" if cached else "",
        )

    return make_table(
        "How the tasks were answered",
        (
            Column("Task", lambda d: show_name(fmt.clean_name(d.task, _LONGEST))),
            Column(
                "Items", lambda d: Cell(fmt.count(d.num_items), detail="limited" if d.limit else "")
            ),
            Column("Version", lambda d: fmt.clean_name(d.version, 40)),
            Column(("Few-shot", "solved examples"), lambda d: fmt.count(d.num_fewshot)),
            Column("Chat template", lambda d: "used" if d.is_chat else "not used"),
            Column(("Prompts cut", "longer than the context"), show_cut),
            Column("Chance", lambda d: "none" if d.chance is None else fmt.percent(d.chance)),
            Column(("Forward passes", "both models"), show_forwards),
            Column(
                "Samples", lambda d: Cell(fmt.hash(d.samples_sha256.get("trained")), kind="hash")
            ),
        ),
        details,
        shown=_SHOWN,
        notes=(
            "Samples: hash of all questions, prompts and targets. Two audits with the same hash "
            "answered the same items.",
        ),
        compact=True,
    )
