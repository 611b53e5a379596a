"""Prints the result of `memguard gate`: one line for each judgement, then the two sentences."""

from collections.abc import Sequence
from pathlib import Path

import rich.console
from rich.text import Text

from memguard.cli.options import Sentence
from memguard.gate.words import describe_gate
from memguard.pages import formatting as fmt
from memguard.pages.judgements import INTERVAL_NOTE, OUTCOME_NAMES, worst_first, write_contrast
from memguard.records.gate import GateResult, Judgement, Outcome

_STYLES: dict[Outcome, str] = {
    "fail": "bold red",
    "cannot-be-judged": "bold yellow",
    "inconclusive": "yellow",
    "pass": "green",
}
_WIDTH = 80
"""Columns of a log, which has no width of its own."""
_SHORT = {
    " at most ": " ≤ ",
    " at least ": " ≥ ",
    " the control": " control",
    " the base model": " base",
}
_HEADS = ("outcome", "rule", "matched", "95 % interval", "needed")
_GAP, _LEAST = 2, 10
_MOST_LINES, _MOST_REASONS = 60, 20
_NAME_LIMIT = 300


def render_gate(result: GateResult, folder: Path, out: rich.console.Console) -> None:
    """Print the result of a gate.

    Args:
        result: of the gate.
        folder: where its files are.
        out: standard output.
    """
    width = max(_WIDTH, out.width) if out.is_terminal else _WIDTH
    judgements = worst_first(result)
    _print_table(judgements[:_MOST_LINES], out, width)
    if len(judgements) > _MOST_LINES:
        out.print(f"and {len(judgements) - _MOST_LINES:,} more", width=width)
    _print_reasons([j for j in judgements if j.outcome != "pass"], out, width)
    out.print()
    out.print(Sentence(INTERVAL_NOTE, "dim"), width=width)
    out.print(Sentence(describe_gate(result), _STYLES[result.outcome]), width=width)
    out.print(Sentence(f"Verdict of the audit: {_clean(result.verdict)}"), width=width)
    if contrast := write_contrast(result):
        out.print(Sentence(f"WARNING: {_clean(contrast)}", "bold red"), width=width)
    out.print(Text(f"{_clean(str(folder))}"), soft_wrap=True)


def _print_table(judgements: Sequence[Judgement], out: rich.console.Console, width: int) -> None:
    """Print one line for each judgement; the names give way to the numbers."""
    rows = [_HEADS, *map(_build_row, judgements)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    room = width - sum(widths[2:]) - widths[0] - _GAP * (len(_HEADS) - 1)
    for number, row in enumerate(rows):
        outcome, rule, *numbers = row
        line = Text(outcome.ljust(widths[0]))
        if number:
            line.stylize(_STYLES[judgements[number - 1].outcome])
        line.append(" " * _GAP + _shorten(rule, room).ljust(room), style="")
        for text, size in zip(numbers, widths[2:], strict=True):
            line.append(" " * _GAP + text.rjust(size), style="")
        if not number:
            line.stylize("dim")
        line.rstrip()
        out.print(line, width=width, no_wrap=True, highlight=False)


def _print_reasons(judgements: Sequence[Judgement], out: rich.console.Console, width: int) -> None:
    if judgements:
        out.print()
    for judgement in judgements[:_MOST_REASONS]:
        name = fmt.clean_name(judgement.name, _NAME_LIMIT)
        out.print(Sentence(f"{name}: {_clean(judgement.sentence)}"), width=width)
    if len(judgements) > _MOST_REASONS:
        out.print(f"and {len(judgements) - _MOST_REASONS:,} more in gate.json", width=width)


def _shorten(name: str, room: int) -> str:
    """Return a name that fits; what it was judged on and the limit, at its end, stay whole."""
    rule, on, place = name.rpartition(" on ")
    left = room - len(on) - len(place)
    if len(name) > room and left >= _LEAST:
        return f"{fmt.ELLIPSIS}{fmt.clean_name(rule, _NAME_LIMIT)[1 - left :]}{on}{place}"
    return fmt.clean_name(name, room)


def _build_row(judgement: Judgement) -> tuple[str, ...]:
    """Return the cells of a line; "" where there is no number."""
    matched, documents = judgement.num_matched, judgement.num_documents
    counts = "" if documents is None else f"{documents:,}"
    if matched is not None and documents is not None:
        counts = f"{matched:,} of {documents:,}"
    interval = ""
    if judgement.low is not None and judgement.high is not None:
        ends = (judgement.low, judgement.high)
        interval = _plain(fmt.percent_range(ends))
        if matched is None:
            interval = f"{ends[0]:.3g} to {ends[1]:.3g}"
    needed = judgement.num_documents_needed
    outcome = OUTCOME_NAMES[judgement.outcome].lower()
    name = fmt.clean_name(judgement.name, _NAME_LIMIT)
    for words, short in _SHORT.items():
        name = name.replace(words, short)
    return outcome, name, counts, interval, "" if needed is None else f"{needed:,}"


def _plain(text: str) -> str:
    return text.replace(fmt.NBSP, " ")


def _clean(text: str) -> str:
    return fmt.clean_text(_plain(text), fmt.COMMAND_LIMIT)
