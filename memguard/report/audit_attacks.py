"""What it takes to get the documents out: attack cost and adaptive attacks beside the rates.

One table has a column for each attack beside the rates; the other one has each attack in full.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from memguard.records import (
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
    make_rows,
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
    "beam_search": "Beam search",
    "fill": "Fill in dropped tokens",
    "sampling": "Sampling",
}
NEVER = "never"
_BOUNDS = (1_000, 1_000_000)
"""Numbers of queries within which documents are counted."""
_MOST_ATTACKS = 8
_MOST_NOTES = 12


def list_attacks(attacked: Iterable[AttackedBucket]) -> list[str]:
    """Return the names of the attacks, as the record has them, in its order."""
    return list(dict.fromkeys(one.attack for one in attacked))[:_MOST_ATTACKS]


def name_attack(attack: str) -> str:
    """Name an attack for people."""
    spoken = fmt.clean_name(attack.replace("_", " "), 40)
    return _NAMES.get(attack, spoken[:1].upper() + spoken[1:])


def head_attack(attack: str, attacked: Sequence[AttackedBucket]) -> tuple[str, str]:
    """Return the heading of an attack's column: its name, and how many answers count."""
    counts = {one.num_queries for one in attacked if one.attack == attack}
    if len(counts) != 1:
        return name_attack(attack), "any answer"
    count = counts.pop()
    return name_attack(attack), "one answer" if count == 1 else f"any of {count:,} answers"


def _find_attacked(
    attacked: Iterable[AttackedBucket], attack: str, bucket: str
) -> AttackedBucket | None:
    """Return what an attack got back from a bucket; None where it was not tried."""
    return next((one for one in attacked if (one.attack, one.bucket) == (attack, bucket)), None)


def _show_attacked(found: AttackedBucket | None) -> Cell:
    """Show documents of which any answer was right, and of which the first one was."""
    if found is None:
        return show_missing("not attacked")
    first = found.best_verbatim
    if found.num_queries == 1 or not first.num_documents:
        return show_narrow_rate(found.any_verbatim)
    note = f"first: {fmt.of(first.num_matched, first.num_documents)}"
    return show_narrow_rate(found.any_verbatim, note)


_Attacked = tuple[BucketScores, AttackedBucket]
"""A bucket, and what one attack got back from it."""


def _build_attacks(report: AuditReport) -> Table | None:
    """Build the table of every attack on every bucket, shown on demand; None without any."""
    attacked = [
        (bucket, found)
        for bucket in report.buckets
        for attack in list_attacks(report.attacks)
        if (found := _find_attacked(report.attacks, attack, bucket.bucket))
    ]
    if not attacked:
        return None
    columns: tuple[Column[_Attacked], ...] = (
        Column(
            ("Bucket", "attack"),
            lambda row: show_name(name_bucket(row[0], report).text, name_attack(row[1].attack)),
        ),
        Column(("First answer right", f"documents ({fmt.CI})"), lambda row: row[1].best_verbatim),
        Column(("Any answer right", f"documents ({fmt.CI})"), lambda row: row[1].any_verbatim),
        Column(("Answers", "of each document"), lambda row: row[1].num_queries),
        Column(
            ("Token accuracy", f"of the first answer ({fmt.CI})"),
            lambda row: show_known(row[1].mean_token_accuracy, fmt.share, "no documents"),
        ),
    )
    return make_table(
        "Each attack by bucket",
        columns,
        make_rows(columns, attacked, lambda row: tone_of_bucket(row[0])),
        shown=0,
        more_label="Show each attack with its intervals",
    )


def write_attack_notes(attacked: Iterable[AttackedBucket]) -> tuple[str, ...]:
    """Return what the record says of its attacks, each sentence once."""
    notes = (
        f"{name_attack(one.attack)}: {fmt.clean_text(one.note)}" for one in attacked if one.note
    )
    return tuple(dict.fromkeys(notes))[:_MOST_NOTES]


_LEAD = (
    "Exact match understates memorization: one wrong token makes a document count as not "
    "extracted, whether a hundred queries give it or 10³⁰.",
    "The attack cost can be compared: queries until one gives the true continuation with a "
    "probability of one half, by the cheapest decoding tried. One attacker is left, who knows "
    "which tokens were dropped and searches for these alone. Attack cost and attacks count "
    "verbatim text only.",
)


def build_attack_section(report: AuditReport) -> Section:
    """Build the section; without numbers it says why."""
    known = bool(report.attack_cost or report.attacks)
    told = _tell(report)
    missing = []
    if not report.attack_cost:
        missing.append(explain_absence(report, "sampling", "does not ask what sampling costs"))
    if not report.attacks:
        missing.append(explain_absence(report, "attacks", "attacks nothing"))
    table = _build_table(report) if known else None
    return Section(
        key="attacks",
        title="Extraction cost",
        short_title="Extraction",
        lead=(*(_LEAD if known else ()), *([told] if told else []), *missing),
        tables=tuple(filter(None, (table, _build_attacks(report)))),
    )


def find_cost(report: AuditReport, bucket: str) -> AttackCostBucket | None:
    """Return the attack cost of a bucket; None where nobody asked."""
    return next((one for one in report.attack_cost if one.bucket == bucket), None)


def write_cost(cost: AttackCostScores, value: float | None) -> str:
    """Write a quantile of the attack cost; "" where there is no document."""
    if not cost.num_documents:
        return ""
    return NEVER if value is None else fmt.queries(value)


def write_cost_in_queries(cost: AttackCostScores, value: float | None) -> str:
    """Write the same with its unit: ``1 query``, ``2,300 queries``, ``never``."""
    written = write_cost(cost, value)
    if written in ("", NEVER):
        return written
    return f"{written}{fmt.NBSP}{'query' if written == '1' else 'queries'}"


def _tell(report: AuditReport) -> str:
    """Say what the documents of the verdict's bucket cost, and which attack got most of them."""
    bucket = next((b for b in report.buckets if b.bucket == report.verdict.bucket), None)
    if bucket is None:
        return ""
    name, sentences = fmt.clean_name(bucket.bucket, 40), []
    found = find_cost(report, bucket.bucket)
    if found and found.model.num_documents:
        sentences.append(f"In {name}, {_tell_cost(found.model)}{_tell_others(report, found)}.")
    tried = [one for one in report.attacks if one.bucket == bucket.bucket]
    if tried:
        best = max(tried, key=lambda one: one.any_verbatim.num_matched)
        matched, documents = best.any_verbatim.num_matched, best.any_verbatim.num_documents
        place = "" if sentences else f" in {name}"
        sentences.append(
            f"The attack that got most{place} is '{name_attack(best.attack)}': "
            f"{fmt.of(matched, documents)} documents."
            if matched
            else f"No attack got a document{place} back, of {documents:,} tried."
        )
    return " ".join(sentences)


def _tell_cost(cost: AttackCostScores) -> str:
    if cost.lowest is None:
        return "no document can be drawn by any way tried"
    cheapest = f"the cheapest {fmt.queries(cost.lowest)}"
    if cost.median is None:
        return f"more than half of the documents can never be drawn, {cheapest}"
    half = write_cost_in_queries(cost, cost.median)
    return f"half of the documents cost at most {half}, {cheapest}"


def _tell_others(report: AuditReport, found: AttackCostBucket) -> str:
    """Say what the median document costs of the base model and in the control."""
    control = next((b.bucket for b in report.buckets if b.role == "control"), None)
    beside = find_cost(report, control) if control not in (None, found.bucket) else None
    others = {"base model": found.base, "control": beside.model if beside else None}
    known = [
        f"{name}: {write_cost(cost, cost.median)}"
        for name, cost in others.items()
        if cost and cost.num_documents
    ]
    return f" (median of the {', of the '.join(known)})" if known else ""


def _build_table(report: AuditReport) -> Table:
    """Build the table of rates by greedy decoding, attack cost and each attack."""

    def column_of_cost(
        heading: Heading, show: Callable[[AttackCostScores], Content]
    ) -> Column[BucketScores]:
        def show_documents(cost: AttackCostScores) -> Content:
            return show(cost) if cost.num_documents else show_missing("no documents")

        def model(bucket: BucketScores) -> Content:
            found = find_cost(report, bucket.bucket)
            return show_known(found.model if found else None, show_documents, "not asked")

        def base(bucket: BucketScores) -> Content | None:
            found = find_cost(report, bucket.bucket)
            shown = show_known(found.base if found else None, show_documents, "not asked")
            return shown if bucket.base else None

        return Column(heading, model, base)

    def column_of_attack(attack: str) -> Column[BucketScores]:
        return Column(
            head_attack(attack, report.attacks),
            lambda b: _show_attacked(_find_attacked(report.attacks, attack, b.bucket)),
        )

    costs = (
        column_of_cost(("Attack cost", f"median (10–90{fmt.PERCENT})"), _show_spread),
        column_of_cost(("Cheapest", "document"), lambda cost: write_cost(cost, cost.lowest)),
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
        notes=(*_name_ways(report), *write_attack_notes(report.attacks)),
        compact=True,
    )


def _show_spread(cost: AttackCostScores) -> Cell:
    low, high = (write_cost(cost, one) for one in (cost.quantile_10, cost.quantile_90))
    note = f"{fmt.of(cost.num_never, cost.num_documents)} {NEVER}" if cost.num_never else ""
    return Cell(write_cost(cost, cost.median), detail=f"{low} to {high}", note=note)


def _show_within(bound: int, cost: AttackCostScores) -> Content:
    return show_known(cost.within.get(bound), show_narrow_rate, "not counted")


def _name_ways(report: AuditReport) -> tuple[str, ...]:
    """Say which ways to draw were tried, and what 'never' means where it stands."""
    if not report.attack_cost:
        return ()
    probe = next((p for p in report.method.probes if p.get("name") == "sampling"), {})
    schemes = probe.get("schemes")
    listed = schemes if isinstance(schemes, list) else []
    ways = "; ".join(_name_scheme(one) for one in listed[:10] if isinstance(one, dict))
    notes = [
        "Ways tried: greedy decoding, which takes one query where it is verbatim"
        f"{f', and drawing ({ways})' if ways else ''}. The cheapest counts, document by document."
    ]
    both = [scores for one in report.attack_cost for scores in (one.model, one.base) if scores]
    if any(scores.num_never for scores in both):
        notes.append("'never': each way tried leaves out a token that the text needs.")
    return tuple(notes)


def _name_scheme(scheme: Mapping[str, Any]) -> str:
    parts = (f"{key.replace('_', '-')} {fmt.value(v)}" for key, v in scheme.items() if v)
    return fmt.clean_text(", ".join(parts), 80)
