"""The summary tables of the audit page, and the list of findings.

The tables have a row per bucket with the base model's row below: extraction rates and token
accuracy, change from the base model, details and exclusions. Findings are listed by id and hash,
never by text.
"""

from dataclasses import dataclass

from memguard.pages import formatting as fmt
from memguard.pages.columns import (
    PLAIN,
    Column,
    Heading,
    drop_zero_columns,
    make_table,
    show_minus_control,
    show_name,
)
from memguard.pages.page import Cell, Table
from memguard.pages.pivot import ResultColumn, bucket_table
from memguard.records import AuditReport, BucketRow, Finding, ResultRow

_PERCENT_90 = f"90{fmt.PERCENT}"
_DOCUMENTS = f"documents ({fmt.CI})"
_POINTS = f"points ({fmt.CI})"
_LOGPROB = ("Log-probability", f"nats a token ({fmt.CI})")
NOT_GENERATED = "not generated"


def build_summary(report: AuditReport) -> Table:
    """Build the main table: rates and token accuracy per bucket, the base model's below."""
    greedy = ("Verbatim", "verbatim"), ("Near-verbatim", "near_verbatim")
    rates = [
        ResultColumn((head, _DOCUMENTS), "extraction", metric, why_not=NOT_GENERATED)
        for head, metric in greedy
    ]
    above = [
        ResultColumn((f"{head} − control", _POINTS), "extraction", metric, minus_control=True)
        for head, metric in greedy
    ]
    # Without a control there is nothing to subtract.
    rows = [
        row for _, metric in greedy for row in report.tables.select("extraction", metric, step=None)
    ]
    is_compared = any(row.minus_control is not None for row in rows if row.against is None)
    columns = (
        *rates,
        *(above if is_compared else ()),
        ResultColumn(
            (f"{_PERCENT_90} teacher-forced", _DOCUMENTS), "extraction", "teacher_forced_90"
        ),
        ResultColumn(
            ("Teacher-forced accuracy", f"mean ({fmt.CI})"), "extraction", "token_accuracy"
        ),
    )
    caption = "Documents extracted by greedy decoding, and teacher-forced token accuracy"
    return bucket_table(report, caption, columns, base_detail="same documents")


def build_details(report: AuditReport) -> Table:
    """Build the second table: match details, and the documents that the rates exclude."""

    def plain(heading: Heading, metric: str) -> ResultColumn:
        return ResultColumn(heading, "extraction", metric, how="plain", unit=PLAIN, base="")

    columns: tuple[ResultColumn | Column[BucketRow], ...] = (
        ResultColumn(
            ("Median first divergence", f"token, of {report.method.continuation_tokens:,}"),
            "extraction",
            "first_divergence",
            key={"statistic": "median"},
            unit="tokens",
        ),
        plain(("Extraction strength", "mean, 0 to 1"), "extraction_strength"),
        ResultColumn(_LOGPROB, "extraction", "logprob", why_not="fewer than two texts"),
        plain(("Type-token ratio", "true text"), "type_token_ratio"),
        plain(("Type-token ratio", "model's choices"), "argmax_type_token_ratio"),
        Column(("Tiny margins", "documents"), lambda b: count_tiny(report, b)),
        Column(("Scored", "documents"), lambda b: b.num_documents),
        Column(("Too short", "documents"), lambda b: b.num_too_short),
        Column(
            ("Not auditable", "split, or without loss"),
            lambda b: b.num_cut_too_short + b.num_nothing_supervised,
        ),
        Column(("Not sampled", "documents"), lambda b: b.num_not_sampled),
    )
    return drop_zero_columns(bucket_table(report, "Match details and exclusions", columns))


def build_change_from_base(report: AuditReport) -> Table | None:
    """Build the table of model minus base model; None if no base model was scored."""
    added = (
        (("Verbatim", _POINTS), "verbatim"),
        (("Near-verbatim", _POINTS), "near_verbatim"),
        (("Token accuracy", f"teacher-forced, {_POINTS}"), "token_accuracy"),
        (_LOGPROB, "logprob"),
    )
    columns = [
        ResultColumn(heading, "extraction", metric, key={"against": "base"}, why_not="not measured")
        for heading, metric in added
        if report.tables.select("extraction", metric, against="base")
    ]
    buckets = [bucket.bucket for bucket in report.tables.buckets]
    rows = [column.find(report.tables, bucket=name) for column in columns for name in buckets]
    if not any(row is not None and row.is_known for row in rows):
        return None
    return bucket_table(
        report,
        "Change from base model, same documents",
        columns,
        notes=(
            "The change in the control is what training teaches about this kind of text; any "
            "change beyond it was learned from the documents.",
        ),
    )


def count_tiny(report: AuditReport, bucket: BucketRow) -> int:
    """Return how many documents of a bucket have a result that depends on a tiny margin."""
    row = report.tables.find("extraction", "tiny_margin", bucket.bucket)
    return 0 if row is None else row.num_matched or 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """A bucket without extracted documents whose tokens were learned in part."""

    bucket: str
    gain: ResultRow
    """Token accuracy of the model minus that of the base model, also minus that of the control;
    both intervals are above 0."""


def find_learned(report: AuditReport) -> list[Learned]:
    """Return the trained buckets without extracted documents whose tokens were learned in part.

    A bucket counts only if training is the cause: its teacher-forced token accuracy rose against
    the base model on the same documents, rose more than the control's, both by more than the
    interval; and the blind baseline does not separate trained from control documents by their
    words.
    """
    learned = []
    for bucket in report.tables.buckets:
        risks = report.tables.risks(bucket.bucket).values()
        if bucket.role != "trained" or any(row.num_matched for row in risks):
            continue
        gain = report.tables.find("extraction", "token_accuracy", bucket.bucket, against="base")
        if gain is not None and report.tables.is_gain(gain) and (gain.minus_control_low or 0.0) > 0:
            learned.append(Learned(bucket=bucket.bucket, gain=gain))
    return learned


def describe_learned(report: AuditReport, learned: list[Learned]) -> str:
    """Report by how much token accuracy rose in these buckets; "" without any."""
    if not learned:
        return ""
    metric = report.tables.find_metric("extraction", "token_accuracy")
    bucket = report.tables.control
    control = None
    if bucket is not None:
        control = report.tables.find("extraction", "token_accuracy", bucket.bucket, against="base")
    gains = []
    for row in learned:
        excess = show_minus_control(row.gain, control, metric)
        interval = f"{excess.detail}, {excess.note}" if excess.note else excess.detail
        gains.append(
            f"{fmt.clean_name(row.bucket, 40)}: {fmt.points(row.gain).value}, "
            f"{excess.text} more than in the control ({interval})"
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
        columns.append(Column("Finding", lambda f: Cell(_write_finding(f), kind="hash")))
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


def _write_finding(finding: Finding) -> str:
    """Return the finding's id, with the first characters of its hash."""
    return f"{fmt.hash(finding.text_hmac)}:{fmt.clean_name(finding.probe)}"


_GREEDY_ONLY = (
    "They are extracted by greedy decoding; 'memguard gate' and 'memguard diff' also count what "
    "sampling and attacks extract."
)


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
        text += (
            " A finding's id is the keyed hash of its text (here its first characters) and the "
            "probe; 'findings.csv' has the whole ids, which are the same in every audit with the "
            "same identity key."
        )
    return f"{text} {_GREEDY_ONLY}"
