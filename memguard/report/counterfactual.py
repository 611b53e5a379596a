"""What this training added: model minus base model, bucket by bucket."""

from memguard.records import AuditReport, MeasuredBucket
from memguard.report.audit_tables import name_bucket
from memguard.report.cells import make_headings, show_estimate, show_missing
from memguard.report.formatting import CI, format_difference, format_points
from memguard.report.measured import Group, find_measured, group_measures
from memguard.report.page import Cell, Row, Table

_METRICS = (
    ("verbatim", "Verbatim", f"points ({CI})"),
    ("near_verbatim", "Near-verbatim", f"points ({CI})"),
    ("token_accuracy", "Token accuracy", f"teacher-forced, points ({CI})"),
    ("logprob", "Log-probability", f"nats a token ({CI})"),
)


def build_counterfactual(report: AuditReport) -> Table | None:
    """Build the table from the extraction probe; None where no base model was scored."""
    groups = group_measures(report, "extraction")
    if not groups:
        return None
    group = groups[0]
    shown = [one for one in _METRICS if one[0] in group.measures]
    found = [one for name, *_ in shown for one in group.measures[name].buckets]
    if not any(one.counterfactual for one in found):
        return None
    rows = tuple(
        Row(
            head=name_bucket(bucket, report),
            cells=tuple(_show(group, name, bucket.bucket) for name, *_ in shown),
            tone="control" if bucket.role == "control" else "",
        )
        for bucket in report.buckets
    )
    return Table(
        caption="Change from base model, same documents",
        columns=make_headings("Bucket", *((label, unit) for _, label, unit in shown)),
        rows=rows,
        notes=(
            "Counterfactual: the base model stands for a model that never saw the document. In "
            "the control the difference is what training teaches of the kind of text; what goes "
            "beyond it was learned of the documents. Intervals: jackknife over clusters of "
            "near-duplicates.",
        ),
    )


def _show(group: Group, metric: str, bucket: str) -> Cell:
    found: MeasuredBucket | None = find_measured(group, metric, bucket)
    if found is None or found.counterfactual is None:
        empty = found is not None and not found.num_documents
        return show_missing("no documents" if empty else "not measured")
    if group.measures[metric].unit in ("documents", "share"):
        return show_estimate(format_points(found.counterfactual))
    return show_estimate(format_difference(found.counterfactual))
