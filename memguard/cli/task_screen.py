"""Prints the benchmark tasks of a plan: what each asks of a model, and which are not counted."""

from collections.abc import Sequence

import rich.console
from rich.table import Table
from rich.text import Text

from memguard.cli.dry_run_screen import MODEL_NAMES
from memguard.cli.options import Sentence, print_indented, print_title
from memguard.pages import formatting as fmt
from memguard.planner.plan import Plan


def render_tasks(plan: Plan, models: Sequence[str], out: rich.console.Console) -> None:
    """Print the benchmark tasks of a plan; nothing if the run has none.

    Args:
        plan: of a run.
        models: that the run's audit measures.
        out: standard output.
    """
    if not plan.tasks and not plan.tasks_not_counted:
        return
    print_title(out, "Benchmark tasks")
    if plan.tasks:
        _print_counts(plan, [MODEL_NAMES[name] for name in models if name != "reference"], out)
    for task, reason in plan.tasks_not_counted.items():
        line = f"warning: {fmt.clean_name(task)} is not counted: {fmt.clean_text(reason)}"
        print_indented(out, Sentence(line, "yellow"))
    if plan.tasks_not_counted:
        text = (
            "A plan without documents downloads nothing. A plan with documents counts every task, "
            "or ends with the error that would end training."
        )
        print_indented(out, Sentence(text, "dim"))


def _print_counts(plan: Plan, models: Sequence[str], out: rich.console.Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    table.add_column("each model", overflow="fold")
    for name in ("items", "forwards", "tokens", "generated", "minutes"):
        table.add_column(name, justify="right", no_wrap=True)
    for task in plan.tasks:
        counts = (task.num_items, task.num_forwards, task.num_tokens, task.num_decoded_tokens)
        table.add_row(
            Text(fmt.clean_name(task.task)),
            *(f"{number:,}" for number in counts),
            fmt.MISSING if task.minutes is None else _format_minutes(task.minutes),
        )
    print_indented(out, table)
    text = (
        f"On {' and '.join(models)}{', whose minutes are summed' if len(models) > 1 else ''}. A "
        "forward is one row; generated is in tokens, at most. Cached answers need none."
    )
    if all(task.minutes is None for task in plan.tasks):
        text += (
            " The minutes are not predicted: for that a mesh must fit, and the speed of the model "
            "on the machine must be known."
        )
    print_indented(out, Sentence(text, "dim"))


def _format_minutes(minutes: float) -> str:
    return "< 0.1" if minutes < 0.1 else f"{minutes:,.1f}" if minutes < 10 else f"{minutes:,.0f}"
