"""Prints the result of `memguard diff`: counts, rates, then the findings, worst first."""

import rich.console
from rich.table import Table
from rich.text import Text

from memguard.cli.options import Sentence, print_indented, print_title
from memguard.pages import formatting as fmt
from memguard.records.diff import KINDS, AuditDiff, DiffedFinding, DiffedProbe, FindingKind, FoundBy

_MOST = 20
"""Largest number of lines of one kind."""
_COLUMNS: dict[str, tuple[FindingKind, FoundBy, str]] = {
    "new": ("new", "new", "bold red"),
    "unchanged": ("unchanged", "both", ""),
    "gone": ("gone", "old", "green"),
    "only new*": ("not-audited", "new", "red"),
    "only old*": ("not-audited", "old", "yellow"),
}
"""Head, kind and style of each column of counts."""


def render_diff(diff: AuditDiff, out: rich.console.Console) -> None:
    """Print the result of `memguard diff` on standard output."""
    out.print(_build_audits(diff), highlight=False)
    out.print(Sentence(f"{diff.num_texts_in_both:,} of the new texts are in the old audit"))
    print_title(out, "Findings")
    print_indented(out, _build_counts(diff))
    print_indented(out, Text("* the other audit did not measure the same", style="dim"))
    print_title(out, "Trained texts that both audits measured in the same way")
    for probe in diff.probes:
        print_indented(out, Sentence(_describe_rates(probe)))
    for kind, meaning in KINDS.items():
        if findings := diff.select(kind):
            print_title(out, f"{kind.replace('-', ' ').capitalize()} ({len(findings):,})")
            print_indented(out, Sentence(meaning, "dim"))
            print_indented(out, _build_findings(findings[:_MOST]))
            if (number := len(findings) - _MOST) > 0:
                print_indented(out, Text(f"and {number:,} more"))
    if diff.notes:
        print_title(out, "Notes")
    for note in diff.notes:
        print_indented(out, Sentence(_clean(note)))
    if diff.findings:
        print_indented(out, Text("--json has the ids of all findings, which triage.yaml names."))


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
            number = len(diff.select(kind, probe.probe, found_by))
            cells.append(Text(f"{number:,}", style=style if number else "dim"))
        table.add_row(Text(fmt.clean_name(probe.probe, 24)), *cells)
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
    text = (
        f"{name}: {probe.num_old:,} of {probe.num_texts:,} in old, {probe.num_new:,} in new; "
        f"{points.value} (95 % CI {points.interval})"
    )
    return text.replace(fmt.NBSP, " ")


def _build_findings(findings: list[DiffedFinding]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for width in (24, 10, 12):
        table.add_column(max_width=width, no_wrap=True, overflow="ellipsis")
    table.add_column(overflow="fold")
    for one in findings:
        names = (fmt.clean_name(one.id, 24), fmt.clean_name(one.bucket, 10))
        cells = (*names, fmt.clean_name(one.probe, 12), _describe_finding(one))
        table.add_row(*map(Text, cells))
    return table


def _describe_finding(finding: DiffedFinding) -> str:
    noun = "token" if finding.continuation_tokens == 1 else "tokens"
    why = finding.reason or ", ".join(part.removesuffix(".any") for part in finding.parts)
    return f"{finding.continuation_tokens:,} {noun}{'; ' if why else ''}{_clean(why)}"


def _clean(text: str) -> str:
    return fmt.clean_text(text, fmt.COMMAND_LIMIT)
