"""The summary tables of the audit page, extraction by repetitions, and the list of findings.

The tables have a row per bucket with the base model's row below: extraction rates and token
accuracy, change from the base model, details and exclusions. Findings are listed by id and hash,
never by text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from memguard.pages import formatting as fmt
from memguard.pages.columns import (
    PLAIN,
    Column,
    Heading,
    count_columns,
    drop_zero_columns,
    make_table,
    show_known,
    show_minus_control,
    show_missing,
    show_name,
    tone_of_bucket,
)
from memguard.pages.page import Cell, Figure, Line, LineChart, Point, Table
from memguard.pages.pivot import ResultColumn, bucket_table
from memguard.records import (
    TRAINED,
    AuditReport,
    BucketRow,
    Finding,
    ResultRow,
    Tables,
    TestRow,
)

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


def build_dose_response(report: AuditReport) -> Figure | None:
    """Build the figure; None if `explain_no_chart` gives a reason."""
    if explain_no_chart(report):
        return None
    buckets = _order(report.tables.buckets)
    doses = _list_doses(buckets)
    has_control = any(bucket.role == "control" for bucket in buckets)
    chart = LineChart(
        description=_describe(report.tables, buckets),
        ticks=tuple(f"{dose:,}" for dose in doses),
        lines=_build_lines(report.tables, buckets, doses),
        y_label="documents, or tokens (%)",
        control_at=doses.index(0) if has_control and 0 in doses else None,
    )
    return Figure(
        key="dose",
        title="Extraction rate by exposure",
        chart=chart,
        caption="Share of documents extracted, and teacher-forced token accuracy, which is not "
        "extraction, by the number of times the documents were trained. Bands are 95 % intervals; "
        f"positions are evenly spaced, not to scale. Documents per position: {_list_n(buckets)}.",
        table=_build_table(report.tables, buckets),
    )


def explain_no_chart(report: AuditReport) -> str:
    """Return the reason why there is no chart; "" if there is one."""
    if not report.dose_response:
        if report.training is None:
            return (
                "No chart is shown: memguard did not train this model, so the number of "
                "repetitions of each document is not known."
            )
        return (
            "No chart is shown: the number of repetitions of each document is not known, or "
            "contradicts the number of training steps."
        )
    if len(_list_doses(_order(report.tables.buckets))) < 2:
        uneven = [
            b for b in report.tables.buckets if b.role == "trained" and b.num_repetitions is None
        ]
        if uneven:
            return (
                "No chart is shown: the documents of a bucket were not all trained the same number "
                "of times, so the bucket has no position on the axis."
            )
        return (
            "No chart is shown: it needs at least two different numbers of repetitions, including "
            "the control's 0."
        )
    return ""


def _list_doses(buckets: Sequence[BucketRow]) -> list[int]:
    return sorted({_dose(bucket) for bucket in buckets})


def _order(buckets: Sequence[BucketRow]) -> list[BucketRow]:
    """Return the buckets with a dose and at least one document, sorted by dose."""
    dosed = [
        bucket
        for bucket in buckets
        if bucket.role in ("trained", "control")
        and bucket.num_documents
        and (bucket.num_repetitions is not None or bucket.role == "control")
    ]
    return sorted(dosed, key=lambda bucket: (_dose(bucket), bucket.bucket))


def _dose(bucket: BucketRow) -> int:
    return bucket.num_repetitions or 0


def _list_n(buckets: Sequence[BucketRow]) -> str:
    counts = [f"{bucket.num_documents:,}" for bucket in buckets[:12]]
    return ", ".join(counts) + (" …" if len(buckets) > 12 else "")


def _build_lines(
    tables: Tables, buckets: Sequence[BucketRow], doses: Sequence[int]
) -> tuple[Line, ...]:
    # The two curves are shifted a little so that equal values stay visible.
    series = (
        ("Near-verbatim", "near", -0.04, "near_verbatim", "trained"),
        ("Verbatim", "verbatim", 0.04, "verbatim", "trained"),
        ("Teacher-forced accuracy", "accuracy", 0.0, "token_accuracy", "trained"),
        ("Base, near-verbatim", "base-near", 0.0, "near_verbatim", "base"),
        ("Base, teacher-forced accuracy", "base-accuracy", 0.0, "token_accuracy", "base"),
    )
    lines = []
    for label, style, shift, metric, model in series:
        placed = [
            _place(
                doses.index(_dose(bucket)) + shift,
                tables.find("extraction", metric, bucket.bucket, model=model),
            )
            for bucket in buckets
        ]
        points = tuple(point for point in placed if point)
        if points:
            lines.append(Line(label=label, style=style, points=points))
    return tuple(lines)


def _place(x: float, row: ResultRow | None) -> Point | None:
    if row is None or row.value is None:
        return None
    low, high = (None, None) if row.ci is None else (100 * row.ci[0], 100 * row.ci[1])
    return Point(x=x, y=100 * row.value, low=low, high=high)


def _write_share(tables: Tables, metric: str, bucket: str, model: str = "trained") -> str:
    row = tables.find("extraction", metric, bucket, model=model)
    return fmt.percent(None if row is None else row.value)


def _describe(tables: Tables, buckets: Sequence[BucketRow]) -> str:
    parts = [
        f"{_dose(b):,} repetitions: verbatim {_write_share(tables, 'verbatim', b.bucket)}, "
        f"near-verbatim {_write_share(tables, 'near_verbatim', b.bucket)}"
        for b in buckets[:12]
    ]
    return "Line chart of extracted documents by number of repetitions. " + "; ".join(parts) + "."


def _build_table(tables: Tables, buckets: Sequence[BucketRow]) -> Table:
    def share(heading: str | tuple[str, str], metric: str, model: str) -> Column[BucketRow]:
        return Column(heading, lambda b: _write_share(tables, metric, b.bucket, model))

    columns: tuple[Column[BucketRow], ...] = (
        Column(
            "Repetitions", lambda b: show_name(fmt.repetitions(_dose(b)), fmt.clean_name(b.bucket))
        ),
        share("Verbatim", "verbatim", "trained"),
        share("Near-verbatim", "near_verbatim", "trained"),
        share(("Token accuracy", "teacher-forced"), "token_accuracy", "trained"),
        share(("Base", "near-verbatim"), "near_verbatim", "base"),
        share(("Base", "token accuracy"), "token_accuracy", "base"),
    )
    return make_table("Chart data", columns, buckets, tone=tone_of_bucket, compact=True)


_MOST_DOSES = 20


def build_trends(report: AuditReport) -> Table | None:
    """Build the table of monotone fits and trend tests; None if no dose is known."""
    trends = [
        test
        for test in report.tables.tests
        if test.test == "cochran-armitage" and report.dose_response
    ]
    if not trends:
        return None
    doses = (trends[0].doses or ())[:_MOST_DOSES]

    def column_of_dose(number: int, dose: int) -> Column[TestRow]:
        heading = (f"{dose:,}", "control" if dose == 0 else "repetitions")
        return Column(heading, lambda t: _show_fitted(t, number, len(doses)))

    columns: tuple[Column[TestRow], ...] = (
        Column(("Rate", "monotone fit"), lambda t: _name(t.metric)),
        *(column_of_dose(number, dose) for number, dose in enumerate(doses)),
        Column(("z", "trend"), lambda t: fmt.number(t.statistic, 2)),
        Column(
            ("p", "trend"), lambda t: show_known(t.p_value, fmt.p, "all rates are 0, or all are 1")
        ),
    )
    shown = [trend for trend in trends[:8] if (trend.doses or ())[:_MOST_DOSES] == doses]
    return make_table(
        "Trend test",
        columns,
        shown,
        notes=(
            "Monotone fit: isotonic regression of the rate on the number of repetitions. p: "
            "Cochran-Armitage test for a trend over the numbers of repetitions, two-sided; a large "
            "p does not prove that there is no trend.",
        ),
        compact=True,
    )


def _show_fitted(trend: TestRow, number: int, num_doses: int) -> Cell | str:
    fitted = (trend.fitted or ())[:_MOST_DOSES]
    return fmt.percent(fitted[number]) if len(fitted) == num_doses else show_missing("no documents")


def _name(metric: str) -> str:
    return fmt.clean_name(metric.replace("_", "-"), 40).capitalize()


def build_copies(report: AuditReport) -> Table | None:
    """Build the k-eidetic table; None if clusters are not known."""
    settings = {m.parameters: m.settings for m in report.tables.list_metrics("extraction")}
    limits = {
        parameters: values["copies_at_most"]
        for parameters, values in settings.items()
        if "copies_at_most" in values
    }
    copies = [
        row
        for row in report.tables.select("extraction", "verbatim", bucket=TRAINED)
        if row.parameters in limits
    ][:20]
    if not copies:
        return None

    def write_limit(row: ResultRow) -> str:
        return f"{limits[row.parameters]:,}"

    columns: tuple[Column[ResultRow], ...] = (
        Column(
            ("Copies", "trained documents with the text"),
            lambda row: (
                "only itself" if limits[row.parameters] == 1 else f"at most {write_limit(row)}"
            ),
        ),
        *count_columns(
            ("Extracted verbatim", "of the audited documents with so few copies"),
            ("Share", "of them"),
            _count,
            "no such document",
        ),
    )
    shown = _drop_repeated(copies)
    left_out = [write_limit(row) for row in copies if row not in shown]
    repeated = f"A limit of {', '.join(left_out)} gives the same counts as the row before."
    return make_table(
        "k-eidetic memorization",
        columns,
        shown,
        notes=(
            "Documents extracted verbatim although few trained documents contain their text. "
            "Documents that share a run of words count as copies, so k is never understated. k "
            "does not count how often each was trained.",
            *([repeated] if left_out else []),
        ),
        compact=True,
    )


def _count(row: ResultRow) -> tuple[int, int]:
    return row.num_matched or 0, row.num_documents


def _drop_repeated(copies: Sequence[ResultRow]) -> list[ResultRow]:
    """Return the rows whose counts differ from those of the row before."""
    return [row for i, row in enumerate(copies) if i == 0 or _count(row) != _count(copies[i - 1])]
