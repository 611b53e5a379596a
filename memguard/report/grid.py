"""Other windows of the same documents: place, prefix and length, against the buckets."""

from memguard.records import AuditReport, BucketScores
from memguard.report.audit_tables import name_bucket
from memguard.report.cells import fold_rows, make_headings
from memguard.report.formatting import CI, format_count
from memguard.report.measured import Group, group_measures, show_measured, show_measured_base
from memguard.report.page import Cell, Row, Section, Table

_METRICS = (
    ("verbatim", "Verbatim, by window"),
    ("token_accuracy", "Token accuracy, by window"),
)
_MOST_BUCKETS = 12
_SHOWN_ROWS = 12


def build_grid(report: AuditReport) -> Section | None:
    """Build the section; None where the suite asks for no other windows."""
    groups = group_measures(report, "grid")
    if not groups:
        return None
    tables = [_build_table(report, groups, *metric) for metric in _METRICS]
    return Section(
        key="grid",
        title="Elsewhere in the documents",
        short_title="Other windows",
        lead=(
            "How much is extracted depends on how much is given, on where it is and on how long "
            "the continuation is: what one window calls forgotten may come out of another. Each "
            "window is given to the model as if the text began there."
            + ("" if report.cut is None else " Of cut documents, tokens count from their part."),
        ),
        tables=tuple(table for table in tables if table),
    )


def _build_table(
    report: AuditReport, groups: list[Group], metric: str, caption: str
) -> Table | None:
    asked = [group for group in groups if metric in group.measures]
    if not asked:
        return None
    buckets = report.buckets[:_MOST_BUCKETS]
    has_base = any(one.base for group in asked for one in group.measures[metric].buckets)
    rows = [_build_row(group, metric, buckets, has_base) for group in asked]
    shown, rest, label = fold_rows(rows, _SHOWN_ROWS)
    left_out = len(report.buckets) - len(buckets)
    return Table(
        caption=f"{caption} ({CI}{'; below: base model' if has_base else ''})",
        columns=make_headings(
            ("Window", "prefix → continuation"), *(_head_bucket(b, report) for b in buckets)
        ),
        rows=shown,
        more_rows=rest,
        more_label=label,
        notes=(f"{left_out:,} more buckets are in the JSON.",) if left_out else (),
        compact=True,
    )


def _head_bucket(bucket: BucketScores, report: AuditReport) -> tuple[str, str]:
    head = name_bucket(bucket, report)
    return head.text, head.detail


def _build_row(group: Group, metric: str, buckets: list[BucketScores], has_base: bool) -> Row:
    prefix, size, offset = (
        _read(group, name) for name in ("prefix_tokens", "continuation_tokens", "offset")
    )
    start = "from the first token" if offset == "0" else f"from token {offset}"
    return Row(
        head=Cell(text=f"{prefix} → {size} tokens", detail=start, kind="text"),
        cells=tuple(_show(group, metric, bucket.bucket, has_base) for bucket in buckets),
    )


def _read(group: Group, name: str) -> str:
    value = group.parameters.get(name)
    return format_count(value) if isinstance(value, int) else "?"


def _show(group: Group, metric: str, bucket: str, has_base: bool) -> Cell:
    """Show the model's number, and below it the base model's without its interval."""
    cell = show_measured(group, metric, bucket)
    base = show_measured_base(group, metric, bucket) if has_base else None
    note = f"base: {base.text}" if base and base.text else ""
    return Cell(text=cell.text, detail=cell.detail, bar=cell.bar, kind=cell.kind, note=note)
