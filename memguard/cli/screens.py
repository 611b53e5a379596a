"""Prints the results of `memguard verify`, `memguard diff` and `memguard gate`."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import rich.console
from rich.table import Table
from rich.text import Text

from memguard.cli.options import Sentence, print_indented, print_title
from memguard.gate.deciding import describe_gate
from memguard.gate.diffed import (
    KINDS,
    AuditDiff,
    DiffedDocument,
    DiffedFinding,
    DiffedProbe,
    FindingKind,
    FoundBy,
)
from memguard.pages import formatting as fmt
from memguard.pages.judgements import INTERVAL_NOTE, OUTCOME_NAMES, worst_first, write_contrast
from memguard.records.gate import GateResult, Judgement, Outcome
from memguard.workflows.verify import OnRead, Part, State, Verified, format_bytes

LOG_WIDTH = 80
"""Columns of a log, which has no width of its own."""
_MOST_LINES, _MOST_ROWS = 20, 60
"""Largest number of lines of one kind, and of rows of a table of judgements."""


def _clean(text: str) -> str:
    return fmt.clean_text(text, fmt.COMMAND_LIMIT)


def _plain(text: str) -> str:
    return text.replace(fmt.NBSP, " ")


# -- verify ----------------------------------------------------------------------------------------

_STATE_STYLES: dict[State, str] = {
    "intact": "green",
    "damaged": "bold red",
    "not checked": "yellow",
    "not there yet": "dim",
}
_SAID_FROM_BYTES = 1_000_000_000
"""Without a live display, a line is printed only for files of at least this size (bytes)."""
_NAME, _STATE = 13, 15
"""Widths of the columns."""


@contextmanager
def shown_reading(command: str = "verify") -> Iterator[OnRead]:
    """Yield a function that prints on standard error which file a command reads next."""
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
    """Print each part's state, damage and repair."""
    if out.is_terminal:
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(2):
            table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for part in found.parts:
            state = Text(part.state, style=_STATE_STYLES[part.state])
            table.add_row(Text(part.name), state, Text("\n").join(_describe_part(part)))
        out.print(table, highlight=False)
    else:
        # Lines are not wrapped in a log; the first line of each part begins with its name.
        for part in found.parts:
            named = [f"{part.name:<{_NAME}}{part.state:<{_STATE}}", " " * (_NAME + _STATE)]
            for number, line in enumerate(_describe_part(part)):
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


def _describe_part(part: Part) -> list[Text]:
    if not (part.damages or part.not_checked):
        return [Text(_clean(part.note), style="dim")]
    lines = _list_first([str(damage) for damage in part.damages])
    if part.damages:
        lines.append(Text(f"repair: {_clean(part.repair or '')}", style="cyan"))
    return lines + _list_first([f"{file} not checked: no permission" for file in part.not_checked])


def _list_first(sentences: Sequence[str]) -> list[Text]:
    lines = [Text(_clean(sentence)) for sentence in sentences[:_MOST_LINES]]
    if len(sentences) > _MOST_LINES:
        lines.append(Text(f"and {len(sentences) - _MOST_LINES:,} more"))
    return lines


# -- diff ------------------------------------------------------------------------------------------

_COLUMNS: dict[str, tuple[FindingKind, FoundBy, str]] = {
    "new": ("new", "new", "bold red"),
    "unchanged": ("unchanged", "both", ""),
    "gone": ("gone", "old", "green"),
    "only new*": ("not-audited", "new", "red"),
    "only old*": ("not-audited", "old", "yellow"),
}
"""Head, kind and style of each column of counts."""


def render_diff(diff: AuditDiff, out: rich.console.Console) -> None:
    """Print counts, rates, then the findings of each kind, worst first."""
    out.print(_build_audits(diff), highlight=False)
    out.print(Sentence(f"{diff.num_texts_in_both:,} of the new texts are in the old audit"))
    print_title(out, "Extracted documents")
    print_indented(out, _build_counts(diff))
    print_indented(out, Text("* the other audit did not measure the same", style="dim"))
    print_title(out, "Trained texts that both audits measured in the same way")
    for probe in diff.probes:
        print_indented(out, Sentence(_describe_rates(probe)))
    for kind, meaning in KINDS.items():
        if documents := diff.select(kind):
            print_title(out, f"{kind.replace('-', ' ').capitalize()} ({len(documents):,})")
            print_indented(out, Sentence(meaning, "dim"))
            print_indented(out, _build_documents(documents[:_MOST_LINES]))
            if (number := len(documents) - _MOST_LINES) > 0:
                print_indented(out, Text(f"and {number:,} more"))
    if diff.notes:
        print_title(out, "Notes")
    for note in diff.notes:
        print_indented(out, Sentence(_clean(note)))
    if diff.documents:
        print_indented(out, Text("--json has all documents with their keyed hashes."))


def _build_audits(diff: AuditDiff) -> Table:
    heads = ("", "audit", "day (UTC)", "trained texts", "findings")
    table = _start_table(heads, (4, 36, 10, None, None))
    for which, audit in (("old", diff.old), ("new", diff.new)):
        numbers = (f"{audit.num_texts:,}", f"{audit.num_findings:,}")
        name, day = fmt.clean_name(audit.name), fmt.time(audit.created)[:10]
        table.add_row(*map(Text, (which, name, day, *numbers)))
    return table


def _build_counts(diff: AuditDiff) -> Table:
    table = _start_table(("", *_COLUMNS), (24, *(None for _ in _COLUMNS)))
    for probe in diff.probes:
        cells = []
        for kind, found_by, style in _COLUMNS.values():
            number = diff.count(kind, probe.probe, found_by)
            cells.append(Text(f"{number:,}", style=style if number else "dim"))
        table.add_row(Text(fmt.clean_name(probe.probe, 24)), *cells)
    numbers = (len(diff.select(kind, found_by)) for kind, found_by, _ in _COLUMNS.values())
    table.add_row(Text("any probe"), *(Text(f"{number:,}") for number in numbers))
    return table


def _start_table(heads: tuple[str, ...], widths: tuple[int | None, ...]) -> Table:
    """Return a table whose columns without a width are numbers."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for width in widths:
        justify: rich.console.JustifyMethod = "right" if width is None else "left"
        table.add_column(max_width=width, justify=justify, overflow="fold")
    table.add_row(*(Text(head, style="dim") for head in heads))
    return table


def _describe_rates(probe: DiffedProbe) -> str:
    name = fmt.clean_name(probe.probe, 40)
    if probe.difference is None:
        return f"{name}: none, because {_clean(probe.missing_because or '')}"
    points = fmt.points(probe.difference)
    return _plain(
        f"{name}: {probe.num_old:,} of {probe.num_texts:,} in old, {probe.num_new:,} in new; "
        f"{points.value} (95 % CI {points.interval})"
    )


def _build_documents(documents: list[DiffedDocument]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for width in (24, 10, 12):
        table.add_column(max_width=width, no_wrap=True, overflow="ellipsis")
    table.add_column(overflow="fold")
    for one in documents:
        names = (fmt.clean_name(one.id, 24), fmt.clean_name(one.bucket, 10))
        noun = "token" if one.continuation_tokens == 1 else "tokens"
        whys = (f"{probe.probe}: {_explain(probe)}" for probe in one.probes)
        table.add_row(*map(Text, (*names, f"{one.continuation_tokens:,} {noun}", "; ".join(whys))))
    return table


def _explain(finding: DiffedFinding) -> str:
    why = finding.reason or ", ".join(part.removesuffix(".any") for part in finding.parts)
    return _clean(why) or "extracted"


# -- gate ------------------------------------------------------------------------------------------

_OUTCOME_STYLES: dict[Outcome, str] = {
    "fail": "bold red",
    "cannot-be-judged": "bold yellow",
    "inconclusive": "yellow",
    "pass": "green",
}
_SHORT = {
    " on documents trained ": " on trained ",
    " at most ": " ≤ ",
    " at least ": " ≥ ",
    " the control": " control",
    " the base model": " base",
}
_HEADS = ("outcome", "rule", "matched", "95 % interval", "needed")
_GAP, _LEAST = 2, 10
_NAME_LIMIT = 300


def render_gate(result: GateResult, folder: Path, out: rich.console.Console) -> None:
    """Print the decision, a line for each judgement and the verdict; ``folder`` has the files."""
    width = max(LOG_WIDTH, out.width) if out.is_terminal else LOG_WIDTH
    decision = _clean(_plain(result.decision))
    out.print(Sentence(decision, _OUTCOME_STYLES[result.outcome]), width=width)
    out.print()
    judgements = worst_first(result)
    _print_table(judgements[:_MOST_ROWS], out, width)
    if len(judgements) > _MOST_ROWS:
        out.print(f"and {len(judgements) - _MOST_ROWS:,} more", width=width)
    _print_reasons([j for j in judgements if j.outcome != "pass"], out, width)
    out.print()
    out.print(Sentence(INTERVAL_NOTE, "dim"), width=width)
    out.print(Sentence(describe_gate(result), _OUTCOME_STYLES[result.outcome]), width=width)
    out.print(Sentence(f"Verdict of the audit: {_clean(_plain(result.verdict))}"), width=width)
    out.print(Sentence(_clean("; ".join(result.badges))), width=width)
    if contrast := write_contrast(result):
        out.print(Sentence(f"WARNING: {_clean(_plain(contrast))}", "bold red"), width=width)
    out.print(Text(_clean(_plain(str(folder)))), soft_wrap=True)


def _print_table(judgements: Sequence[Judgement], out: rich.console.Console, width: int) -> None:
    """Print one line for each judgement; the names give way to the numbers."""
    rows = [_HEADS, *map(_build_row, judgements)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    room = width - sum(widths[2:]) - widths[0] - _GAP * (len(_HEADS) - 1)
    for number, row in enumerate(rows):
        outcome, rule, *numbers = row
        line = Text(outcome.ljust(widths[0]))
        if number:
            line.stylize(_OUTCOME_STYLES[judgements[number - 1].outcome])
        cells = [_shorten(rule, room).ljust(room), *map(str.rjust, numbers, widths[2:])]
        line.append("".join(" " * _GAP + cell for cell in cells), style="")
        if not number:
            line.stylize("dim")
        line.rstrip()
        out.print(line, width=width, no_wrap=True, highlight=False)


def _print_reasons(judgements: Sequence[Judgement], out: rich.console.Console, width: int) -> None:
    if judgements:
        out.print()
    for judgement in judgements[:_MOST_LINES]:
        name = fmt.clean_name(judgement.name, _NAME_LIMIT)
        out.print(Sentence(f"{name}: {_clean(_plain(judgement.sentence))}"), width=width)
    if len(judgements) > _MOST_LINES:
        out.print(f"and {len(judgements) - _MOST_LINES:,} more in gate.json", width=width)


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
