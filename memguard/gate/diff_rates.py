"""Rates of two audits side by side, and their differences on the texts that both asked."""

from memguard.audit.statistics import compute_paired_rates
from memguard.gate.diff import OTHER_TOKENS, MatchedAudits, Rows
from memguard.gate.diff_sides import Asked, DiffSide
from memguard.records.audit import AuditReport
from memguard.records.diff import DiffedRate, PairedRates
from memguard.records.results import ResultRow

_TRAINED_ROLES = ("trained", "forget")


def list_rates(old: AuditReport, new: AuditReport) -> list[DiffedRate]:
    """Return each risk in each trained bucket of either audit, those of the new one first."""
    rows: dict[tuple[str, str], list[ResultRow | None]] = {}
    spoken: dict[str, str] = {}
    for place, report in ((1, new), (0, old)):
        spoken = {m.risk: m.spoken for m in report.tables.metrics if m.risk_rank} | spoken
        for bucket in report.tables.buckets:
            if bucket.role not in _TRAINED_ROLES:
                continue
            for risk, row in report.tables.risks(bucket.bucket).items():
                rows.setdefault((risk, bucket.bucket), [None, None])[place] = row
    return [
        DiffedRate(risk=risk, spoken=spoken[risk], bucket=bucket, old=before, new=after)
        for (risk, bucket), (before, after) in rows.items()
    ]


def pair_rates(audits: MatchedAudits) -> list[PairedRates]:
    """Return for each probe the rates of the trained texts that both audits tested in the same way.

    Of these, the same parts of an answer were measured, of the same tokens. A finding may be fixed
    where the new audit measured more parts than the old one; its rate is not compared. Equal texts
    count once.
    """
    return [_pair(audits, probe) for probe in audits.probes]


def _pair(audits: MatchedAudits, probe: str) -> PairedRates:
    before, after, clusters = [], [], []
    if not (why_not := _find_obstacle(audits, probe)):
        cluster_N = audits.new.answers.cluster_N
        for text, new_rows in audits.new_texts.items():
            asked, was_found = _collect(audits.old, probe, audits.old_texts.get(text, ()))
            also_asked, is_found = _collect(audits.new, probe, new_rows)
            if asked and asked == also_asked:
                before.append(was_found)
                after.append(is_found)
                clusters.append(int(cluster_N[new_rows[0]]))
        if not before:
            why_not = (
                "no trained text was measured with the same parts by both audits: a rate of more "
                "attacks or decodings is not comparable"
            )
    return PairedRates(
        probe=probe,
        num_texts=len(before),
        num_old=sum(before),
        num_new=sum(after),
        num_only_old=sum(b and not a for b, a in zip(before, after, strict=True)),
        num_only_new=sum(a and not b for b, a in zip(before, after, strict=True)),
        difference=compute_paired_rates(after, before, clusters=clusters) if before else None,
        missing_because=why_not,
    )


def _collect(side: DiffSide, probe: str, rows: Rows) -> tuple[set[Asked], bool]:
    """Return what a text was asked, and whether it was found; nothing if it was not trained."""
    asked_N, answers_N = side.asked[probe], side.answers.extracted[probe]
    asked = {asked for row in rows if (asked := asked_N[row]) is not None}
    if not any(side.is_trained_N[row] for row in rows):
        return set(), False
    return asked, any(answers_N[row] == 1 for row in rows)


def _find_obstacle(audits: MatchedAudits, probe: str) -> str | None:
    """Return why no text was tested in the same way; None if some may have been."""
    for which, side in (("old", audits.old), ("new", audits.new)):
        if probe not in side.answers.extracted:
            return f"the {which} audit did not run it: {side.find_reason_not_run(probe)}"
    if audits.matched_by == "id":
        return "documents are matched by id: their texts may have changed"
    if audits.differences[probe]:
        return f"other settings: {', '.join(audits.differences[probe])}"
    if audits.has_other_tokens:
        return OTHER_TOKENS
    return None
