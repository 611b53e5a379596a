"""The console: a live line on a terminal, a bar in a notebook, log lines elsewhere; rank 0 only."""

import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import rich.console
import rich.progress
from rich.table import Column

from memguard.errors import spell_controls
from memguard.runtime.children import own_rank

_FIRST_LINE_S = 3.0
_LINE_EVERY_S = 10.0
_ROW_LINE_EVERY_S = 20.0
_BAR_EVERY_S = 1.0
_BEFORE_PERCENT, _NO_BREAK = re.compile(r"(?<=[0-9]) (?=%)"), "\u00a0"
_SPEED_OVER_S = 3600.0
"""The time left is estimated from this period; rich's 30 s are too short for slow steps."""

Advance = Callable[[int, str], None]
"""(units done since the last call, detail to show); with 0 units a line is shown if one is due."""


def is_notebook() -> bool:
    """Return whether this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


@dataclass(frozen=True, slots=True)
class Console:
    """Prints on standard error; silent on ranks other than 0."""

    out: rich.console.Console = field(
        default_factory=lambda: rich.console.Console(stderr=True, highlight=False)
    )
    # Read from the environment, because it prints before the process group exists.
    quiet: bool = field(default_factory=lambda: own_rank() > 0)
    in_notebook: bool = field(default_factory=lambda: is_notebook())

    @property
    def live(self) -> bool:
        """Whether a line can be redrawn in place."""
        if self.quiet:
            return False
        return self.in_notebook or (self.out.is_terminal and not self.out.is_dumb_terminal)

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None for a file or a pipe, where no line wraps."""
        return self.out.width if self.out.is_terminal else None

    def info(self, text: str) -> None:
        """Print a status line."""
        self._print(text)

    def warn(self, text: str) -> None:
        """Print a warning; the run continues."""
        self._print(f"warning: {text}", style="yellow")

    def _print(self, text: str, *, style: str | None = None) -> None:
        if self.quiet:
            return
        text = "\n".join(map(spell_controls, text.split("\n")))
        if self.in_notebook:
            from tqdm.auto import tqdm

            # Above the bar; rich would make an output of its own of each line.
            tqdm.write(text, file=sys.stderr)
            return
        if self.width is not None:  # A terminal would cut words; paths stay in one piece.
            text = wrap_words(text, self.width, indent="  ")
        self.out.print(text, style=style, markup=False, emoji=False, soft_wrap=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Print how long a phase took, unless it fails."""
        start_s = time.monotonic()
        yield
        self.info(f"time: {name} {format_duration(time.monotonic() - start_s)}")

    @contextmanager
    def progress(self, what: str, total: int, unit: str) -> Iterator[Advance]:
        """Show progress of a long step: a bar on a terminal and in a notebook, else a few lines.

        The first line comes after three seconds, the others every ten seconds.
        """
        if self.in_notebook and not self.quiet:
            from tqdm.auto import tqdm

            # A notebook is stored with each drawing of a bar that has no widget.
            with tqdm(
                total=total, desc=what, unit=f" {unit}", leave=False, mininterval=_BAR_EVERY_S
            ) as notebook_bar:

                def advance(done: int, detail: str) -> None:
                    notebook_bar.set_postfix_str(detail, refresh=False)
                    notebook_bar.update(done)

                yield advance
            return
        if self.live:
            columns = (
                rich.progress.TextColumn("{task.description}"),
                # The first column to shrink on a narrow terminal.
                rich.progress.BarColumn(bar_width=None, table_column=Column(max_width=24)),
                rich.progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
                rich.progress.TextColumn(
                    "{task.fields[detail]}", markup=False, table_column=Column(no_wrap=True)
                ),
                rich.progress.TimeRemainingColumn(
                    compact=True, table_column=Column(no_wrap=True, min_width=5)
                ),
            )
            with rich.progress.Progress(
                *columns, console=self.out, speed_estimate_period=_SPEED_OVER_S
            ) as bar:
                task = bar.add_task(what, total=total, detail=unit)
                yield lambda done, detail: bar.update(task, advance=done, detail=detail or unit)
            return
        state = _LineState(what=what, total=total, unit=unit, say=self.info, width=self.width)
        yield state.advance
        if state.lines_said:
            state.say_line("done")

    @contextmanager
    def rows(self) -> Iterator["Rows"]:
        """Show what several processes do: a row for each on a terminal, lines elsewhere."""
        if not self.live or self.in_notebook:
            yield Rows(self, None)
            return
        is_wide = self.out.width >= 110
        name = Column(no_wrap=True, max_width=30 if is_wide else 16)
        columns = (
            rich.progress.TextColumn("{task.description}", markup=False, table_column=name),
            rich.progress.BarColumn(
                bar_width=None, table_column=Column(max_width=16 if is_wide else 8)
            ),
            rich.progress.TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True)),
            rich.progress.TextColumn(
                "{task.fields[detail]}", markup=False, table_column=Column(no_wrap=True, ratio=1)
            ),
        )
        with rich.progress.Progress(*columns, console=self.out, expand=True) as bars:
            yield Rows(self, bars)


class Rows:
    """Rows of `Console.rows`, by name."""

    def __init__(self, console: Console, bars: rich.progress.Progress | None) -> None:
        self._console, self._bars = console, bars
        self._tasks: dict[str, rich.progress.TaskID] = {}
        self._said: dict[str, tuple[float, str]] = {}

    @property
    def is_live(self) -> bool:
        """Whether rows are redrawn in place."""
        return self._bars is not None

    def show(self, name: str, detail: str, *, done: int = 0, total: int | None = None) -> None:
        """Show what a process does; as a line every twenty seconds if it has changed.

        ``total`` is None if it is not known.
        """
        if self._bars is None:
            now_s = time.monotonic()
            # A row begins as if it had been said already: short work says nothing.
            last_s, last = self._said.setdefault(name, (now_s, ""))
            if detail not in ("", last) and now_s - last_s >= _ROW_LINE_EVERY_S:
                self._said[name] = now_s, detail
                self._console.info(f"{name}: {detail}")
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=None, count="", detail="")
        count = "" if total is None else f"{done}/{total}"
        self._bars.update(
            self._tasks[name], completed=done, total=total, count=count, detail=detail
        )

    def remove(self, name: str) -> None:
        """Remove the row of a process that has ended."""
        self._said.pop(name, None)
        if self._bars is not None and name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))


@dataclass(slots=True)
class _LineState:
    """Progress as occasional lines, for logs and pipes."""

    what: str
    total: int
    unit: str
    say: Callable[[str], None]
    width: int | None
    done: int = 0
    lines_said: int = 0
    start_s: float = field(default_factory=lambda: time.monotonic())
    last_s: float = 0.0

    def advance(self, done: int, detail: str) -> None:
        self.done += done
        now_s = time.monotonic()
        is_due = now_s - self.last_s >= _LINE_EVERY_S
        if not self.lines_said:
            is_due = now_s - self.start_s >= _FIRST_LINE_S
        if is_due:
            self.say_line(detail)

    def say_line(self, detail: str) -> None:
        self.last_s = time.monotonic()
        self.lines_said += 1
        rate = self.done / max(self.last_s - self.start_s, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        eta = f", {format_duration(left)} left" if 0 < left < 1e7 else ""
        line = f"{self.what}: {self.done:,} of {self.total:,} {self.unit}{eta}"
        note = f" ({detail})" if detail else ""
        self.say(line if self.width is not None and len(line + note) > self.width else line + note)


def wrap_words(text: str, width: int, *, indent: str = "") -> str:
    """Wrap lines between words; a number and its per-cent sign stay on one line.

    No-break spaces become plain ones, which any encoding has. A longer word has a line of its own.
    """
    wrapper = textwrap.TextWrapper(
        width=width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    lines = _BEFORE_PERCENT.sub(_NO_BREAK, text).split("\n")
    wrapped = (line if len(line) <= width else wrapper.fill(line) for line in lines)
    return "\n".join(wrapped).replace(_NO_BREAK, " ")


def format_duration(seconds: float) -> str:
    """Write seconds as ``45 s``, ``3:05 min`` or ``2:03 h``."""
    whole = max(0, round(seconds))
    if whole < 90:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 90:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"
