"""The section "Utility": benchmark tasks on the trained and the base model, from the report alone.

A small task cannot show a small difference, and one that both models answer at random shows nothing
of what training changed. Both are said beside the numbers, on the page and in the terminal.
"""

from collections.abc import Sequence

from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, Content, make_table, show_name, show_row
from memguard.pages.page import Cell, Section, Table
from memguard.records import AuditReport, Tables
from memguard.records.utility import TaskDetail, UtilityModel, list_task_details

_MOST_TASKS, _SHOWN = 60, 12
_MOST_NAME = 60
_TaskRow = tuple[TaskDetail, str]
"""A task and one of its metrics."""


def build_utility(report: AuditReport) -> Section | None:
    """Build the section; None if no task ran."""
    details = list_task_details(report.tables)[:_MOST_TASKS]
    if not details:
        return None
    return Section(
        key="utility",
        title="Utility",
        short_title="Utility",
        lead=(
            "Benchmark tasks of lm-eval, answered by the trained model and by the base model. They "
            "measure what the model can do; they have no part in the verdict.",
            *_describe_chance(details),
        ),
        tables=(_build_values(report.tables, details), _build_details(details)),
    )


def describe_utility(tables: Tables) -> list[str]:
    """Return one line for each task, for the terminal: values, difference, and what it can tell.

    Args:
        tables: of an audit; without tasks there are no lines.
    """
    return [_describe_task(detail, tables) for detail in list_task_details(tables)]


def _describe_task(detail: TaskDetail, tables: Tables) -> str:
    name = fmt.clean_name(detail.task, _MOST_NAME)
    metric = detail.find_metric(tables)
    of_model, of_base, change = (
        detail.find(tables, **key) for key in ({}, {"model": "base"}, {"against": "base"})
    )

    def write(cell: Cell) -> str:
        return f"{cell.text} ({cell.detail})" if cell.detail else cell.text

    headline = fmt.clean_name(detail.headline, _MOST_NAME)
    text = f"{name}: {headline} {write(show_row(of_model, metric))}"
    if of_base is not None:
        text += f", base model {write(show_row(of_base, metric))}"
    if change is not None and change.is_known:
        text += f", difference {write(show_row(change, metric))}"
    items = f"{detail.num_items:,} item{'' if detail.num_items == 1 else 's'}"
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


def _describe_chance(details: Sequence[TaskDetail]) -> tuple[str, ...]:
    return tuple(
        f"{fmt.clean_name(detail.task, _MOST_NAME)}: {_say_at_chance(detail)}."
        for detail in details
        if detail.is_at_chance
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
            f"{fmt.clean_name(detail.task, _MOST_NAME)}: {fmt.clean_name(metric, _MOST_NAME)}",
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
        return Cell(
            fmt.count(sum(detail.num_forwards.values())),
            detail=f"{fmt.count(decoded)} tokens generated" if decoded else "",
            note=_describe_cached(detail),
        )

    def show_items(detail: TaskDetail) -> Content:
        limited = "" if detail.limit is None else "limited"
        return Cell(fmt.count(detail.num_items), detail=limited)

    return make_table(
        "How the tasks were answered",
        (
            Column("Task", lambda d: show_name(fmt.clean_name(d.task, _MOST_NAME))),
            Column("Items", show_items),
            Column("Version", lambda d: fmt.clean_name(d.version, 40)),
            Column(("Few-shot", "solved examples"), lambda d: fmt.count(d.num_fewshot)),
            Column("Chat template", lambda d: "used" if d.is_chat else "not used"),
            Column(("Prompts cut", "longer than the context"), show_cut),
            Column("Chance", lambda d: "none" if d.chance is None else fmt.percent(d.chance)),
            Column(("Forward passes", "both models"), show_forwards),
            Column(
                "Samples",
                lambda d: Cell(fmt.hash(d.samples_sha256.get("trained")), kind="hash"),
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


def _describe_cached(detail: TaskDetail) -> str:
    cached: list[UtilityModel] = [model for model, is_read in detail.is_cached.items() if is_read]
    return f"from the cache: {' and '.join(cached)}" if cached else ""
