"""The summary tables of the audit page, and the list of findings.

The tables have a row per bucket with the base model's row below: extraction rates and token
accuracy, change from the base model, details and exclusions. Findings are listed by id and hash,
never by text.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from memguard.records import AuditReport, BucketScores, Finding, Interval, RiskName
from memguard.report import formatting as fmt
from memguard.report.audit_probes import Group, find_measured, group_measures
from memguard.report.page import Cell, Table
from memguard.report.tables import (
    Column,
    Content,
    Heading,
    bucket_table,
    drop_zero_columns,
    make_table,
    scores_column,
    show_known,
    show_missing,
    show_name,
    show_rate,
)

_GREEDY: tuple[RiskName, ...] = ("verbatim", "near_verbatim")
_PERCENT_90 = f"90{fmt.PERCENT}"


def build_summary(report: AuditReport) -> Table:
    """Build the main table: rates and token accuracy per bucket, the base model's below."""

    def minus_control(risk: RiskName) -> Column[BucketScores]:
        return Column(
            (f"{fmt.RISK_LABELS[risk]} − control", f"points ({fmt.CI})"),
            lambda b: fmt.points(b.minus_control.get(risk)),
        )

    # Without a control there is nothing to subtract.
    is_compared = any(bucket.minus_control for bucket in report.buckets)
    documents = f"documents ({fmt.CI})"
    columns = (
        scores_column(("Verbatim", documents), lambda s: s.verbatim),
        scores_column(("Near-verbatim", documents), lambda s: show_rate(s.near_verbatim)),
        *(map(minus_control, _GREEDY) if is_compared else ()),
        scores_column((f"{_PERCENT_90} teacher-forced", documents), lambda s: s.teacher_forced_90),
        scores_column(
            ("Teacher-forced accuracy", f"mean ({fmt.CI})"),
            lambda s: fmt.share(s.mean_token_accuracy),
        ),
    )
    caption = "Documents extracted by greedy decoding, and teacher-forced token accuracy"
    return bucket_table(report, caption, columns, base_detail="same documents")


def build_details(report: AuditReport) -> Table:
    """Build the second table: match details, and the documents that the rates exclude."""
    columns: tuple[Column[BucketScores], ...] = (
        scores_column(
            ("Median first divergence", f"token, of {report.method.continuation_tokens:,}"),
            lambda s: fmt.number(s.median_first_divergence, 1),
        ),
        Column(
            ("Extraction strength", "mean, 0 to 1"),
            lambda b: fmt.number(b.mean_extraction_strength),
        ),
        scores_column(
            ("Log-probability", f"nats a token ({fmt.CI})"),
            lambda s: show_known(s.mean_logprob, fmt.interval, "fewer than two texts"),
        ),
        Column(("Type-token ratio", "true text"), lambda b: fmt.number(b.mean_type_token_ratio)),
        Column(
            ("Type-token ratio", "model's choices"),
            lambda b: fmt.number(b.mean_argmax_type_token_ratio),
        ),
        Column(("Tiny margins", "documents"), lambda b: b.num_tiny_margin),
        Column(("Scored", "documents"), lambda b: b.num_documents),
        Column(("Too short", "documents"), lambda b: b.num_too_short),
        Column(
            ("Not auditable", "split, or without loss"),
            lambda b: b.num_cut_too_short + b.num_nothing_supervised,
        ),
        Column(("Not sampled", "documents"), lambda b: b.num_not_sampled),
    )
    return drop_zero_columns(bucket_table(report, "Match details and exclusions", columns))


_ADDED: Mapping[str, Heading] = {
    "verbatim": ("Verbatim", f"points ({fmt.CI})"),
    "near_verbatim": ("Near-verbatim", f"points ({fmt.CI})"),
    "token_accuracy": ("Token accuracy", f"teacher-forced, points ({fmt.CI})"),
    "logprob": ("Log-probability", f"nats a token ({fmt.CI})"),
}


def build_change_from_base(report: AuditReport) -> Table | None:
    """Build the table of model minus base model; None if no base model was scored."""
    groups = group_measures(report, "extraction")
    if not groups:
        return None
    group = groups[0]
    shown = [metric for metric in _ADDED if metric in group.measures]
    if not any(row.change_from_base for name in shown for row in group.measures[name].buckets):
        return None

    def added(metric: str) -> Column[BucketScores]:
        return Column(_ADDED[metric], lambda b: _show_added(group, metric, b.bucket))

    return bucket_table(
        report,
        "Change from base model, same documents",
        [added(metric) for metric in shown],
        notes=(
            "The change in the control is what training teaches about this kind of text; any "
            "change beyond it was learned from the documents.",
        ),
    )


def _show_added(group: Group, metric: str, bucket: str) -> Content:
    measured = find_measured(group, metric, bucket)
    if measured is None or measured.change_from_base is None:
        is_empty = measured is not None and not measured.num_documents
        return show_missing("no documents" if is_empty else "not measured")
    if group.measures[metric].unit in ("documents", "share"):
        return fmt.points(measured.change_from_base)
    return fmt.difference(measured.change_from_base)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """A bucket without extracted documents whose tokens were learned in part."""

    bucket: BucketScores
    gain: Interval
    """Token accuracy of the model minus that of the base model; the interval is above 0."""
    gain_minus_control: Interval
    """`gain` minus that of the control; the interval is above 0."""


def find_learned(report: AuditReport) -> list[Learned]:
    """Return the trained buckets without extracted documents whose tokens were learned in part.

    A bucket counts only if training is the cause: its teacher-forced token accuracy rose against
    the base model on the same documents, rose more than the control's, both by more than the
    interval; and the blind baseline does not separate trained from control documents by their
    words.
    """
    learned = []
    for bucket in report.buckets:
        if bucket.role != "trained" or any(rate.num_matched for rate in bucket.risks.values()):
            continue
        measured = report.find_gain(bucket.bucket)
        if measured is None or measured.change_from_base is None:
            continue
        excess = measured.change_from_base_minus_control
        if excess and excess.ci and excess.ci[0] > 0:
            gain = measured.change_from_base
            learned.append(Learned(bucket=bucket, gain=gain, gain_minus_control=excess))
    return learned


def describe_learned(learned: list[Learned]) -> str:
    """Report by how much token accuracy rose in these buckets; "" without any."""
    if not learned:
        return ""
    gains = []
    for row in learned:
        gain, excess = fmt.points(row.gain), fmt.points(row.gain_minus_control)
        gains.append(
            f"{fmt.clean_name(row.bucket.bucket, 40)}: {gain.value}, "
            f"{excess.value} more than in the control ({excess.in_words})"
        )
    return (
        "No document of these buckets is extracted, yet training raised their teacher-forced token "
        f"accuracy: {'; '.join(gains)}. The model partly learned these texts "
        "but did not reproduce them."
    )


_SHOWN_FINDINGS = 10
_MOST_FINDINGS = 1000
_ID_LIMIT = 160
"""Characters of an id, long because the id is the only way to find the document."""


def build_findings(report: AuditReport) -> Table | None:
    """Build the list of findings in the order of the record, worst first; None without any."""
    if not report.findings:
        return None
    findings = report.findings[:_MOST_FINDINGS]
    columns: list[Column[Finding]] = [
        Column("Document", lambda f: show_name(fmt.clean_name(f.id, _ID_LIMIT))),
        Column("Severity", lambda f: Cell(f.severity, kind="level", level=f.severity)),
        Column("Repeated", lambda f: show_name(fmt.clean_text(f.sentence))),
        Column("Bucket", lambda f: show_name(fmt.clean_name(f.bucket))),
        Column("Trained", lambda f: _write_times(f.num_repetitions)),
    ]
    if any(finding.base_num_correct is not None for finding in findings):
        columns.append(Column("Base model", _write_base))
    if _has_hashes(report):
        columns.append(Column("Keyed hash", lambda f: Cell(fmt.hash(f.text_hmac), kind="hash")))
    return make_table(
        "Extracted documents",
        columns,
        findings,
        shown=_SHOWN_FINDINGS,
        compact=True,
        one_line=True,
    )


def _write_times(num_repetitions: int | None) -> str:
    if num_repetitions is None:
        return "unknown"
    return fmt.times(num_repetitions).replace(" ", fmt.NBSP)


def _write_base(finding: Finding) -> str:
    base = finding.base_num_correct
    if base is None:
        return fmt.MISSING
    return f"{fmt.of(base, finding.continuation_tokens)}{fmt.NBSP}tokens"


def _has_hashes(report: AuditReport) -> bool:
    return any(finding.text_hmac for finding in report.findings)


def write_findings_note(report: AuditReport) -> str:
    """Report how many findings there are, and how to identify their documents."""
    if not report.num_findings:
        return "No document met the criteria for a finding in the probes that ran."
    shown = min(len(report.findings), _MOST_FINDINGS)
    total = fmt.count(report.num_findings)
    if report.num_findings == 1:
        text = "One finding."
    elif shown >= report.num_findings:
        text = f"All {total} findings, worst first."
    else:
        text = f"The first {fmt.count(shown)} of {total} findings, worst first; the others are in "
        text += "'findings.csv'."
    if _has_hashes(report):
        text += " Keyed hashes identify the texts; the key is in the run's private folder."
    return text
