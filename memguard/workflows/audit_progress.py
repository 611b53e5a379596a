"""Shows how far an audit is: its work before the first pass, then each stage and the whole."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from memguard.audit.bounds import AuditBounds, WorkMeter
from memguard.audit.context import OnProgress, Stage
from memguard.runtime import Console


@contextmanager
def show_progress(
    console: Console, *, has_variants: bool = False
) -> Iterator[tuple[OnProgress, WorkMeter]]:
    """Yield what an audit calls while it runs.

    Before the first pass one line says how much work it is at most. The progress of each stage
    shows the share of that work that is done; what is not needed of it counts as done when its
    probe ends.

    Args:
        console: of this process.
        has_variants: whether variants are audited afterwards, whose work is not counted.
    """

    def announce(bounds: AuditBounds) -> None:
        also = "; the variants come after that" if has_variants else ""
        console.info(f"audit: {bounds.describe()}{also}")

    meter = WorkMeter(on_bounds=announce)
    with ExitStack() as stack:
        advance: dict[Stage, Any] = {}
        before = 0

        def show(stage: Stage, done: int, total: int) -> None:
            nonlocal before
            if stage not in advance:
                stack.close()
                what = "audit" if stage == "model" else f"audit, {stage}"
                advance[stage] = stack.enter_context(console.progress(what, total, "documents"))
                before = 0
            share = meter.share
            detail = "" if share is None else f"{int(100 * share)} % of the audit"
            advance[stage](done - before, detail)
            before = done

        yield show, meter
