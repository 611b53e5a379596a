"""Tables of benchmark tasks: each setting's value, and its difference from the first by item."""

from collections.abc import Iterator

from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, Content, make_table, show_name, show_row
from memguard.pages.page import Table
from memguard.records import ComparedRun, ComparedTask, Comparison, ResultRow, TestRow
from memguard.records.utility import UTILITY
from memguard.report.audit_utility import write_smallest
from memguard.report.comparison_utility import say_all_at_chance
from memguard.report.seed_means import label_run, name_first

_MOST_TASKS, _MOST_NAME = 20, 60
_TESTS = {
    "mcnemar": "McNemar's exact test",
    "paired-t": "paired t test",
    "paired-bootstrap": "paired bootstrap",
}


def build_tasks(comparison: Comparison) -> tuple[Table, ...]:
    """Build a table for each task that all runs answered; empty without any."""
    return tuple(_build_task(comparison, task) for task in comparison.tasks[:_MOST_TASKS])


def describe_left_out(comparison: Comparison) -> tuple[str, ...]:
    """Return a sentence for each task that the runs do not share."""
    return tuple(map(fmt.clean_text, comparison.tasks_left_out[:_MOST_TASKS]))


def _build_task(comparison: Comparison, task: ComparedTask) -> Table:
    tables, detail = comparison.tables, task.detail
    metric = detail.find_metric(tables)
    tests = {(test.setting, test.seed): test for test in _list_tests(comparison, task)}
    first = name_first(comparison, 24)
    unit = "share" if task.unit == "share" else ""

    def find(run: ComparedRun, **key: str) -> ResultRow | None:
        return detail.find(tables, setting=run.setting, seed=run.seed, **key)

    def show_value(run: ComparedRun) -> Content:
        return show_row(find(run), metric)

    def show_base(run: ComparedRun) -> Content:
        row = find(run, model="base")
        return show_row(row, metric, why_not="not answered" if row is None else "")

    def show_difference(run: ComparedRun) -> Content:
        if run.setting == comparison.runs[0].setting:
            return "reference"
        row = find(run, against=f"setting:{comparison.runs[0].setting}")
        return show_row(row, metric, unit=unit, why_not="no such seed" if row is None else "")

    def show_p(run: ComparedRun) -> Content:
        test = tests.get((run.setting, run.seed))
        return fmt.MISSING if test is None or test.p_holm is None else fmt.p(test.p_holm)

    def count(own: bool) -> Column[ComparedRun]:
        def show(run: ComparedRun) -> Content:
            test = tests.get((run.setting, run.seed))
            if test is None:
                return fmt.MISSING
            return fmt.count(test.num_only_here if own else test.num_only_against)

        side = "this setting" if own else f"'{first}'"
        return Column((f"Right only under {side}", "items"), show)

    is_counted = any(test.test == "mcnemar" for test in tests.values())
    better = "higher" if task.higher_is_better else "lower"
    columns: tuple[Column[ComparedRun], ...] = (
        Column(
            "Setting",
            lambda run: show_name(label_run(run, comparison)),
            lambda run: show_name("Base model", "before training"),
        ),
        Column(
            (fmt.clean_name(detail.headline, 40), f"{better} is better"),
            show_value,
            show_base,
        ),
        Column((f"Minus '{first}'", f"by item ({fmt.CI})"), show_difference),
        *((count(own=False), count(own=True)) if is_counted else ()),
        Column(("p", "Holm"), show_p),
    )
    return make_table(
        f"Task {fmt.clean_name(detail.task, _MOST_NAME)}, same {fmt.count(detail.num_items)} items",
        columns,
        comparison.runs,
        base=comparison.runs[0],
        notes=tuple(_write_notes(comparison, task, tests)),
    )


def _list_tests(comparison: Comparison, task: ComparedTask) -> list[TestRow]:
    place = (UTILITY, task.detail.headline, task.detail.parameters)
    return [
        test
        for test in comparison.tables.tests
        if (test.probe, test.metric, test.parameters) == place
    ]


def _write_notes(
    comparison: Comparison, task: ComparedTask, tests: dict[tuple[str | None, int | None], TestRow]
) -> Iterator[str]:
    detail = task.detail
    yield (
        f"lm-eval's version {fmt.clean_name(detail.version, 40)} of the task, "
        f"{fmt.count(detail.num_fewshot)} solved examples before each item, chat template "
        f"{'used' if detail.is_chat else 'not used'}."
    )
    kinds = list(dict.fromkeys(test.test for test in tests.values()))
    if kinds:
        names = " or ".join(_TESTS.get(kind, kind) for kind in kinds)
        yield (
            f"p: {names}, two-sided, with Holm's correction over the "
            f"{fmt.count(len(comparison.tables.tests))} tests of this page. A large p means that "
            "these items do not show a difference, not that the settings are equal."
        )
    if detail.smallest_difference is not None:
        other = "its base model" if detail.is_smallest_paired else "an independent model"
        yield (
            f"So many items show a difference of {write_smallest(detail, comparison.tables)} or "
            "more with power 0.8, if two settings differ on as many of them as "
            f"'{name_first(comparison, 24)}' and {other}."
        )
    if _is_at_chance(comparison, task):
        yield say_all_at_chance(fmt.percent(detail.chance))


def _is_at_chance(comparison: Comparison, task: ComparedTask) -> bool:
    if task.detail.chance is None:
        return False
    rows = [
        task.detail.find(comparison.tables, setting=run.setting, seed=run.seed)
        for run in comparison.runs
    ]
    return all(
        row is None or row.ci is None or row.ci[0] <= task.detail.chance <= row.ci[1]
        for row in rows
    )
