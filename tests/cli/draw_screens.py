"""Draws what commands show, with fixed numbers and a clock that is moved by hand.

`python draw_screens.py` draws on standard error and goes on until its standard input ends.
"""

import sys
import time
from dataclasses import dataclass

import rich.console

from memguard.runtime import Console, console
from memguard.train.metrics import StepMetrics
from memguard.workflows.sweep import RunProgress, show_run


@dataclass
class Clock:
    """Seconds that pass only by hand, in place of `time`."""

    now_s: float = 0.0

    def monotonic(self) -> float:
        return self.now_s


def make_step(step: int, num_steps: int, elapsed_s: float) -> StepMetrics:
    return StepMetrics(
        step=step,
        num_steps=num_steps,
        loss=10.1234,
        lr=1.25e-5,
        grad_norm=12.345,
        num_rows=16,
        num_supervised_tokens=16_384,
        num_kept_tokens=16_384,
        tokens_per_s=123_456.7,
        peak_memory_bytes=12 * 2**30,
        elapsed_s=elapsed_s,
    )


RUNS = {
    "plain": RunProgress(step=make_step(150, 220, 75.0), tokens_per_s=1234.5, line="step 150/220"),
    "goldfish-k4-with-a-long-name": RunProgress(
        step=make_step(1500, 22_000, 75.0), tokens_per_s=123.4, line="step 1500/22000  loss"
    ),
    "dedup": RunProgress(
        step=make_step(220, 220, 110.0),
        tokens_per_s=0.0,
        line="audit: 20 of 100 documents, 40 s left",
    ),
    "new": RunProgress(step=None, tokens_per_s=0.0, line="documents: reading texts.jsonl"),
}


def draw() -> None:
    clock = Clock()
    console.time = clock  # type: ignore[attr-defined]
    shown = Console(rich.console.Console(stderr=True, highlight=False, get_time=clock.monotonic))
    with shown.progress("tokenise", 60, "documents") as advance:
        for done in (0, 20, 40, 60):
            clock.now_s += 5
            advance(20 if done else 0, "")
    with shown.progress("train", 250_000, "steps") as advance:
        for step, added in ((5_000, 5_000), (10_000, 5_000), (12_345, 2_345)):
            clock.now_s += 40
            line = make_step(step, 250_000, clock.now_s)
            if shown.live:
                advance(added, line.describe_briefly(1_234_567.8, width=shown.width))
            shown.info(line.describe(1_234_567.8, width=shown.width))
    draw_rows(shown, clock)


def draw_rows(shown: Console, clock: Clock) -> None:
    """Draw the rows of a sweep, below the bar of training: a screen has room for both."""
    with shown.rows() as rows:
        for _ in range(2):
            for name, progress in RUNS.items():
                show_run(rows, name, progress, shown.width)
            clock.now_s += 21
        if rows.is_live:
            time.sleep(0.5)  # The display is redrawn ten times a second.
        if sys.stdout.isatty():
            print("drawn", flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    draw()
