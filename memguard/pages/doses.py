"""Memorization by number of repetitions: the dose-response figure and its tables."""

from collections.abc import Sequence

from memguard.pages import formatting as fmt
from memguard.pages.columns import (
    Column,
    count_columns,
    make_table,
    show_missing,
    show_name,
    tone_of_bucket,
)
from memguard.pages.page import Cell, Figure, Line, LineChart, Point, Section, Table
from memguard.records import RISK_NAMES, TRAINED, AuditReport, BucketRow, ResultRow, Tables, TestRow


def build_doses(report: AuditReport) -> Section:
    """Build the section of extraction by number of repetitions: a figure, or why there is none."""
    figure = build_dose_response(report)
    return Section(
        key="dose",
        title="Extraction by number of repetitions",
        lead=tuple(filter(None, (_describe_risk(report), explain_no_chart(report)))),
        figure=figure,
    )


def _describe_risk(report: AuditReport) -> str:
    """Return the risk of the documents trained most often, which comparisons show too."""
    trained = [b for b in report.tables.buckets if b.role == "trained" and b.num_repetitions]
    most = max(trained, key=lambda bucket: bucket.num_repetitions or 0, default=None)
    found = report.tables.find_risk(most.bucket if most else report.verdict.bucket)
    if found is None:
        return ""
    name, row = found
    method = next((words for known, words in RISK_NAMES.items() if known == name), name)
    documents = "the documents trained most often" if most else "the bucket of most extraction"
    return (
        f"Risk of {documents}: {fmt.counts(row)}, {fmt.percent(row.value)} "
        f"({fmt.percent_range(row.ci)}, {fmt.clean_name(method)})."
    )


def build_dose_response(report: AuditReport) -> Figure | None:
    """Build the figure; None if `explain_no_chart` gives a reason."""
    if explain_no_chart(report):
        return None
    buckets = _order(report.tables.buckets)
    doses = _list_doses(buckets)
    has_control = any(bucket.role == "control" for bucket in buckets)
    lines = _build_lines(report.tables, buckets, doses)
    shown = tuple(line for line in lines if line.style == "near" or any(p.y for p in line.points))
    names = "; ".join(line.label for line in lines if line not in shown)
    zeros = f" Not drawn, because they are 0{fmt.PERCENT} everywhere: {names}." if names else ""
    chart = LineChart(
        description=_describe(report.tables, buckets),
        ticks=tuple(f"{dose:,}" for dose in doses),
        lines=shown,
        y_label="documents, or tokens (%)",
        control_at=doses.index(0) if has_control and 0 in doses else None,
    )
    return Figure(
        key="dose",
        title="Extraction rate by number of repetitions",
        chart=chart,
        caption="Share of documents extracted, and teacher-forced token accuracy, which is not "
        "extraction, by the number of times the documents were trained. Bands are 95 % intervals; "
        f"positions are evenly spaced, not to scale. Documents per position: "
        f"{', '.join(f'{bucket.num_documents:,}' for bucket in buckets)}.{zeros}",
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
        for b in buckets
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


def build_trends(report: AuditReport) -> Table | None:
    """Build the table of monotone fits and trend tests; None if no dose is known."""
    trends = [
        test
        for test in report.tables.tests
        if test.test == "cochran-armitage" and report.dose_response
    ]
    if not trends:
        return None
    doses = trends[0].doses or ()
    no_p = show_missing("all rates are 0, or all are 1")

    def column_of_dose(number: int, dose: int) -> Column[TestRow]:
        def show_fitted(trend: TestRow) -> Cell | str:
            fitted = trend.fitted or ()
            is_whole = len(fitted) == len(doses)
            return fmt.percent(fitted[number]) if is_whole else show_missing("no documents")

        return Column((f"{dose:,}", "control" if dose == 0 else "repetitions"), show_fitted)

    columns: tuple[Column[TestRow], ...] = (
        Column(
            ("Rate", "monotone fit"),
            lambda t: fmt.clean_name(t.metric.replace("_", "-"), 40).capitalize(),
        ),
        *(column_of_dose(number, dose) for number, dose in enumerate(doses)),
        Column(("z", "trend"), lambda t: fmt.number(t.statistic, 2)),
        Column(("p", "trend"), lambda t: no_p if t.p_value is None else fmt.p(t.p_value)),
    )
    shown = [trend for trend in trends if (trend.doses or ()) == doses]
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


def build_copies(report: AuditReport) -> Table | None:
    """Build the k-eidetic table; None if clusters are not known."""
    limits = {
        metric.parameters: metric.settings["copies_at_most"]
        for metric in report.tables.list_metrics("extraction")
        if "copies_at_most" in metric.settings
    }
    copies = [
        row
        for row in report.tables.select("extraction", "verbatim", bucket=TRAINED)
        if row.parameters in limits
    ]
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
            lambda row: row.counts,
            "no such document",
        ),
    )
    # A limit whose counts are those of the one before says nothing new.
    counts = [None, *(row.counts for row in copies)]
    shown = [row for row, before in zip(copies, counts, strict=False) if row.counts != before]
    left_out = [write_limit(row) for row in copies if row not in shown]
    repeated = f"A limit of {', '.join(left_out)} gives the same counts as the row before."
    return make_table(
        "k-eidetic memorization",
        columns,
        shown,
        notes=(
            "Documents extracted verbatim although few trained documents contain their text. "
            "Near-duplicates count as copies, longer texts that only share a passage do not. k "
            "does not count how often each was trained.",
            *([repeated] if left_out else []),
        ),
        compact=True,
    )
