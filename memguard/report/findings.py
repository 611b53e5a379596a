"""The worst findings as a table, by id and hash, never by text."""

from memguard.records import AuditReport, Finding
from memguard.report.cells import make_headings
from memguard.report.formatting import (
    format_count,
    format_hash,
    format_number,
    format_of,
    format_repetitions,
)
from memguard.report.page import Cell, Row, Table
from memguard.report.text import clean_name, clean_text

SHOWN_FINDINGS = 10
MOST_FINDINGS = 1000
_ID_LIMIT = 160
"""Characters of an id: who wants the document has nothing else to look for."""


def build_findings(report: AuditReport) -> Table | None:
    """Build the list of findings, worst first as the record has them; None without any."""
    if not report.findings:
        return None
    findings = report.findings[:MOST_FINDINGS]
    has_base = any(finding.base_num_correct is not None for finding in findings)
    has_hash = _has_hashes(report)
    rows = tuple(_build_row(finding, has_base, has_hash) for finding in findings)
    return Table(
        caption="Documents the model recites",
        columns=make_headings(
            ("Document", "and what was found"),
            "Severity",
            ("Bucket", "times trained"),
            ("Tokens right", "base model's below") if has_base else "Tokens right",
            ("First divergence", "token"),
            ("Log-probability", "nats, in all"),
            *([("Text", "keyed hash")] if has_hash else []),
        ),
        rows=rows[:SHOWN_FINDINGS],
        more_rows=rows[SHOWN_FINDINGS:],
        more_label=f"Show {len(rows) - SHOWN_FINDINGS:,} more",
        long_names=True,
    )


def _has_hashes(report: AuditReport) -> bool:
    return any(finding.text_hmac for finding in report.findings)


def _build_row(finding: Finding, has_base: bool, has_hash: bool) -> Row:
    whole = finding.continuation_tokens
    diverged = finding.first_divergence < whole
    base = finding.base_num_correct
    cells = (
        Cell(text=finding.severity, kind="level", level=finding.severity),
        Cell(
            text=clean_name(finding.bucket),
            detail=format_repetitions(finding.num_repetitions),
            kind="text",
        ),
        Cell(
            text=format_of(finding.num_correct, whole),
            detail=format_of(base, whole) if has_base and base is not None else "",
        ),
        Cell(text=format_count(finding.first_divergence) if diverged else "none"),
        Cell(text=format_number(finding.logprob)),
        *([Cell(text=format_hash(finding.text_hmac), kind="hash")] if has_hash else []),
    )
    head = Cell(
        text=clean_name(finding.id, _ID_LIMIT), detail=clean_text(finding.sentence), kind="text"
    )
    return Row(head=head, cells=tuple(cells))


def write_findings_note(report: AuditReport) -> str:
    """Say how many findings there are, and how a document can be found again."""
    if not report.num_findings:
        return "No document met the rule for a finding in the probes that ran."
    shown = min(len(report.findings), MOST_FINDINGS)
    found = format_count(report.num_findings)
    if report.num_findings == 1:
        text = "One finding."
    elif shown >= report.num_findings:
        text = f"All {found} findings, worst first."
    else:
        text = f"The first {format_count(shown)} of {found} findings, worst first."
    if _has_hashes(report):
        text += " Texts are identified by keyed hash; the key stays in the run's private folder."
    return text
