"""Where the lines of a call go instead of standard error: a notebook shows one bar for all."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Protocol


class Display(Protocol):
    """Shows what a call does; `Console` hands its lines and progress to it."""

    def info(self, text: str) -> None:
        """Show a status line."""

    def warn(self, text: str) -> None:
        """Show a warning, which stays visible."""

    def progress(
        self, what: str, total: int, unit: str
    ) -> AbstractContextManager[Callable[[int, str], None]]:
        """Show the progress of a long step; see `Console.progress`."""


DISPLAY: ContextVar[Display | None] = ContextVar("memguard_display", default=None)
"""That of the call in progress; None: lines on standard error."""
