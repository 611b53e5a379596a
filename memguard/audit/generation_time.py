"""The limit of the time in which text is generated where each new token needs all weights.

Weights that are sharded over the ranks and do not fit at once are gathered block by block for each
token. That takes seconds on a fast network and minutes on a slow one, so the time is measured while
it passes, the slowest rank's, and generation ends at a limit. Scores are measured before, and stay.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from memguard.audit.requests import LimitReached
from memguard.runtime import Runtime, format_duration

_SAID_AFTER = 3
"""Steps after which the time of a token is said."""


@dataclass(kw_only=True, slots=True)
class GenerationLimit:
    """The longest time that the models of an audit generate together."""

    max_minutes: float | None = None
    """None: no limit."""
    say: Callable[[str], None] = lambda _: None
    """Prints a line."""
    spent_s: float = field(default=0.0, init=False)
    """Time that generation has taken, of all models; the same on every rank (seconds)."""

    def check(self) -> None:
        """Raise LimitReached if the time is spent."""
        most = self.max_minutes
        if most is not None and self.spent_s >= 60 * most:
            raise LimitReached(
                f"the models have generated for {most:g} minutes, which is "
                "'audit.max_generation_minutes', because their weights are gathered for each "
                "token. Raise it, or use a larger x or y; what is cached is not generated again"
            )


@dataclass(kw_only=True, slots=True)
class Clock:
    """Adds the time of one call of a decoder to the limit, on every rank."""

    limit: GenerationLimit
    runtime: Runtime
    _num_done: int = field(default=0, init=False)
    _since_s: float = field(default_factory=time.perf_counter, init=False)

    def begin_batch(self) -> None:
        """Count the time since the last step; every rank calls this before each batch.

        Raises:
            LimitReached: the time is spent.
        """
        self._add()
        self.limit.check()

    def step(self) -> None:
        """Count a step; every rank calls this after each.

        Raises:
            LimitReached: the time is spent.
        """
        step_s = self._add()
        self._num_done += 1
        if self._num_done == _SAID_AFTER:
            most = self.limit.max_minutes
            until = "" if most is None else f"; it ends after {format_duration(60 * most)} in all"
            self.limit.say(
                "audit: generation: the weights do not fit at once, so they are gathered for each "
                f"token: {step_s:.2g} s a token{until}"
            )
        self.limit.check()

    def _add(self) -> float:
        """Add the time since the last call, the slowest rank's, and return it."""
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize(self.runtime.device)
        now_s = time.perf_counter()
        own_s, self._since_s = now_s - self._since_s, now_s
        # One collective: all ranks add up the same times, so that they end together.
        step_s = self.runtime.agree_max(round(1e9 * own_s)) / 1e9
        self.limit.spent_s += step_s
        return step_s
