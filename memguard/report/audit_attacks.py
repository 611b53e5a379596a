"""The section "Extraction cost": attack cost and adaptive attacks.

The first table shows the extraction rates, the attack cost and one column for each attack. The
second one lists each attack with its intervals.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from memguard.records import (
    MIN_FOR_QUANTILES,
    AttackCostBucket,
    AttackCostScores,
    AttackedBucket,
    AuditReport,
    BucketScores,
)
from memguard.report import formatting as fmt
from memguard.report.audit_probes import explain_absence
from memguard.report.page import Cell, Section, Table
from memguard.report.tables import (
    Column,
    Content,
    Heading,
    bucket_table,
    make_table,
    name_bucket,
    scores_column,
    show_known,
    show_missing,
    show_name,
    show_narrow_rate,
    tone_of_bucket,
)

_NAMES = {
    "beam": "Beam search",
    "fill": "Fill in dropped tokens",
}
NEVER = "never"
_BOUNDS = (1_000, 1_000_000)
"""Query budgets for which the extracted documents are counted."""
_MOST_ATTACKS = 8
_MOST_NOTES = 12


def list_attacks(attacked: Iterable[AttackedBucket]) -> list[str]:
    """Return the names of the attacks in the order of the record."""
    return list(dict.fromkeys(row.attack for row in attacked))[:_MOST_ATTACKS]


def name_attack(attack: str) -> str:
    """Return the display name of an attack."""
    return _NAMES.get(attack) or fmt.clean_words(attack)


def head_attack(attack: str, attacked: Sequence[AttackedBucket]) -> tuple[str, str]:
    """Return the heading of an attack's column: its name and the number of answers counted."""
    counts = {row.num_queries for row in attacked if row.attack == attack}
    if len(counts) != 1:
        return name_attack(attack), "any answer"
    count = counts.pop()
    return name_attack(attack), "one answer" if count == 1 else f"any of {count:,} answers"


def _find_attacked(
    attacked: Iterable[AttackedBucket], attack: str, bucket: str
) -> AttackedBucket | None:
    """Return the result of an attack on a bucket; None if the attack did not run on it."""
    return next((row for row in attacked if (row.attack, row.bucket) == (attack, bucket)), None)


def _show_attacked(result: AttackedBucket | None) -> Cell:
    """Show how many documents any answer extracted, and how many the first answer did."""
    if result is None:
        return show_missing("not attacked")
    first = result.best_verbatim
    if result.num_queries == 1 or not first.num_documents:
        return show_narrow_rate(result.any_verbatim)
    note = f"first: {fmt.of(first.num_matched, first.num_documents)}"
    return show_narrow_rate(result.any_verbatim, note)


_Attacked = tuple[BucketScores, AttackedBucket]
"""A bucket and the result of one attack on it."""


def _build_attacks(report: AuditReport) -> Table | None:
    """Build the table of every attack on every bucket, collapsed; None without attacks."""
    attacked = [
        (bucket, result)
        for bucket in report.buckets
        for attack in list_attacks(report.attacks)
        if (result := _find_attacked(report.attacks, attack, bucket.bucket))
    ]
    if not attacked:
        return None
    columns: tuple[Column[_Attacked], ...] = (
        Column(
            ("Bucket", "attack"),
            lambda row: show_name(name_bucket(row[0], report).text, name_attack(row[1].attack)),
        ),
        Column(("First answer matches", f"documents ({fmt.CI})"), lambda row: row[1].best_verbatim),
        Column(("Any answer matches", f"documents ({fmt.CI})"), lambda row: row[1].any_verbatim),
        Column(("Answers", "per document"), lambda row: row[1].num_queries),
        Column(
            ("Token accuracy", f"of the first answer ({fmt.CI})"),
            lambda row: show_known(row[1].mean_token_accuracy, fmt.share, "no documents"),
        ),
    )
    return make_table(
        "Each attack by bucket",
        columns,
        attacked,
        tone=lambda row: tone_of_bucket(row[0]),
        shown=0,
        more_label="Show each attack with its intervals",
    )


def write_attack_notes(attacked: Iterable[AttackedBucket]) -> tuple[str, ...]:
    """Return the record's notes on its attacks, each once."""
    notes = (
        f"{name_attack(row.attack)}: {fmt.clean_text(row.note)}" for row in attacked if row.note
    )
    return tuple(dict.fromkeys(notes))[:_MOST_NOTES]


_LEAD = (
    "Exact match understates memorization: one wrong token makes a document count as not "
    "extracted, whether sampling needs a hundred queries to extract it or 10³⁰.",
    "The attack cost is the number of queries after which the true continuation has been "
    "generated with a probability of one half, by the cheapest decoding method that ran. The "
    "attack that fills in dropped tokens assumes an attacker who knows which tokens the "
    "mitigation dropped and searches for these only. Attack cost and attacks count verbatim text "
    "only.",
)


def build_attack_section(report: AuditReport) -> Section:
    """Build the section; if nothing was measured, it gives the reason."""
    has_results = bool(report.attack_cost or report.attacks)
    summary = _summarise(report)
    missing = []
    if not report.attack_cost:
        missing.append(explain_absence(report, "sampling", "does not measure the cost of sampling"))
    if not report.attacks:
        missing.append(explain_absence(report, "attacks", "runs no attacks"))
    table = _build_table(report) if has_results else None
    return Section(
        key="attacks",
        title="Extraction cost",
        short_title="Extraction",
        lead=(*(_LEAD if has_results else ()), *([summary] if summary else []), *missing),
        tables=tuple(filter(None, (table, _build_attacks(report)))),
    )


def write_cost(cost: AttackCostScores, value: float | None) -> str:
    """Format a quantile of the attack cost; "" if there are no documents."""
    if not cost.num_documents:
        return ""
    if cost.num_documents < MIN_FOR_QUANTILES:
        return f"not shown below {MIN_FOR_QUANTILES} documents"
    return NEVER if value is None else fmt.queries(value)


def write_cost_in_queries(cost: AttackCostScores, value: float | None) -> str:
    """Format a quantile of the attack cost with its unit: ``1 query``, ``2,300 queries``."""
    written = write_cost(cost, value)
    if written in ("", NEVER) or value is None:
        return written
    return f"{written}{fmt.NBSP}{'query' if written == '1' else 'queries'}"


def _summarise(report: AuditReport) -> str:
    """Summarise attack cost and best attack for the bucket of the verdict."""
    bucket = next((b for b in report.buckets if b.bucket == report.verdict.bucket), None)
    if bucket is None:
        return ""
    name, sentences = fmt.clean_name(bucket.bucket, 40), []
    cost = report.find_cost(bucket.bucket)
    if cost and cost.model.num_documents:
        sentences.append(
            f"In {name}, {_describe_cost(cost.model)}{_describe_others(report, cost)}."
        )
    attacked = [row for row in report.attacks if row.bucket == bucket.bucket]
    if attacked:
        best = max(attacked, key=lambda row: row.any_verbatim.num_matched)
        matched, documents = best.any_verbatim.num_matched, best.any_verbatim.num_documents
        place = "" if sentences else f" in {name}"
        sentences.append(
            f"The attack that extracts most{place} is '{name_attack(best.attack)}': "
            f"{fmt.of(matched, documents)} documents."
            if matched
            else f"No attack extracts any of the {documents:,} attacked documents{place}."
        )
    return " ".join(sentences)


def _describe_cost(cost: AttackCostScores) -> str:
    bound = max(_BOUNDS)
    within = cost.within.get(bound)
    if within is None:
        counted = "the extracted documents are not counted"
    else:
        matched = fmt.of(within.num_matched, within.num_documents)
        counted = f"{matched} documents could be obtained with up to {bound:,} attempts"
    if cost.num_documents < MIN_FOR_QUANTILES:
        return counted
    if cost.median is None:
        return f"{counted}; more than half of the documents can never be generated"
    half = write_cost_in_queries(cost, cost.median)
    return f"{counted}; half of the documents cost at most {half}"


def _describe_others(report: AuditReport, cost: AttackCostBucket) -> str:
    """Give the median cost with the base model and of the control documents."""
    control = None if report.control is None else report.control.bucket
    control_cost = report.find_cost(control) if control != cost.bucket else None
    others = {"base model": cost.base, "control": control_cost.model if control_cost else None}
    medians = [
        f"{name}: {write_cost(scores, scores.median)}"
        for name, scores in others.items()
        if scores and scores.num_documents >= MIN_FOR_QUANTILES
    ]
    return f" (median of the {', of the '.join(medians)})" if medians else ""


def _build_table(report: AuditReport) -> Table:
    """Build the table of rates by greedy decoding, attack cost and each attack."""

    def column_of_cost(
        heading: Heading, show: Callable[[AttackCostScores], Content]
    ) -> Column[BucketScores]:
        def show_documents(cost: AttackCostScores) -> Content:
            return show(cost) if cost.num_documents else show_missing("no documents")

        def model(bucket: BucketScores) -> Content:
            cost = report.find_cost(bucket.bucket)
            return show_known(cost.model if cost else None, show_documents, "not measured")

        def base(bucket: BucketScores) -> Content | None:
            cost = report.find_cost(bucket.bucket)
            shown = show_known(cost.base if cost else None, show_documents, "not measured")
            return shown if bucket.base else None

        return Column(heading, model, base)

    def column_of_attack(attack: str) -> Column[BucketScores]:
        return Column(
            head_attack(attack, report.attacks),
            lambda b: _show_attacked(_find_attacked(report.attacks, attack, b.bucket)),
        )

    costs = (
        column_of_cost(("Attack cost", f"median (10–90{fmt.PERCENT})"), _show_spread),
        *(column_of_cost((f"Within {n:,}", "queries"), partial(_show_within, n)) for n in _BOUNDS),
    )
    columns = (
        scores_column(("Verbatim", "greedy answer"), lambda s: show_narrow_rate(s.verbatim)),
        scores_column(("Near-verbatim", "documents"), lambda s: show_narrow_rate(s.near_verbatim)),
        *(costs if report.attack_cost else ()),
        *map(column_of_attack, list_attacks(report.attacks)),
    )
    return bucket_table(
        report,
        f"Extraction rate by attack ({fmt.CI})",
        columns,
        notes=(*_describe_decoding(report), *write_attack_notes(report.attacks)),
        compact=True,
    )


def _show_spread(cost: AttackCostScores) -> Cell:
    if cost.num_documents < MIN_FOR_QUANTILES:
        return show_missing(f"fewer than {MIN_FOR_QUANTILES} documents")
    low, high = (write_cost(cost, value) for value in (cost.quantile_10, cost.quantile_90))
    note = f"{fmt.of(cost.num_never, cost.num_documents)} {NEVER}" if cost.num_never else ""
    return Cell(write_cost(cost, cost.median), detail=f"{low} to {high}", note=note)


def _show_within(bound: int, cost: AttackCostScores) -> Content:
    return show_known(cost.within.get(bound), show_narrow_rate, "not counted")


def _describe_decoding(report: AuditReport) -> tuple[str, ...]:
    """List the decoding methods, and explain 'never' if it occurs."""
    if not report.attack_cost:
        return ()
    probe = next((p for p in report.method.probes if p.get("name") == "sampling"), {})
    schemes = probe.get("schemes")
    listed = schemes if isinstance(schemes, list) else []
    sampling = "; ".join(_name_scheme(item) for item in listed[:10] if isinstance(item, dict))
    notes = [
        f"Decoding: greedy{f' and sampling ({sampling})' if sampling else ''}. For each document "
        "the cheapest method counts; greedy decoding takes one query if its text is verbatim."
    ]
    both = [scores for cost in report.attack_cost for scores in (cost.model, cost.base) if scores]
    if any(scores.num_never for scores in both):
        notes.append("'never': every decoding method excludes a token of the text.")
    return tuple(notes)


def _name_scheme(scheme: Mapping[str, Any]) -> str:
    parts = (f"{key.replace('_', '-')} {fmt.value(v)}" for key, v in scheme.items() if v)
    return fmt.clean_text(", ".join(parts), 80)
