"""Tables of the audit page: what each bucket shows, with the base model below."""

from memguard.records import AuditReport, BucketScores, RiskName
from memguard.report.cells import make_headings, show_estimate, show_rate
from memguard.report.formatting import (
    CI,
    PERCENT,
    format_count,
    format_interval,
    format_number,
    format_points,
    format_share,
)
from memguard.report.page import Cell, Row, Table
from memguard.report.text import clean_name

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
