"""A call of `memguard.api`: libraries are quiet while it lasts, and a notebook shows one bar.

    running    title, bar of the present step, its detail, last status line, warnings
    finished   title and duration, warnings, the status lines behind a click
    elsewhere  the console's lines on standard error

The output of a notebook is redrawn in place, at most five times a second, and is kept small: of
many lines the last ones are shown. The audits of a `Trainer`'s training share one output.
"""

import html
import importlib
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from memguard.runtime.console import format_duration
from memguard.runtime.display import DISPLAY

_LOGGERS = ("torchao", "bitsandbytes", "torch.utils._pytree")
"""They advise on kernels that this machine cannot use, when transformers imports them."""
_REDRAW_EVERY_S = 0.2
_MOST_LINES = 60
_MOST_WARNINGS = 8
_MOST_CHARACTERS = 240
_MOST_OF_WARNING = 600
_FONT = "font:13px/1.5 system-ui,sans-serif;max-width:60rem;margin:.2rem 0"
_SOFT = "opacity:.72;white-space:pre-wrap"
_WARNING = (
    "margin:.25rem 0;padding:.15rem .6rem;border-left:3px solid #c98a00;overflow-wrap:anywhere"
)
_LINES = (
    "margin:.2rem 0 0;padding:.3rem .6rem;max-height:16rem;overflow:auto;white-space:pre-wrap;"
    "overflow-wrap:anywhere;font:12px/1.5 ui-monospace,monospace"
)


@contextmanager
def python_call(name: str) -> Iterator[None]:
    """Surround a call from Python.

    Args:
        name: of the function, for the title of its bar.
    """
    display = open_display(name)
    with showing_in(display):
        yield
    if display is not None:
        display.end("finished")


def open_display(name: str) -> "NotebookDisplay | None":
    """Return an output of the running cell; None outside of notebooks.

    None also inside another call, as of a callback in training, which has its output already.

    Args:
        name: for the title.
    """
    publish = _find_notebook()
    if publish is None or DISPLAY.get() is not None:
        return None
    return NotebookDisplay(name=name, publish=publish)


@contextmanager
def showing_in(display: "NotebookDisplay | None") -> Iterator[None]:
    """Show lines and progress in an output, and keep libraries quiet; an error ends the output.

    Args:
        display: the output; None changes where the lines go in nothing.
    """
    with _quiet_imports():
        if display is None:
            yield
            return
        token = DISPLAY.set(display)
        try:
            yield
        except BaseException:
            display.end("stopped")
            raise
        finally:
            DISPLAY.reset(token)


def show_card(text: str, html: str) -> None:
    """Show a result below the outputs of the running cell, which must be that of a notebook.

    Args:
        text: one line, where HTML is not shown.
        html: the card.
    """
    publish = _find_notebook()
    if publish is not None:
        publish({"text/html": html, "text/plain": text}, False)


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Silence what libraries say when they are imported; the caller's settings are restored."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        # tqdm, in a notebook without ipywidgets.
        warnings.filterwarnings("ignore", message="IProgress not found")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


Publish = Callable[[dict[str, str], bool], None]
"""(output by MIME type, whether it replaces the one before)."""


def _find_notebook() -> Publish | None:
    """Return what shows an output in the running cell; None outside of notebooks."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    show: Any = importlib.import_module("IPython.display").display
    identity = f"memguard-{time.time_ns()}"

    def publish(output: dict[str, str], is_update: bool) -> None:
        show(output, raw=True, display_id=identity, update=is_update)

    return publish


@dataclass(slots=True)
class _Step:
    """The long step in progress."""

    what: str
    total: int
    unit: str
    detail: str = ""
    done: int = 0
    start_s: float = field(default_factory=time.monotonic)

    def describe(self) -> str:
        """Return what is done, and the time that is left."""
        text = f"{self.what}: {self.done:,} of {self.total:,} {self.unit}"
        took_s = time.monotonic() - self.start_s
        if 0 < self.done < self.total:
            text += f", {format_duration(took_s * (self.total - self.done) / self.done)} left"
        return text


@dataclass(slots=True)
class NotebookDisplay:
    """One output of a cell, redrawn in place."""

    name: str
    publish: Publish
    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    num_lines: int = 0
    ended: str = ""
    step: _Step | None = None
    is_shown: bool = False
    drawn_s: float = 0.0
    start_s: float = field(default_factory=time.monotonic)

    def info(self, text: str) -> None:
        """Show a status line in place of the one before."""
        self.num_lines += 1
        self.lines = [*self.lines, _shorten(text, _MOST_CHARACTERS)][-_MOST_LINES:]
        self._draw()

    def warn(self, text: str) -> None:
        """Show a warning, which stays."""
        self.warnings = [*self.warnings, _shorten(text, _MOST_OF_WARNING)][-_MOST_WARNINGS:]
        self._draw(at_once=True)

    @contextmanager
    def progress(self, what: str, total: int, unit: str) -> Iterator[Callable[[int, str], None]]:
        """Show the bar of a long step; of a step inside another one, that of the inner one."""
        step, outer = _Step(what=what, total=total, unit=unit), self.step

        def advance(done: int, detail: str) -> None:
            step.done += done
            step.detail = _shorten(detail, _MOST_CHARACTERS)
            self._draw()

        self.step = step
        self._draw()
        try:
            yield advance
        finally:
            self.step = outer
            self._draw()

    def end(self, how: str) -> None:
        """Draw the last state: how the call ended, and its lines behind a click."""
        if not self.is_shown:
            return  # There was nothing to say, or an error says all.
        self.step, self.ended = None, how
        self._draw(at_once=True)

    def _draw(self, *, at_once: bool = False) -> None:
        now_s = time.monotonic()
        if self.is_shown and not at_once and now_s - self.drawn_s < _REDRAW_EVERY_S:
            return
        self.publish(
            {"text/html": self._write_html(), "text/plain": self._write_text()}, self.is_shown
        )
        self.is_shown, self.drawn_s = True, now_s

    def _write_title(self) -> str:
        took = format_duration(time.monotonic() - self.start_s)
        how = f"{self.ended} after {took}" if self.ended else took
        return f"memguard {self.name}: {how}"

    def _write_text(self) -> str:
        last = self.lines[-1:] if not self.ended else []
        step = [] if self.step is None else [self.step.describe(), self.step.detail]
        warned = [f"warning: {text}" for text in self.warnings]
        return "\n".join(filter(None, [self._write_title(), *step, *last, *warned]))

    def _write_html(self) -> str:
        parts = [f"<b>{html.escape(self._write_title())}</b>"]
        if self.step is not None:
            parts += self._draw_step(self.step)
        elif not self.ended and self.lines:
            parts.append(f'<div style="{_SOFT}">{html.escape(self.lines[-1])}</div>')
        for text in self.warnings:
            parts.append(f'<div style="{_WARNING}"><b>Warning.</b> {html.escape(text)}</div>')
        if self.ended and self.lines:
            left_out = self.num_lines - len(self.lines)
            label = f"{self.num_lines:,} line{'' if self.num_lines == 1 else 's'} of progress"
            label += f" (the last {len(self.lines)})" if left_out else ""
            listed = html.escape("\n".join(self.lines))
            parts.append(
                f'<details><summary style="cursor:pointer;{_SOFT}">{label}</summary>'
                f'<pre style="{_LINES}">{listed}</pre></details>'
            )
        return f'<div style="{_FONT}">{"".join(parts)}</div>'

    def _draw_step(self, step: _Step) -> Iterator[str]:
        yield (
            '<div style="display:flex;gap:.7rem;align-items:center;flex-wrap:wrap">'
            f'<progress max="{max(step.total, 1)}" value="{step.done}" style="width:16rem">'
            f"</progress><span>{html.escape(step.describe())}</span></div>"
        )
        if step.detail:
            yield f'<div style="{_SOFT}">{html.escape(step.detail)}</div>'


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
