"""What adaptive attacks got back: a column each beside the rates, and each in full."""

from collections.abc import Iterable, Sequence

from memguard.records import AttackedBucket, AuditReport, BucketScores
from memguard.report.audit_tables import name_bucket
from memguard.report.cells import (
    make_headings,
    show_estimate,
    show_missing,
    show_narrow_rate,
    show_rate,
)
from memguard.report.formatting import CI, format_count, format_of, format_share
from memguard.report.page import Cell, Row, Table
from memguard.report.text import clean_name, clean_text

_NAMES = {
    "beam": "Beam search",
    "beam_search": "Beam search",
    "fill": "Fill in dropped tokens",
    "sampling": "Sampling",
}
_MOST_ATTACKS = 8
_MOST_NOTES = 12


def list_attacks(attacked: Iterable[AttackedBucket]) -> list[str]:
    """Return the names of the attacks, as the record has them, in its order."""
    return list(dict.fromkeys(one.attack for one in attacked))[:_MOST_ATTACKS]


def name_attack(attack: str) -> str:
    """Name an attack for people."""
    spoken = clean_name(attack.replace("_", " "), 40)
    return _NAMES.get(attack, spoken[:1].upper() + spoken[1:])


def head_attack(attack: str, attacked: Sequence[AttackedBucket]) -> tuple[str, str]:
    """Return the heading of an attack's column: its name, and how many answers count."""
    counts = {one.num_queries for one in attacked if one.attack == attack}
    if len(counts) != 1:
        return name_attack(attack), "any answer"
    count = counts.pop()
    return name_attack(attack), "one answer" if count == 1 else f"any of {count:,} answers"


def find_attacked(
    attacked: Iterable[AttackedBucket], attack: str, bucket: str
) -> AttackedBucket | None:
    """Return what an attack got back from a bucket; None where it was not tried."""
    return next((one for one in attacked if (one.attack, one.bucket) == (attack, bucket)), None)


def show_attacked(found: AttackedBucket | None) -> Cell:
    """Show documents of which any answer was right, and of which the first one was."""
    if found is None:
        return show_missing("not attacked")
    first = found.best_verbatim
    if found.num_queries == 1 or not first.num_documents:
        return show_narrow_rate(found.any_verbatim)
    note = f"first: {format_of(first.num_matched, first.num_documents)}"
    return show_narrow_rate(found.any_verbatim, note)


def build_attacks(report: AuditReport) -> Table | None:
    """Build the table of every attack on every bucket, shown on demand; None without any."""
    rows = [
        _build_row(report, bucket, found)
        for bucket in report.buckets
        for attack in list_attacks(report.attacks)
        if (found := find_attacked(report.attacks, attack, bucket.bucket))
    ]
    if not rows:
        return None
    return Table(
        caption="Each attack by bucket",
        columns=make_headings(
            ("Bucket", "attack"),
            ("First answer right", f"documents ({CI})"),
            ("Any answer right", f"documents ({CI})"),
            ("Answers", "of each document"),
            ("Token accuracy", f"of the first answer ({CI})"),
        ),
        rows=(),
        more_rows=tuple(rows),
        more_label="Show each attack with its intervals",
    )


def _build_row(report: AuditReport, bucket: BucketScores, found: AttackedBucket) -> Row:
    accuracy = found.mean_token_accuracy
    return Row(
        head=Cell(
            text=name_bucket(bucket, report).text, detail=name_attack(found.attack), kind="text"
        ),
        cells=(
            show_rate(found.best_verbatim),
            show_rate(found.any_verbatim),
            Cell(text=format_count(found.num_queries)),
            show_estimate(format_share(accuracy)) if accuracy else show_missing("no documents"),
        ),
        tone="control" if bucket.role == "control" else "",
    )


def write_attack_notes(attacked: Iterable[AttackedBucket]) -> tuple[str, ...]:
    """Return what the record says of its attacks, each sentence once."""
    notes = (f"{name_attack(one.attack)}: {clean_text(one.note)}" for one in attacked if one.note)
    return tuple(dict.fromkeys(notes))[:_MOST_NOTES]
