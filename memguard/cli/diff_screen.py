"""Prints the result of `memguard diff`: counts, rates, then the findings, worst first."""

from collections.abc import Iterator, Sequence

import rich.console
from rich.table import Table
from rich.text import Text

from memguard.cli.options import Sentence, print_indented, print_title
from memguard.pages import formatting as fmt
from memguard.records.diff import (
    KINDS,
    MEANINGS,
    AuditDiff,
    DiffedFinding,
    DiffedRate,
    FindingKind,
    PairedRates,
)
from memguard.records.gate import Acceptance
from memguard.records.results import ResultRow

_MOST = 20
"""Largest number of lines of one kind."""
_MOST_PROBES = 4
_STYLES: dict[FindingKind, str] = {
    "new": "bold red",
    "new-document": "bold red",
    "newly-audited": "red",
    "unmatched": "yellow",
    "no-longer-found": "yellow",
    "no-longer-audited": "yellow",
    "fixed": "green",
}
_BY_ID: tuple[FindingKind, ...] = ("unmatched", "no-longer-found")
"""Kinds that are shown only where they occur: without one key for both audits."""
_ID, _BUCKET, _PROBE = 24, 10, 12
"""Widths of the columns of findings."""


def render_diff(diff: AuditDiff, out: rich.console.Console) -> None:
    """Print the result of `diff`.

    Args:
        diff: the result.
        out: standard output.
    """
    out.print(_build_audits(diff), highlight=False)
    out.print(Sentence(_describe_documents(diff)))
    print_title(out, "Findings")
    print_indented(out, _build_counts(diff))
    if diff.rates:
        print_title(out, "Rates of trained documents (95 % CI)")
        print_indented(out, _build_rates(diff.rates))
        _print_more(out, len(diff.rates))
    print_title(out, "Trained texts that both audits tested in the same way")
    for paired in diff.paired:
        print_indented(out, Sentence(_describe_paired(paired)))
    for kind in KINDS:
        if findings := diff.select(kind):
            print_title(out, f"{_capitalise(KINDS[kind])} ({len(findings):,})")
            print_indented(out, Sentence(MEANINGS[kind], "dim"))
            print_indented(out, _build_findings(findings))
            _print_more(out, len(findings))
    for state, title in (
        ("accepted", "Accepted: shown and counted above"),
        ("expired", "Accepted until a day that has passed: open again"),
        ("not-found", "Accepted, but not a finding of the new audit"),
    ):
        _print_accepted(out, title, [e for e in diff.accepted if e.state == state])
    print_title(out, "How it was compared")
    for note in diff.notes:
        print_indented(out, Sentence(_clean(note)))
    if diff.findings:
        print_indented(out, Text("--json has the ids of all findings, which triage.yaml names."))


def _build_audits(diff: AuditDiff) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(max_width=24, overflow="fold")
    table.add_column(max_width=10)
    for _ in range(3):
        table.add_column(justify="right")
    heads = ("", "audit", "day (UTC)", "findings", "trained texts", "only here")
    table.add_row(*(Text(head, style="dim") for head in heads))
    for which, audit in (("old", diff.old), ("new", diff.new)):
        numbers = (audit.num_findings, audit.num_texts, audit.num_only_here)
        texts = (which, fmt.clean_name(audit.name), fmt.time(audit.created)[:10])
        table.add_row(*map(Text, (*texts, *(f"{number:,}" for number in numbers))))
    return table


def _describe_documents(diff: AuditDiff) -> str:
    parts = [f"{diff.num_texts_in_both:,} of the new texts are in the old audit"]
    for which, audit in (("old", diff.old), ("new", diff.new)):
        if number := audit.num_documents - audit.num_texts:
            parts.append(f"{number:,} {which} documents repeat a text and count once")
        if audit.num_unmatched:
            parts.append(f"{audit.num_unmatched:,} {which} documents cannot be matched")
    return "; ".join(parts)


def _build_counts(diff: AuditDiff) -> Table:
    """Build a table with a row for each kind and a column for each probe."""
    probes = list(dict.fromkeys(count.probe for count in diff.counts))
    shown = probes if len(probes) <= _MOST_PROBES else probes[: _MOST_PROBES - 1]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    heads = [fmt.clean_name(probe, _PROBE) for probe in shown]
    if len(probes) > len(shown):
        heads.append("others")
    heads = [*heads, "all"] if len(probes) > 1 else heads
    for _ in heads:
        table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_row("", *(Text(head, style="dim") for head in heads), "")
    for kind, name in KINDS.items():
        whole = diff.count(kind)
        if kind in _BY_ID and not whole:
            continue
        numbers = [diff.count(kind, probe) for probe in shown]
        if len(probes) > len(shown):
            numbers.append(whole - sum(numbers))
        if len(probes) > 1:
            numbers.append(whole)
        style = _STYLES.get(kind, "") if whole else "dim"
        accepted = sum(count.num_accepted for count in diff.counts if count.kind == kind)
        table.add_row(
            Text(name, style=style),
            *(Text(f"{number:,}", style=style) for number in numbers),
            Text(f"{accepted:,} of them accepted" if accepted else ""),
        )
    return table


def _build_rates(rates: Sequence[DiffedRate]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=18, overflow="fold")
    table.add_column(max_width=_BUCKET, no_wrap=True, overflow="ellipsis")
    for _ in range(2):
        table.add_column(overflow="fold")
    table.add_row(*(Text(head, style="dim") for head in ("", "bucket", "old", "new")))
    for rate in rates[:_MOST]:
        table.add_row(
            Text(fmt.clean_name(rate.spoken, 40)),
            Text(fmt.clean_name(rate.bucket, 40)),
            *(Text(_write_rate(row)) for row in (rate.old, rate.new)),
        )
    return table


def _write_rate(row: ResultRow | None) -> str:
    if row is None:
        return "not measured"
    if row.value is None:
        return row.missing_because or fmt.MISSING
    if row.num_matched is None:
        return f"{fmt.number(row.value)}"
    return f"{row.num_matched:,} of {row.num_documents:,} ({_plain(fmt.percent_range(row.ci))})"


def _describe_paired(paired: PairedRates) -> str:
    name = fmt.clean_name(paired.probe, 40)
    if paired.difference is None:
        return f"{name}: none, because {_clean(paired.missing_because or '')}"
    points = fmt.points(paired.difference)
    return _plain(
        f"{name}: {paired.num_old:,} of {paired.num_texts:,} in old, {paired.num_new:,} in new; "
        f"{points.value} (95 % CI {points.interval}); only in old {paired.num_only_old:,}, only in "
        f"new {paired.num_only_new:,}"
    )


def _build_findings(findings: Sequence[DiffedFinding]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for width in (_ID, _BUCKET, _PROBE):
        table.add_column(max_width=width, no_wrap=True, overflow="ellipsis")
    table.add_column(overflow="fold")
    for finding in findings[:_MOST]:
        table.add_row(
            Text(fmt.clean_name(finding.id, _ID)),
            Text(fmt.clean_name(finding.bucket, _BUCKET)),
            Text(fmt.clean_name(finding.probe, _PROBE)),
            Text("; ".join(_describe_finding(finding))),
        )
    return table


def _describe_finding(finding: DiffedFinding) -> Iterator[str]:
    size = _count(finding.continuation_tokens, "token")
    kinds = {None: "", True: ", verbatim", False: ", near-verbatim"}
    yield size + kinds[finding.is_verbatim]
    if finding.num_copies > 1:
        yield f"{finding.num_copies:,} equal texts"
    if finding.acceptance is not None:
        yield finding.acceptance.upper()
    if finding.reason is not None:
        yield _clean(finding.reason)


def _print_accepted(out: rich.console.Console, title: str, entries: Sequence[Acceptance]) -> None:
    if not entries:
        return
    print_title(out, f"{title} ({len(entries):,})")
    for entry in entries[:_MOST]:
        digest, _, probe = entry.finding.partition(":")
        until = "without end" if entry.until is None else f"until {entry.until}"
        by, reason = _clean(entry.by), _clean(entry.reason)
        name = f"{fmt.hash(digest)}:{fmt.clean_name(probe, 40)}"
        print_indented(out, Text(f"{name} by {by}, {until}: {reason}"))
    _print_more(out, len(entries))


def _print_more(out: rich.console.Console, number: int) -> None:
    if number > _MOST:
        print_indented(out, Text(f"and {number - _MOST:,} more"))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what if number == 1 else f'{what}s'}"


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]


def _clean(text: str) -> str:
    return fmt.clean_text(text, fmt.COMMAND_LIMIT)


def _plain(text: str) -> str:
    """Return a formatted number with spaces at which a terminal may break lines."""
    return text.replace(fmt.NBSP, " ")
