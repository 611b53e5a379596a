"""What the model writes in place of the continuation, and how near that is."""

from memguard.records import AuditReport, BucketScores
from memguard.report.audit_tables import name_bucket
from memguard.report.cells import fold_rows, make_headings
from memguard.report.formatting import CI, format_settings
from memguard.report.measured import (
    PLAIN,
    Group,
    group_measures,
    show_measured,
    show_measured_base,
)
from memguard.report.page import Cell, Row, Section, Table
from memguard.report.text import clean_name

_METRICS = (
    ("rouge_l", "ROUGE-L", "mean", PLAIN),
    ("longest_copied_run", "Longest copied run", "tokens, mean", ""),
    ("edit_distance", "Edit distance", "of its length, mean", ""),
    ("near_verbatim", "Near-verbatim", "documents", ""),
    ("bleu_above_0.75", "BLEU above 0.75", "documents", ""),
    ("type_token_ratio", "Type-token ratio", "as written, mean", PLAIN),
)
"""Name, heading, what stands below it, and how it is written."""
_SHOWN_ROWS = 16


def build_generation(report: AuditReport) -> Section | None:
    """Build the section; None where nothing was generated."""
    groups = group_measures(report, "generation")
    if not groups:
        return None
    shown = [one for one in _METRICS if any(one[0] in group.measures for group in groups)]
    rows = [
        row
        for bucket in report.buckets
        for group in groups
        for row in _build_rows(report, bucket, group, [(name, unit) for name, *_, unit in shown])
    ]
    first, rest, label = fold_rows(rows, _SHOWN_ROWS)
    return Section(
        key="generation",
        title="What the model writes",
        short_title="Writing",
        lead=(
            "Token by token from the prefix on, not corrected by the true text: a passage that is "
            "shifted, or changed in a few words, still counts by its share. Read every overlap "
            "beside the control's, which is what texts of this kind have in common anyway, and "
            "beside the type-token ratio: a model that repeats itself overlaps by accident.",
        ),
        tables=(
            Table(
                caption=f"What was written, compared with the true continuation ({CI})",
                columns=make_headings(
                    ("Bucket", "how it was written"),
                    *((label, below) for _, label, below, _ in shown),
                ),
                rows=first,
                more_rows=rest,
                more_label=label,
                compact=True,
            ),
        ),
    )


def _build_rows(
    report: AuditReport, bucket: BucketScores, group: Group, metrics: list[tuple[str, str]]
) -> list[Row]:
    how = _name_decoding(group)
    rows = [
        Row(
            head=Cell(text=name_bucket(bucket, report).text, detail=how, kind="text"),
            cells=tuple(show_measured(group, name, bucket.bucket, unit) for name, unit in metrics),
            tone="control" if bucket.role == "control" else "",
        )
    ]
    base = tuple(show_measured_base(group, name, bucket.bucket, unit) for name, unit in metrics)
    if any(cell.text for cell in base):
        head = Cell(text="Base model", detail=how, kind="text")
        rows.append(Row(head=head, cells=base, tone="base"))
    return rows


def _name_decoding(group: Group) -> str:
    decoding = group.parameters.get("decoding")
    if not isinstance(decoding, str):
        return format_settings(group.parameters)
    return "greedy" if decoding == "greedy" else f"drawn, {clean_name(decoding, 40)}"
