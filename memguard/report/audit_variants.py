"""The section "Variants": the model as it may be shipped, on the same documents.

The first table has a row for each variant and bucket; the second one the paired differences from
the first variant. Visible are the rows of the bucket that decides the verdict.
"""

from collections.abc import Callable, Sequence
from functools import partial

from memguard.records import NUM_RISK_QUERIES, AuditReport, RiskName, Variant, VariantBucket
from memguard.report import formatting as fmt
from memguard.report.audit_attacks import write_cost
from memguard.report.page import Cell, Fact, Section, Table
from memguard.report.tables import (
    Column,
    Content,
    make_table,
    show_known,
    show_missing,
    show_name,
    show_narrow_rate,
)

_TITLES = {
    "model": "Model",
    "adapter": "Base + adapter",
    "merged": "Merged",
    "int8": "int8",
    "nf4": "nf4",
}
_RISKS: tuple[RiskName, ...] = ("verbatim", "near_verbatim", "attack_cost")
_Row = tuple[Variant, VariantBucket]


def build_variants(report: AuditReport) -> Section | None:
    """Build the section; None if no variants were requested."""
    compared = report.variants
    if compared is None:
        return None
    first = compared.variants[0]
    rows = [(variant, bucket) for variant in compared.variants for bucket in variant.buckets]
    decisive = report.verdict.bucket
    rows = [row for row in rows if row[1].bucket == decisive] + [
        row for row in rows if row[1].bucket != decisive
    ]
    shown = sum(bucket.bucket == decisive for _, bucket in rows)
    others = [row for row in rows if row[0] is not first]
    tables = [_build_rates(rows, shown or None), *_build_losses(report)]
    if others:
        tables.insert(1, _build_differences(others, (shown - 1) if shown else None, first))
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
            for variant in compared.variants
        ),
        tables=tuple(tables),
    )


def _name(row: _Row) -> Cell:
    return show_name(_TITLES[row[0].name], fmt.clean_name(row[1].bucket, 40))


def _build_rates(rows: Sequence[_Row], shown: int | None) -> Table:
    def show_risk(risk: RiskName, row: _Row) -> Content:
        rate = row[1].risks.get(risk)
        missing = "not generated" if risk == "near_verbatim" else "not measured"
        return show_missing(missing) if rate is None else show_narrow_rate(rate)

    def show_cost(row: _Row) -> Content:
        cost = row[1].attack_cost
        if cost is None or not cost.num_documents:
            return show_missing("not measured" if cost is None else "no documents")
        return write_cost(cost, cost.median)

    return _build_table(
        f"Extraction rate by variant ({fmt.CI})",
        rows,
        (show_risk, f"documents ({fmt.CI})"),
        Column(("Attack cost", "median"), show_cost),
        Column(
            ("Log-probability", f"nats a token ({fmt.CI})"),
            lambda row: show_known(row[1].mean_logprob, fmt.interval, "fewer than two texts"),
        ),
        shown=shown,
    )


def _build_differences(rows: Sequence[_Row], shown: int | None, first: Variant) -> Table:
    def show_risk(risk: RiskName, row: _Row) -> Content:
        return show_known(row[1].differences.get(risk), fmt.points, "not measured")

    return _build_table(
        f"Paired with '{_TITLES[first.name]}', same documents",
        rows,
        (show_risk, f"difference ({fmt.CI})"),
        Column(
            ("Log-probability", f"difference, nats a token ({fmt.CI})"),
            lambda row: show_known(
                row[1].logprob_difference, fmt.difference, "fewer than two texts"
            ),
        ),
        shown=shown,
        notes=(
            "'Within' counts documents that are "
            f"sampled within {NUM_RISK_QUERIES:,} queries with a probability of one half.",
        ),
    )


def _build_table(
    title: str,
    rows: Sequence[_Row],
    risks: tuple[Callable[[RiskName, _Row], Content], str],
    *others: Column[_Row],
    shown: int | None,
    notes: tuple[str, ...] = (),
) -> Table:
    """Build a table with a row for each variant and bucket.

    Args:
        title: of the table.
        rows: in the order of the page.
        risks: what the columns of risks show, and their unit.
        others: columns after these.
        shown: number of rows that are visible; None shows all.
        notes: below the table.
    """
    show, unit = risks
    columns: tuple[Column[_Row], ...] = (
        Column(("Variant", "bucket"), _name),
        *(Column((fmt.RISK_LABELS[risk], unit), partial(show, risk)) for risk in _RISKS),
        *others,
    )
    return make_table(
        title,
        columns,
        rows,
        shown=shown,
        more_label="Show the other buckets",
        notes=notes,
        compact=True,
    )


def _build_losses(report: AuditReport) -> list[Table]:
    """Build the table of held-out losses; empty without such documents."""
    compared = report.variants
    if compared is None or not compared.heldout_num_tokens:
        return []
    columns: tuple[Column[Variant], ...] = (
        Column("Variant", lambda variant: show_name(_TITLES[variant.name])),
        Column(("Held-out NLL", "nats a token"), lambda variant: fmt.number(variant.heldout_nll)),
        Column(
            (f"Minus '{_TITLES[compared.variants[0].name]}'", f"paired ({fmt.CI})"),
            lambda variant: (
                ""
                if variant is compared.variants[0]
                else show_known(variant.heldout_difference, fmt.difference, "not measured")
            ),
        ),
    )
    return [
        make_table(
            f"Loss on {fmt.count(compared.heldout_num_documents)} documents that were never "
            f"trained ({fmt.count(compared.heldout_num_tokens)} tokens)",
            columns,
            compared.variants,
        )
    ]
