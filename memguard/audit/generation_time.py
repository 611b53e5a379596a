"""How long generation takes where each new token needs all weights, measured at its first steps.

    s a token    mean of two steps, the slowest rank's     all rows of a batch share a step
    steps        new tokens of the longest row, summed over the batches of all ranks
    time         s a token x steps

Weights that are sharded over the ranks and do not fit at once are gathered block by block for each
token. That takes seconds on a fast network and hours on a slow one, so the time is said before it
passes, and a limit can refuse it. Scores are measured before, and stay.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from memguard.audit.requests import CannotGenerate
from memguard.runtime import Runtime, format_duration

_MEASURED = 2
"""Steps that are measured, after a first one that also allocates memory."""


@dataclass(kw_only=True, slots=True)
class GenerationLimit:
    """The longest time that the models of an audit generate together."""

    max_minutes: float | None = None
    """None: no limit."""
    say: Callable[[str], None] = lambda _: None
    """Prints a line."""
    spent_s: float = field(default=0.0, init=False)
    """Time that generation has taken, of all models (seconds)."""


@dataclass(kw_only=True, slots=True)
class Pace:
    """Measures the steps of one call of a decoder, on every rank."""

    limit: GenerationLimit
    runtime: Runtime
    num_steps: int
    """Steps of all batches, if no text ends early."""
    _num_done: int = field(default=0, init=False)
    _since_s: float = field(default=0.0, init=False)

    def step(self) -> None:
        """Count a step; every rank calls this after each.

        Raises:
            CannotGenerate: the rest would take longer than the limit allows.
        """
        self._num_done += 1
        if self._num_done == 1:
            self._since_s = self._read_s()
        elif self._num_done == 1 + _MEASURED:
            own_s = (self._read_s() - self._since_s) / _MEASURED
            self._judge(self.runtime.agree_max(round(1e9 * own_s)) / 1e9)

    def _read_s(self) -> float:
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize(self.runtime.device)
        return time.perf_counter()

    def _judge(self, step_s: float) -> None:
        whole_s = step_s * self.num_steps
        text = (
            f"the weights do not fit at once, so they are gathered for each token: {step_s:.2g} s "
            f"a token, at most {self.num_steps:,} tokens one after the other, "
            f"{format_duration(whole_s)} in all"
        )
        most = self.limit.max_minutes
        # All ranks add up the same times of steps, so that they decide alike.
        self.limit.spent_s += whole_s
        if most is not None and self.limit.spent_s > 60 * most:
            self.limit.spent_s -= whole_s
            raise CannotGenerate(
                f"{text}; 'audit.max_generation_minutes' is {most:g} for all models together. Use "
                "a larger x or y, audit fewer documents, or raise the limit"
            )
        self.limit.say(f"audit: generation: {text}")
