"""Shows how far an audit is: its work before the first pass, then each stage and the whole."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from memguard.audit.bounds import AuditBounds, WorkMeter
from memguard.audit.context import Stage
from memguard.runtime import Console

_COUNTED = "documents"


class ShowStage(Protocol):
    """Shows how much of a stage is done."""

    def __call__(self, stage: Stage, done: int, total: int, unit: str = _COUNTED) -> None:
        """Take the stage, what is done and all there is, in units: documents, items of a task."""


@contextmanager
def show_progress(
    console: Console, *, has_tasks: bool = False
) -> Iterator[tuple[ShowStage, WorkMeter]]:
    """Yield what an audit calls while it runs.

    Before the first pass one line says how much work it is at most. The progress of each stage
    shows the share of that work that is done; what is not needed of it counts as done when its
    probe ends.

    Args:
        console: of this process.
        has_tasks: whether benchmark tasks run on the models, whose work is not counted.
    """

    def announce(bounds: AuditBounds) -> None:
        tasks = "; the tasks of 'audit.utility' come besides" if has_tasks else ""
        console.info(f"audit: {bounds.describe()}{tasks}")

    meter = WorkMeter(on_bounds=announce)
    with ExitStack() as stack:
        advance: dict[Stage, Any] = {}
        before = 0

        def show(stage: Stage, done: int, total: int, unit: str = _COUNTED) -> None:
            nonlocal before
            if stage not in advance:
                stack.close()
                what = "audit" if stage == "model" else f"audit, {stage}"
                advance[stage] = stack.enter_context(console.progress(what, total, unit))
                before = 0
            share = meter.share if unit == _COUNTED else None
            detail = "" if share is None else f"{int(100 * share)} % of the audit"
            advance[stage](done - before, detail)
            before = done

        yield show, meter
