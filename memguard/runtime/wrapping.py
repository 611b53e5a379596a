"""Wraps text between words for a terminal, which would cut them."""

import re
import textwrap
from typing import TextIO

import rich.console

_BEFORE_PERCENT, _NO_BREAK = re.compile(r"(?<=[0-9]) (?=%)"), "\u00a0"


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


def wrap_for(file: TextIO, text: str) -> str:
    """Wrap a text as `Console` does if ``file`` is a terminal, which would cut words."""
    if not file.isatty():
        return text
    return wrap_words(text, rich.console.Console(file=file).width, indent="  ")
