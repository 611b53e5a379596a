"""The section "Variants": the model as it may be shipped, on the same documents.

The first table has a row for each variant and bucket; the second one the paired differences from
the first variant. Visible are the rows of the bucket that decides the verdict.
"""

from collections.abc import Sequence

from memguard.pages import formatting as fmt
from memguard.pages.costs import write_cost
from memguard.pages.page import Cell, Fact, Section, Table
from memguard.pages.pivot import ResultColumn, pivot
from memguard.pages.tables import Column, Content, show_missing, show_name
from memguard.records import NO_DOCUMENTS, NUM_RISK_QUERIES, RISK_PLACES, AuditReport, RiskName

_TITLES = {
    "model": "Model",
    "adapter": "Base + adapter",
    "merged": "Merged",
    "int8": "int8",
    "nf4": "nf4",
}
_RISKS: tuple[RiskName, ...] = ("verbatim", "near_verbatim", "attack_cost")
_FEW = "fewer than two texts"
_Row = tuple[str, str]
"""Names of a variant and a bucket."""


def build_variants(report: AuditReport) -> Section | None:
    """Build the section; None if no variants were requested."""
    if not report.variants:
        return None
    names = [variant.name for variant in report.variants]
    first, decisive = names[0], report.verdict.bucket
    buckets = [bucket.bucket for bucket in report.tables.buckets]
    measured = {(row.variant, row.bucket) for row in report.tables.select("extraction", "verbatim")}
    rows = [(name, bucket) for name in names for bucket in buckets if (name, bucket) in measured]
    rows.sort(key=lambda row: row[1] != decisive)
    shown = sum(bucket == decisive for _, bucket in rows)
    others = [row for row in rows if row[0] != first]
    tables = [_build_rates(report, rows, shown or None)]
    if others:
        tables.append(_build_differences(report, others, (shown - 1) if shown else None, first))
    tables += _build_losses(report)
    return Section(
        key="variants",
        title="Variants",
        short_title="Variants",
        lead=(
            "The same documents were scored with each form in which this model may be shipped. "
            "The weights of all linear layers but the head are quantised; arithmetic is in "
            f"{fmt.clean_name(report.method.dtype, 10)}.",
        ),
        facts=tuple(
            Fact(_TITLES[variant.name], fmt.clean_text(variant.description))
            for variant in report.variants
        ),
        tables=tuple(tables),
    )


def _name(row: _Row) -> Cell:
    return show_name(_TITLES[row[0]], fmt.clean_name(row[1], 40))


def _list_risks(unit: str, against: str | None = None) -> list[ResultColumn]:
    columns = []
    for risk in _RISKS:
        probe, metric, parameters = RISK_PLACES[risk]
        is_near = risk == "near_verbatim" and against is None
        columns.append(
            ResultColumn(
                (fmt.RISK_LABELS[risk], unit),
                probe,
                metric,
                key={"parameters": parameters, "against": against},
                how="narrow",
                why_not="not generated" if is_near else "not measured",
            )
        )
    return columns


def _build_rates(report: AuditReport, rows: Sequence[_Row], shown: int | None) -> Table:
    def show_cost(row: _Row) -> Content:
        cost = report.tables.find(
            "sampling", "log10_queries", row[1], statistic="median", variant=row[0]
        )
        if cost is None or not cost.num_documents:
            return show_missing("not measured" if cost is None else NO_DOCUMENTS)
        return write_cost(cost)

    return _build_table(
        report,
        f"Extraction rate by variant ({fmt.CI})",
        rows,
        *_list_risks(f"documents ({fmt.CI})"),
        Column(("Attack cost", "median"), show_cost),
        ResultColumn(
            ("Log-probability", f"nats a token ({fmt.CI})"), "extraction", "logprob", why_not=_FEW
        ),
        shown=shown,
    )


def _build_differences(
    report: AuditReport, rows: Sequence[_Row], shown: int | None, first: str
) -> Table:
    against = f"variant:{first}"
    return _build_table(
        report,
        f"Paired with '{_TITLES[first]}', same documents",
        rows,
        *_list_risks(f"difference ({fmt.CI})", against),
        ResultColumn(
            ("Log-probability", f"difference, nats a token ({fmt.CI})"),
            "extraction",
            "logprob",
            key={"against": against},
            why_not=_FEW,
        ),
        shown=shown,
        notes=(
            "'Within' counts documents that are "
            f"sampled within {NUM_RISK_QUERIES:,} queries with a probability of one half.",
        ),
    )


def _build_table(
    report: AuditReport,
    title: str,
    rows: Sequence[_Row],
    *columns: ResultColumn | Column[_Row],
    shown: int | None,
    notes: tuple[str, ...] = (),
) -> Table:
    """Build a table with a row for each variant and bucket, ``shown`` of them visible."""
    return pivot(
        report.tables,
        title,
        Column(("Variant", "bucket"), _name),
        columns,
        rows,
        key=lambda row: {"variant": row[0], "bucket": row[1]},
        shown=shown,
        more_label="Show the other buckets",
        notes=notes,
        compact=True,
    )


def _build_losses(report: AuditReport) -> list[Table]:
    """Build the table of held-out losses; empty without such documents."""
    losses = [row for row in report.tables.select("heldout", "nll") if row.variant is not None]
    if not losses:
        return []
    first, bucket = report.variants[0].name, losses[0].bucket
    num_tokens = (report.tables.find_detail("heldout") or {}).get("num_tokens")
    counted = "" if num_tokens is None else f" ({fmt.count(num_tokens)} tokens)"
    minus = ResultColumn(
        (f"Minus '{_TITLES[first]}'", f"paired ({fmt.CI})"),
        "heldout",
        "nll",
        key={"against": f"variant:{first}"},
        unit="nats",
        why_not="not measured",
    )
    table = pivot(
        report.tables,
        f"Loss on {fmt.count(losses[0].num_documents)} documents that were never trained{counted}",
        Column("Variant", lambda name: show_name(_TITLES[name])),
        (
            ResultColumn(
                ("Held-out NLL", "nats a token"), "heldout", "nll", how="plain", unit="nats"
            ),
            Column(
                minus.heading,
                lambda name: (
                    "" if name == first else minus.show(report.tables, variant=name, bucket=bucket)
                ),
            ),
        ),
        [variant.name for variant in report.variants],
        key=lambda name: {"variant": name, "bucket": bucket},
    )
    return [table]
