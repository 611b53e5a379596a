"""Failures of a rank in training, put into the processes that `fault_runs.start_command` forks.

kill_at      a rank kills itself in a step, once or in every attempt
make_nan     the loss of a rank's rows becomes NaN in a step, once or in every attempt
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from memguard.runtime.children import own_rank


def kill_at(step: int, rank: int, done: Path | None) -> None:
    """Kill a rank in a step; ``done`` is a file that says that it was; None kills every time."""

    def strike(self: Any, number: int) -> None:
        if own_rank() == rank and number == step and _is_due(done):
            os.kill(os.getpid(), signal.SIGKILL)

    _before_steps(strike)


def make_nan(step: int, rank: int, done: Path | None) -> None:
    """Make a rank's loss NaN in a step, as `kill_at` does."""

    def spoil(self: Any, number: int) -> None:
        if own_rank() != rank or number != step or not _is_due(done):
            return
        sum_loss = self._sum_loss

        def sum_to_nan(batch: Any, rows: slice) -> Any:
            np.savez("spoiled.npz", input_ids=batch.input_ids, document_ids=batch.document_ids)
            parts = sum_loss(batch, rows)
            return parts._replace(loss=parts.loss * float("nan"))

        self._sum_loss = sum_to_nan

    _before_steps(spoil)


def _is_due(done: Path | None) -> bool:
    if done is None:
        return True
    if done.exists():
        return False
    done.touch()
    return True


def _before_steps(strike: Callable[[Any, int], None]) -> None:
    from memguard.train.step import TrainStep

    run = TrainStep.run

    def run_struck(self: Any, *given: Any, step: int, **options: Any) -> Any:
        strike(self, step)
        return run(self, *given, step=step, **options)

    TrainStep.run = run_struck  # type: ignore[assignment]
