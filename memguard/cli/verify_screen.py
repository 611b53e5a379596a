"""Prints the result of `memguard verify`: each part's state, damage and repair."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import rich.console
from rich.table import Table
from rich.text import Text

from memguard.pages import formatting as fmt
from memguard.workflows.verify import OnRead, Part, State, Verified, format_bytes

_STYLES: dict[State, str] = {
    "intact": "green",
    "damaged": "bold red",
    "not checked": "yellow",
    "not there yet": "dim",
}
_SAID_FROM_BYTES = 1_000_000_000
"""Without a live display, a line is printed only for files of at least this size (bytes)."""
_NAME, _STATE = 13, 15
"""Widths of the columns."""
_MOST_DAMAGES = 20
"""Largest number of files that are listed for one part, damaged or not checked."""


@contextmanager
def shown_reading(command: str = "verify") -> Iterator[OnRead]:
    """Yield a function that prints on standard error which file is read next.

    Args:
        command: that reads it.
    """
    err = rich.console.Console(stderr=True, highlight=False)
    if err.is_terminal and not err.is_dumb_terminal:
        with err.status(command) as status:
            yield lambda name, size: status.update(_say(command, name, size))
        return

    def say(name: str, size: int) -> None:
        if size >= _SAID_FROM_BYTES:
            print(_say(command, name, size), file=sys.stderr, flush=True)

    yield say


def _say(command: str, name: str, size: int) -> str:
    return f"{command}: reading {name}{f', {format_bytes(size)}' if size else ''}"


def render_verified(found: Verified, out: rich.console.Console) -> None:
    """Print the result of `verify`.

    Args:
        found: result of `verify`.
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
        # Lines are not wrapped in a log; the first line of each part begins with its name.
        for part in found.parts:
            named = [f"{part.name:<{_NAME}}{part.state:<{_STATE}}", " " * (_NAME + _STATE)]
            for number, line in enumerate(_describe(part)):
                out.print(f"{named[min(number, 1)]}{line}".rstrip(), markup=False, soft_wrap=True)
    if found.is_in_use:
        out.print("another process is working there: files that it is writing may look damaged")
    out.print(Text(f"{_clean(str(found.folder))}: {_sum_up(found)}"), soft_wrap=True)


def _sum_up(found: Verified) -> str:
    damaged = [part.name for part in found.parts if part.state == "damaged"]
    left_out = [part.name for part in found.parts if part.not_checked]
    not_checked = f"not checked (no permission): {', '.join(left_out)}"
    if damaged:
        return "; ".join([f"damaged: {', '.join(damaged)}", *([not_checked] if left_out else [])])
    if left_out:
        return f"no damage found; {not_checked}"
    is_all_there = all(part.state == "intact" for part in found.parts)
    return "intact" if is_all_there else "intact so far, not finished"


def _clean(text: str) -> str:
    return fmt.clean_text(text, fmt.COMMAND_LIMIT)


def _describe(part: Part) -> list[Text]:
    if not (part.damages or part.not_checked):
        return [Text(_clean(part.note), style="dim")]
    lines = _shorten([str(damage) for damage in part.damages])
    if part.damages:
        lines.append(Text(f"repair: {_clean(part.repair or '')}", style="cyan"))
    return [*lines, *_shorten([f"{file} not checked: no permission" for file in part.not_checked])]


def _shorten(sentences: Sequence[str]) -> list[Text]:
    lines = [Text(_clean(sentence)) for sentence in sentences[:_MOST_DAMAGES]]
    if len(sentences) > _MOST_DAMAGES:
        lines.append(Text(f"and {len(sentences) - _MOST_DAMAGES:,} more"))
    return lines
