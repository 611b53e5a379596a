"""Tables of the audit page: what each bucket shows, with the base model below."""

from memguard.records import AuditReport, BucketScores, Finding, RiskName
from memguard.report.formatting import (
    CI,
    PERCENT,
    clean_name,
    clean_text,
    format_count,
    format_hash,
    format_interval,
    format_number,
    format_of,
    format_points,
    format_repetitions,
    format_share,
)
from memguard.report.page import Cell, Row, Table, make_headings, show_estimate, show_rate

_GREEDY: tuple[RiskName, ...] = ("verbatim", "near_verbatim")
PERCENT_90 = f"90{PERCENT}"

_ROLES = {
    "trained": "trained",
    "control": "never trained",
    "background": "background, trained",
    "heldout": "held out, never trained",
    "canary": "random secrets",
    "forget": "to be forgotten",
    "removed": "removed as copies",
}


def describe_times(bucket: BucketScores, report: AuditReport) -> str:
    """Say how often the documents of a bucket were trained."""
    role = _ROLES[bucket.role]
    if bucket.role in ("control", "heldout", "forget") or not report.dose_response:
        return role
    if bucket.num_repetitions is None:
        return f"{role}, not equally often"
    return (
        f"{role} {'once' if bucket.num_repetitions == 1 else f'{bucket.num_repetitions:,} times'}"
    )


def name_bucket(bucket: BucketScores, report: AuditReport) -> Cell:
    """Name a bucket, and below how often its documents were trained."""
    name, times = clean_name(bucket.bucket), describe_times(bucket, report)
    return Cell(text=name, detail="" if name == times else times, kind="text")


def build_summary(report: AuditReport) -> Table:
    """Build the main table: rates and token accuracy of each bucket, base model below."""
    buckets = report.buckets
    # Without a control there is nothing to subtract.
    compared = any(bucket.minus_control for bucket in buckets)
    rows = []
    for bucket in buckets:
        differences = [bucket.minus_control.get(name) for name in _GREEDY]
        cells = (
            show_rate(bucket.model.verbatim),
            show_rate(bucket.model.near_verbatim),
            *(show_estimate(format_points(one)) for one in differences if compared),
            show_rate(bucket.model.teacher_forced_90),
            show_estimate(format_share(bucket.model.mean_token_accuracy)),
        )
        control = bucket.role == "control"
        rows.append(
            Row(head=name_bucket(bucket, report), cells=cells, tone="control" if control else "")
        )
        if bucket.base is None:
            continue
        base_cells = (
            show_rate(bucket.base.verbatim),
            show_rate(bucket.base.near_verbatim),
            *(Cell(text="") for _ in differences if compared),
            show_rate(bucket.base.teacher_forced_90),
            show_estimate(format_share(bucket.base.mean_token_accuracy)),
        )
        head = Cell(text="Base model", detail="same documents", kind="text")
        rows.append(Row(head=head, cells=base_cells, tone="base"))
    minus = (
        ("Verbatim − control", f"points ({CI})"),
        ("Near-verbatim − control", f"points ({CI})"),
    )
    return Table(
        caption="Documents extracted by greedy decoding, and what is known token by token",
        columns=make_headings(
            "Bucket",
            ("Verbatim", f"documents ({CI})"),
            ("Near-verbatim", f"documents ({CI})"),
            *(minus if compared else ()),
            (f"{PERCENT_90} teacher-forced", f"documents ({CI})"),
            ("Token accuracy", f"teacher-forced, mean ({CI})"),
        ),
        rows=tuple(rows),
    )


def build_details(report: AuditReport) -> Table:
    """Build the second table: how far, how surely, and who was left out."""
    rows = []
    for bucket in report.buckets:
        cells = (
            Cell(text=format_number(bucket.model.median_first_divergence, 1)),
            Cell(text=format_number(bucket.mean_extraction_strength)),
            show_estimate(format_interval(bucket.model.mean_logprob)),
            Cell(text=format_number(bucket.mean_type_token_ratio)),
            Cell(text=format_number(bucket.mean_argmax_type_token_ratio)),
            Cell(text=format_count(bucket.num_tiny_margin)),
            Cell(text=format_count(bucket.num_documents)),
            Cell(text=format_count(bucket.num_too_short)),
            Cell(text=format_count(bucket.num_cut_too_short + bucket.num_nothing_supervised)),
            Cell(text=format_count(bucket.num_not_sampled)),
        )
        control = bucket.role == "control"
        rows.append(
            Row(head=name_bucket(bucket, report), cells=cells, tone="control" if control else "")
        )
        if bucket.base is None:
            continue
        base_cells = (
            Cell(text=format_number(bucket.base.median_first_divergence, 1)),
            Cell(text=""),
            show_estimate(format_interval(bucket.base.mean_logprob)),
            *(Cell(text="") for _ in range(7)),
        )
        rows.append(Row(head=Cell(text="Base model", kind="text"), cells=base_cells, tone="base"))
    return Table(
        caption="How far, how surely, and which documents are not in the rates",
        columns=make_headings(
            "Bucket",
            ("Median first divergence", f"token, of {report.method.continuation_tokens:,}"),
            ("Extraction strength", "mean, 0 to 1"),
            ("Log-probability", f"nats a token ({CI})"),
            ("Type-token ratio", "true text"),
            ("Type-token ratio", "model's choices"),
            ("Tiny margins", "documents"),
            ("Scored", "documents"),
            ("Too short", "documents"),
            ("Not auditable", "cut up, or without loss"),
            ("Not sampled", "documents"),
        ),
        rows=tuple(rows),
    )


# The worst findings as a table, by id and hash, never by text.

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
