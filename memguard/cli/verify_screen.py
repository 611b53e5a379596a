"""`memguard verify` as text: one line a part, and what mends it; coloured on a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import rich.console
from rich.table import Table
from rich.text import Text

from memguard.report import formatting as fmt
from memguard.workflows.verify import OnRead, Part, State, Verified, format_bytes

_STYLES: dict[State, str] = {"whole": "green", "damaged": "bold red", "not there yet": "dim"}
_SAID_FROM_BYTES = 1_000_000_000
"""Where nothing can be drawn again and again, a line is worth its place for so much."""
_NAME, _STATE = 13, 15
"""Widths of the columns."""
_MOST_DAMAGES = 20
"""Lines for one part."""


@contextmanager
def shown_reading() -> Iterator[OnRead]:
    """Yield a function that says, on standard error, what is read next."""
    err = rich.console.Console(stderr=True, highlight=False)
    if err.is_terminal and not err.is_dumb_terminal:
        with err.status("verify") as status:
            yield lambda name, size: status.update(_say(name, size))
        return

    def say(name: str, size: int) -> None:
        if size >= _SAID_FROM_BYTES:
            print(_say(name, size), file=sys.stderr, flush=True)

    yield say


def _say(name: str, size: int) -> str:
    return f"verify: reading {name}{f', {format_bytes(size)}' if size else ''}"


def render_verified(found: Verified, out: rich.console.Console) -> None:
    """Print what was found.

    Args:
        found: of `verify`.
        out: standard output.
    """
    if out.is_terminal:
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(2):
            table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for part in found.parts:
            state = Text(part.state, style=_STYLES[part.state])
            table.add_row(Text(part.name), state, Text("\n").join(_describe(part)))
        out.print(table, highlight=False)
    else:
        # Of a log each line is whole: the first of a part begins with its name.
        for part in found.parts:
            named = [f"{part.name:<{_NAME}}{part.state:<{_STATE}}", " " * (_NAME + _STATE)]
            for number, line in enumerate(_describe(part)):
                out.print(f"{named[min(number, 1)]}{line}".rstrip(), markup=False, soft_wrap=True)
    if found.is_at_work:
        out.print("another process is at work there: what it is writing may look damaged")
    out.print(Text(f"{_clean(str(found.folder))}: {_sum_up(found)}"), soft_wrap=True)


def _sum_up(found: Verified) -> str:
    damaged = [part.name for part in found.parts if part.state == "damaged"]
    if damaged:
        return f"damaged: {', '.join(damaged)}"
    is_all_there = all(part.state == "whole" for part in found.parts)
    return "whole" if is_all_there else "whole, as far as it has come"


def _clean(text: str) -> str:
    return fmt.clean_text(text, fmt.COMMAND_LIMIT)


def _describe(part: Part) -> list[Text]:
    if not part.damages:
        return [Text(_clean(part.note), style="dim")]
    lines = [Text(_clean(str(one))) for one in part.damages[:_MOST_DAMAGES]]
    if len(part.damages) > _MOST_DAMAGES:
        lines.append(Text(f"and {len(part.damages) - _MOST_DAMAGES:,} more"))
    return [*lines, Text(f"mend: {_clean(part.mend or '')}", style="cyan")]
