"""The utility that a comparison chose, held-out loss or a task; and the tables of benchmark tasks.

                 value      change from the first setting     axis of the chart
held-out loss    4.372      +2.1 %     relative               % of the first one's loss
share of items   41.0 %     -2.5 pp    percentage points      percentage points
other values     62.14      +1.31      in the metric's unit   the metric's unit
"""

from collections.abc import Iterator

from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, Content, make_table, show_name, show_row
from memguard.pages.page import Table
from memguard.records import (
    ComparedRun,
    ComparedTask,
    Comparison,
    FrontPoint,
    Interval,
    ResultRow,
    TestRow,
    Utility,
)
from memguard.records.comparison import find_change
from memguard.records.utility import UTILITY
from memguard.report.audit_training import write_smallest
from memguard.report.seed_means import Setting, compute_change, label_run, name_first

_MOST_NAME = 40


def name_utility(utility: Utility) -> str:
    """Return the utility in a sentence: ``held-out loss``, ``acc of task 'arc_easy'``."""
    return fmt.clean_name(utility.spoken, 2 * _MOST_NAME)


def head_utility(comparison: Comparison) -> tuple[str, str]:
    """Return the heading of its column, and the line below it."""
    utility, first = comparison.utility, name_first(comparison, 12)
    if not utility.is_task:
        return utility.heading, f"nats; from '{first}'"
    better = name_direction(utility)
    return fmt.clean_name(utility.heading, _MOST_NAME), f"{better}; from '{first}'"


def write_value(value: float | None, utility: Utility) -> str:
    """Format a value."""
    return fmt.percent(value) if utility.is_share else fmt.number(value)


def find_difference(point: FrontPoint, comparison: Comparison) -> float | None:
    """Return the change from the first setting, relative of a loss; None if it has none."""
    first = comparison.front[0]
    if comparison.utility.is_task:
        return point.utility - first.utility
    return fmt.relative_change(point.utility, first.utility)


def write_difference(value: float | None, utility: Utility) -> str:
    """Format a change from the first setting."""
    if not utility.is_task:
        return fmt.change(value)
    if value is None:
        return fmt.MISSING
    interval = Interval(value=value, ci=None)
    return (fmt.points if utility.is_share else fmt.difference)(interval).value


def write_ends(row: ResultRow | None, utility: Utility) -> str:
    """Format the interval of a change; "" without one."""
    if row is None or row.ci is None:
        return ""
    if not utility.is_task:
        return fmt.change_range(row)
    return (fmt.points if utility.is_share else fmt.difference)(row).interval


def describe_setting_utility(setting: Setting) -> tuple[str, str, str]:
    """Return a setting's value, its change from the first one, and the interval of the change."""
    point, comparison = setting.point, setting.comparison
    assert point is not None, "only for settings, not for the base model"
    utility = comparison.utility
    row = find_change(comparison.tables, point.name, utility)
    change = find_difference(point, comparison) if utility.is_task else compute_change(setting)
    return (
        write_value(point.utility, utility),
        write_difference(change, utility),
        write_ends(row, utility),
    )


def find_base_difference(comparison: Comparison) -> float | None:
    """Return the base model's difference from the first setting; None if it was not measured."""
    first, utility = comparison.runs[0].setting, comparison.utility
    base, trained = (
        comparison.find_mean(utility, first, "base"),
        comparison.find_mean(utility, first),
    )
    if base is None or trained is None:
        return None
    return base - trained if utility.is_task else fmt.relative_change(base, trained)


def scale(utility: Utility) -> float:
    """Return what a change is multiplied with on the axis of the chart."""
    return 1.0 if utility.is_task and not utility.is_share else 100.0


def label_axis(comparison: Comparison, limit: int) -> str:
    """Return the label of the chart's axis."""
    utility, first = comparison.utility, name_first(comparison, limit)
    if not utility.is_task:
        return f"held-out loss relative to {first} (%)"
    unit = " (percentage points)" if utility.is_share else ""
    return f"{fmt.clean_name(utility.heading, 32)} minus {first}{unit}"


def name_direction(utility: Utility | ComparedTask) -> str:
    """Return which direction is better."""
    return "higher is better" if utility.higher_is_better else "lower is better"


def describe_axis(utility: Utility) -> str:
    """Return the sentences of the caption that depend on the utility."""
    corner = "right" if utility.higher_is_better else "left"
    if not utility.is_task:
        return (
            f"Lower {corner} is better. Lines through points are 95{fmt.PERCENT} intervals: of the "
            "risk over documents and seeds, of the loss over seeds relative to the first setting "
            "(none for one seed)."
        )
    return (
        f"Utility is the {name_utility(utility)}, on {fmt.count(utility.num_items)} items. Lower "
        f"{corner} is better. Lines through points are 95{fmt.PERCENT} intervals: of the risk over "
        "documents and seeds, of the task over items, paired with the first setting, and seeds."
    )


def describe_beyond_base(utility: Utility) -> str:
    """Return what a setting beyond the base model's line means."""
    if not utility.is_task:
        return (
            "A setting to the right of the base model is worse on held-out documents than before "
            "training."
        )
    side = "left" if utility.higher_is_better else "right"
    return f"A setting to the {side} of the base model is worse at the task than before training."


def describe_chance(comparison: Comparison) -> str:
    """Return a warning if the task does not show a difference from chance; "" otherwise."""
    at_chance = [point for point in comparison.front if point.is_at_chance]
    if not at_chance:
        return ""
    chance = write_value(comparison.utility.chance or 0.0, comparison.utility)
    if len(at_chance) == len(comparison.front):
        return say_all_at_chance(chance)
    names = ", ".join(f"'{fmt.clean_name(point.name)}'" for point in at_chance)
    return f"At chance ({chance} within the interval): {names}."


def say_all_at_chance(chance: str) -> str:
    """Return the sentence for a task at which no setting differs from chance."""
    return (
        f"Every setting is at chance ({chance} within the interval): this task cannot tell "
        "whether utility is kept."
    )


_LONGEST_TASK = 60
_TESTS = {
    "mcnemar": "McNemar's exact test",
    "paired-t": "paired t test",
    "paired-bootstrap": "paired bootstrap",
}


def build_task(comparison: Comparison, task: ComparedTask) -> Table:
    """Build the table of a task that all runs answered."""
    tables, detail = comparison.tables, task.detail
    metric = detail.find_metric(tables)
    place = (UTILITY, detail.headline, detail.parameters)
    tests = {
        (test.setting, test.seed): test
        for test in tables.tests
        if (test.probe, test.metric, test.parameters) == place
    }
    first = name_first(comparison, 24)
    unit = "share" if task.unit == "share" else ""

    def find(run: ComparedRun, **key: str) -> ResultRow | None:
        return detail.find(tables, setting=run.setting, seed=run.seed, **key)

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
    columns: tuple[Column[ComparedRun], ...] = (
        Column(
            "Setting",
            lambda run: show_name(label_run(run, comparison)),
            lambda run: show_name("Base model", "before training"),
        ),
        Column(
            (fmt.clean_name(detail.headline, 40), name_direction(task)),
            lambda run: show_row(find(run), metric),
            show_base,
        ),
        Column((f"Minus '{first}'", f"by item ({fmt.CI})"), show_difference),
        *((count(own=False), count(own=True)) if is_counted else ()),
        Column(("p", "Holm"), show_p),
    )
    return make_table(
        f"Task {fmt.clean_name(detail.task, _LONGEST_TASK)}, same "
        f"{fmt.count(detail.num_items)} items",
        columns,
        comparison.runs,
        base=comparison.runs[0],
        notes=tuple(_write_notes(comparison, task, tests)),
    )


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
    chance, tables = task.detail.chance, comparison.tables
    rows = (task.detail.find(tables, setting=run.setting, seed=run.seed) for run in comparison.runs)
    return chance is not None and all(
        row is None or row.ci is None or row.ci[0] <= chance <= row.ci[1] for row in rows
    )
