"""The console: a live line on a terminal, log lines elsewhere. Only rank 0 prints."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import rich.console
import rich.progress
from rich.table import Column

_LINE_EVERY_S = 10.0

Advance = Callable[[int, str], None]
"""(units done since the last call, detail to show)."""


def _is_another_rank() -> bool:
    return "LOCAL_RANK" in os.environ and int(os.environ.get("RANK") or 0) > 0


@dataclass(frozen=True, slots=True)
class Console:
    """Prints on standard error; silent on ranks other than 0."""

    out: rich.console.Console = field(
        default_factory=lambda: rich.console.Console(stderr=True, highlight=False)
    )
    # Read from the environment, because it prints before the process group exists.
    quiet: bool = field(default_factory=_is_another_rank)

    @property
    def live(self) -> bool:
        """Whether a line can be redrawn in place."""
        return self.out.is_terminal and not self.out.is_dumb_terminal and not self.quiet

    def info(self, text: str) -> None:
        """Print a status line."""
        if not self.quiet:
            self.out.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning; the run continues."""
        if not self.quiet:
            self.out.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Print how long a phase took, unless it fails."""
        start_s = time.monotonic()
        yield
        self.info(f"time: {name} {format_duration(time.monotonic() - start_s)}")

    @contextmanager
    def progress(self, what: str, total: int, unit: str) -> Iterator[Advance]:
        """Show progress of a long step: a bar on a terminal, a line every ten seconds elsewhere.

        Args:
            what: e.g. ``"audit"``.
            total: number of units in total.
            unit: e.g. ``"documents"``.
        """
        if self.live:
            columns = (
                rich.progress.TextColumn("{task.description}"),
                # The first column to shrink on a narrow terminal.
                rich.progress.BarColumn(bar_width=None, table_column=Column(max_width=24)),
                rich.progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
                rich.progress.TextColumn("{task.fields[detail]}", markup=False),
                rich.progress.TimeRemainingColumn(compact=True),
            )
            with rich.progress.Progress(*columns, console=self.out) as bar:
                task = bar.add_task(what, total=total, detail=unit)
                yield lambda done, detail: bar.update(task, advance=done, detail=detail or unit)
            return
        state = _LineState(what=what, total=total, unit=unit, say=self.info)
        yield state.advance
        if state.lines_said:
            state.say_line("done")


@dataclass(slots=True)
class _LineState:
    """Progress as occasional lines, for logs and pipes."""

    what: str
    total: int
    unit: str
    say: Callable[[str], None]
    done: int = 0
    lines_said: int = 0
    last_s: float = field(default_factory=lambda: time.monotonic())
    start_s: float = field(default_factory=lambda: time.monotonic())

    def advance(self, done: int, detail: str) -> None:
        self.done += done
        if time.monotonic() - self.last_s >= _LINE_EVERY_S:
            self.say_line(detail)

    def say_line(self, detail: str) -> None:
        self.last_s = time.monotonic()
        self.lines_said += 1
        rate = self.done / max(self.last_s - self.start_s, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        eta = f", {format_duration(left)} left" if 0 < left < 1e7 else ""
        note = f" ({detail})" if detail else ""
        self.say(f"{self.what}: {self.done:,} of {self.total:,} {self.unit}{eta}{note}")


def format_duration(seconds: float) -> str:
    """Write seconds as ``45 s``, ``3:05 min`` or ``2:03 h``."""
    whole = max(0, round(seconds))
    if whole < 90:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 90:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"
