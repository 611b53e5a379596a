"""Decides which step's weights a run ends with, and when held-out loss ends it early.

    budget            export   weights of
    kept, or none     last     the last step
    kept, or none     best     the step with the lowest held-out loss
    exceeded (stop)   last     the last audited step within the limit
    exceeded (stop)   best     the same, or the step with the lowest held-out loss if it came before

The losses are those of metrics.jsonl, so a resumed run decides as one that was not interrupted.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from memguard.records import KeptBy
from memguard.train.metrics import HeldoutMetrics, MetricsLine


@dataclass(slots=True)
class HeldoutLosses:
    """Losses on held-out documents after each measured step (nats a token)."""

    nll_by_step: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of_log(cls, lines: Iterable[MetricsLine]) -> "HeldoutLosses":
        """Return the losses of a log."""
        return cls({line.step: line.nll for line in lines if isinstance(line, HeldoutMetrics)})

    @property
    def best_step(self) -> int | None:
        """The trained step with the lowest loss, the first of equal ones; None if there is none."""
        trained = [step for step in self.nll_by_step if step > 0]
        return min(trained, key=lambda step: (self.nll_by_step[step], step), default=None)

    @property
    def num_worse(self) -> int:
        """Measurements after that of the lowest loss."""
        return sum(step > (self.best_step or 0) for step in self.nll_by_step)


def choose_step(
    last_step: int,
    losses: HeldoutLosses,
    *,
    export: Literal["last", "best"],
    last_good_step: int | None = None,
) -> tuple[int, KeptBy]:
    """Return the step whose weights are exported, and why.

    ``last_good_step`` is the last one within a budget that was exceeded; None if none was.
    """
    within = last_step if last_good_step is None else last_good_step
    if export == "best" and (best := losses.best_step) is not None and best <= within:
        return best, "heldout"
    return within, "last" if last_good_step is None else "budget"
