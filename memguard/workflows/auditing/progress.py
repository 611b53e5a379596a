"""Shows how much of each stage of an audit is done."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from memguard.audit.context import Stage
from memguard.runtime import Console

_COUNTED = "documents"


class ShowStage(Protocol):
    """Shows how much of a stage is done."""

    def __call__(self, stage: Stage, done: int, total: int, unit: str = _COUNTED) -> None:
        """Take the stage, what is done and all there is, in units: documents, items of a task."""


@contextmanager
def show_progress(console: Console) -> Iterator[ShowStage]:
    """Yield what an audit calls while it runs.

    Args:
        console: of this process.
    """
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
            advance[stage](done - before, "")
            before = done

        yield show
