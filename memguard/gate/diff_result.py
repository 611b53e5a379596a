"""Two audits -> `AuditDiff`: findings, counts, rates, and what was not compared."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import date

import numpy as np

import memguard
from memguard.gate.diff import (
    NEW_ROW,
    OLD_ROW,
    OTHER_TOKENS,
    Identity,
    MatchedAudits,
    Rows,
    count_findings,
    find_texts,
    list_findings,
    match_audits,
)
from memguard.gate.diff_rates import list_rates, pair_rates
from memguard.gate.diff_sides import DiffSide
from memguard.gate.triage import Triage, apply_triage
from memguard.records.audit import name_finding
from memguard.records.diff import AuditDiff, DiffedAudit, DiffedFinding
from memguard.records.gate import Acceptance

_MOST_DIFFERENCES = 3


def diff_audits(
    old: DiffSide, new: DiffSide, *, triage: Triage | None = None, today: date
) -> AuditDiff:
    """Compare the findings and rates of two audits.

    Args:
        old: the earlier audit.
        new: the later audit, to whose findings the triage applies.
        triage: accepted findings.
        today: decides which acceptances have expired.

    Raises:
        RecordError: see `match_audits`.
    """
    audits = match_audits(old, new)
    entries = [] if triage is None else apply_triage(triage, _list_present(new), today)
    findings = _mark_accepted(list_findings(audits), entries)
    return AuditDiff(
        tool_version=memguard.__version__,
        old=_describe_side(old, audits.old_identities, audits.new_texts),
        new=_describe_side(new, audits.new_identities, audits.old_texts),
        matched_by=audits.matched_by,
        num_texts_in_both=sum(
            text in audits.old_texts for text in _list_trained(new, audits.new_identities)
        ),
        notes=list(_list_notes(audits)),
        counts=count_findings(findings, audits.probes),
        findings=findings,
        rates=list_rates(old.report, new.report),
        paired=pair_rates(audits),
        accepted=entries,
    )


def _list_present(side: DiffSide) -> list[str]:
    """Return the ids of the findings of an audit; those without a key have none."""
    answers = side.answers
    return sorted(
        {
            name_finding(digest, probe)
            for probe, answers_N in answers.extracted.items()
            for digest in answers.text_hmac_N[(answers_N == 1) & side.is_trained_N].tolist()
            if digest is not None
        }
    )


def _mark_accepted(findings: list[DiffedFinding], entries: list[Acceptance]) -> list[DiffedFinding]:
    states = {entry.finding: entry.state for entry in entries if entry.state != "not-found"}
    return [
        finding.model_copy(update={"acceptance": states.get(finding.finding or "")})
        for finding in findings
    ]


def _list_trained(side: DiffSide, identities: Sequence[Identity]) -> list[Identity]:
    """Return the trained texts of an audit, each once."""
    rows = np.flatnonzero(side.is_trained_N).tolist()
    return list(dict.fromkeys(identities[row] for row in rows))


def _describe_side(
    side: DiffSide, identities: Sequence[Identity], others: Mapping[Identity, Rows]
) -> DiffedAudit:
    report, answers = side.report, side.answers
    trained = _list_trained(side, identities)
    num_findings = sum(len(find_texts(side, identities, probe)) for probe in answers.extracted)
    unmatched = [text for text in trained if text[0] in (OLD_ROW, NEW_ROW)]
    return DiffedAudit(
        name=report.run or report.model.name,
        created=report.created,
        report_sha256=side.report_sha256,
        num_findings=num_findings,
        num_documents=int(side.is_trained_N.sum()),
        num_texts=len(trained),
        num_only_here=sum(text not in others for text in trained) - len(unmatched),
        num_unmatched=len(unmatched),
        num_not_sampled=sum(
            bucket.num_not_sampled
            for bucket in report.tables.buckets
            if bucket.role in ("trained", "forget")
        ),
    )


def _list_notes(audits: MatchedAudits) -> Iterator[str]:
    """Yield how documents were matched, and what was not compared."""
    old, new = audits.old, audits.new
    if audits.matched_by == "text":
        yield "Documents are matched by the keyed hash of their text."
    else:
        keys = (
            "The two audits used different identity keys"
            if old.identity_key is not None and new.identity_key is not None
            else "Not both audits used an identity key"
        )
        yield (
            f"{keys}: documents are matched by the ids in the user's data, under which a text may "
            "have changed. Nothing is counted as fixed."
        )
    if new.report.created < old.report.created:
        yield "The old audit is younger than the new one: are they in the wrong order?"
    for probe in audits.probes:
        yield from _note_probe(audits, probe)
    if audits.has_other_tokens:
        yield f"Nothing is counted as new or fixed: {OTHER_TOKENS}."
    for which, side in (("old", old), ("new", new)):
        if missing := sum(bucket.num_not_sampled for bucket in side.report.tables.buckets):
            yield f"The {which} audit scored a sample: {missing:,} documents were left out."
    answering = {*audits.probes}
    others = dict.fromkeys(
        run.name
        for side in (new, old)
        for run in side.report.probe_runs
        if run.name not in answering and run.reason_not_run is None
    )
    left_out = [*others]
    if any(len(side.report.variants) > 1 for side in (old, new)):
        left_out.append("variants of the model")
    if left_out:
        yield f"Not compared: {', '.join(left_out)} (no yes or no for each document)."


def _note_probe(audits: MatchedAudits, probe: str) -> Iterator[str]:
    for which, other, side in (("old", "new", audits.old), ("new", "old", audits.new)):
        if probe not in side.answers.extracted:
            why = side.find_reason_not_run(probe)
            yield f"Only the {other} audit ran {probe} (in the {which} one {why})."
            return
    if differences := audits.differences[probe]:
        listed = ", ".join(differences[:_MOST_DIFFERENCES])
        more = len(differences) - _MOST_DIFFERENCES
        also = f" and {more} more" if more > 0 else ""
        yield (
            f"{probe} was run with other settings ({listed}{also}): none of its findings is "
            "counted as new or fixed where only one audit has it."
        )
