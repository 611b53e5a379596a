"""The sentences of the verdict, and the record that holds them.

sentence   at most 20 words: what was extracted, against the control, why it is not another level
scope      how much was audited and attacked, what else was extracted, what was not run
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memguard.audit.selection import BucketOutline
from memguard.audit.verdict import (
    Canaries,
    Coverage,
    Decision,
    DocumentResults,
    count_documents,
    decide_level,
    judge_membership,
)
from memguard.records import BucketRow, ResultRow, Tables
from memguard.records.percent import format_percent
from memguard.records.verdict import Verdict, VerdictCounts

_WHY_INCONCLUSIVE = {
    "collapsed": "the model seems collapsed",
    "not-generated": "near-verbatim text was not tested",
    "too-short": "most trained documents were too short",
    "too-few": "too few to say more",
}
_WITHOUT_CONTROL = ("canaries", "base-too", "other-kind", "forgotten", "canaries-too")
"""Reasons whose sentence does not count control documents."""
_MAX_BUCKET_WORDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictInput:
    """The results of an audit that its verdict depends on."""

    ids: Sequence[str]
    documents: DocumentResults
    canaries: Canaries | None
    coverage: Coverage
    tables: Tables
    """Of the report."""
    outlines: Sequence[BucketOutline]
    membership: Mapping[str, NDArray[np.float64]]
    """``[N]`` membership scores by name."""
    has_base: bool
    dose_response: bool
    """Whether the counts of repetitions are valid and may be stated."""
    not_run: Sequence[str] = ()
    """Names of the probes that did not run."""


def build_verdict(found: VerdictInput) -> Verdict:
    """Decide the verdict and write its sentences."""
    decision = decide_level(found.documents, found.canaries, found.coverage)
    group = _choose_group(found.documents, decision)
    bucket, metric = _find_worst(found, decision)
    return Verdict(
        level=decision.level,
        reason=decision.reason,
        sentence=_write_sentence(found, decision, group),
        scope=_write_scope(found, decision, group),
        membership=judge_membership(
            found.membership,
            found.ids,
            found.documents,
            has_base=found.has_base,
            is_other_kind=found.coverage.is_other_kind,
        ),
        trained=group.trained,
        control=group.control,
        base=group.base if found.has_base else None,
        test=decision.test,
        bucket=bucket,
        metric=metric,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """The documents that the sentence counts."""

    bucket: str | None
    """Name of the bucket; None for all trained documents."""
    is_attacked: bool
    """Whether it counts attacked documents, by the attacks."""
    trained: VerdictCounts
    control: VerdictCounts
    base: VerdictCounts
    num_known: int
    """Extracted trained documents that the base model produces too."""


def _choose_group(documents: DocumentResults, decision: Decision) -> _Group:
    """Return the documents of the test that decided, or those of all buckets.

    If only attacks extracted trained documents, these are the attacked ones. Control documents that
    only other methods extracted are counted too, unless a test decided.
    """
    trained_N, control_N = documents.is_trained_N, documents.is_control_N
    matched_N, bucket = documents.is_extracted_N, None
    is_attacked, is_test = False, decision.reason in ("control", "other-kind")
    if is_test and decision.test is not None:
        bucket = decision.test.bucket
        is_attacked = decision.test.documents == "attacked"
    elif decision.level == "extracted":
        is_attacked = not (matched_N & trained_N).any() and bool(
            (documents.is_extracted_by_attack_N & trained_N).any()
        )
    if bucket is not None:
        trained_N = trained_N & (documents.bucket_N == bucket)
    if is_attacked:
        matched_N = documents.is_extracted_by_attack_N
        trained_N = trained_N & documents.is_attacked_N
        control_N = control_N & documents.is_attacked_N
    control = count_documents(documents, control_N, matched_N)
    by_any = count_documents(documents, documents.is_control_N, documents.was_extracted_N)
    if not is_test and not control.num_matched and by_any.num_matched:
        control = by_any
    return _Group(
        bucket=bucket,
        is_attacked=is_attacked,
        trained=count_documents(documents, trained_N, matched_N),
        control=control,
        base=count_documents(documents, trained_N, documents.is_of_base_N),
        num_known=int((trained_N & matched_N & documents.is_of_base_N).sum()),
    )


def _write_sentence(found: VerdictInput, decision: Decision, group: _Group) -> str:
    if decision.level == "memorized":
        return _write_memorized(found, decision, group)
    if decision.level == "extracted":
        return _write_extracted(found, decision, group)
    others = _name_unseen(found, group)
    trained = group.trained
    if decision.reason == "not-trained":
        return f"No audited document was trained in full{others}; nothing can be said."
    none = f"None of the {_count(trained.num_documents, 'training document')} was extracted"
    if trained.num_documents == 1:
        none = "The only training document was not extracted"
    if decision.reason == "not-generated" and found.coverage.is_limited:
        return f"{none}{others}; generation ended at its limit of time."
    if decision.reason is not None:
        return f"{none}{others}; {_WHY_INCONCLUSIVE[decision.reason]}."
    assert trained.ci is not None, "none-found needs 30 clusters"
    return f"{none} (true share up to {format_percent(trained.ci[1])}){others}."


def _write_memorized(found: VerdictInput, decision: Decision, group: _Group) -> str:
    if decision.reason == "canaries":
        canaries = found.canaries
        assert canaries is not None, "they decided"
        return (
            f"{_of(canaries.num_trained_extracted, canaries.num_trained, 'trained canary')} "
            f"extracted, none of {_count(canaries.num_references, 'reference')}: the model "
            "memorized random secrets."
        )
    assert decision.test is not None, "it decided"
    mine, other = decision.test.trained, decision.test.control
    # What the base model produces is not counted by the test.
    is_part = (mine.num_matched, other.num_matched) != (
        group.trained.num_matched,
        group.control.num_matched,
    )
    start = _describe_matched(found, group, mine, ", unknown to the base model" if is_part else "")
    if is_part:
        return f"{start}; {_of_unseen(other)}."
    return f"{start}, {_of_unseen(other)}: the model memorized training text."


def _write_extracted(found: VerdictInput, decision: Decision, group: _Group) -> str:
    documents, reason = found.documents, decision.reason
    if reason == "forgotten":
        forgotten = count_documents(documents, documents.is_forgotten_N, documents.was_extracted_N)
        text = (
            f"{forgotten.num_matched} of {forgotten.num_documents} documents to be forgotten "
            f"{'is' if forgotten.num_matched == 1 else 'are'} still extracted"
        )
        trained = group.trained
        if not trained.num_documents:
            return f"{text}; no audited document was trained in full."
        return f"{text}, {trained.num_matched} of {trained.num_documents} training documents."
    if reason == "canaries-too":
        canaries = found.canaries
        assert canaries is not None, "they were extracted"
        return (
            f"{_of(canaries.num_trained_extracted, canaries.num_trained, 'trained canary')} "
            f"extracted, and {canaries.num_references_extracted} of "
            f"{_count(canaries.num_references, 'reference')} too: chance is not excluded."
        )
    mine, other = group.trained, group.control
    control_too = f", and {_of_unseen(other)} too"
    if group.is_attacked:
        # Not always by attacks.
        control_too = f"; {_of_unseen(other)} {_were(other.num_matched)} extracted"
    endings = {
        "no-control": "; without unseen documents the cause cannot be told",
        "base-too": f"; the base model produces {'it' if mine.num_matched == 1 else 'them'} too",
        "other-kind": "; the control is another kind of text, which may explain this",
        "control-too": f"{control_too}: chance is not excluded",
        "too-few": f", {group.num_known} also from the base model: too few others to tell why"
        if group.num_known
        else f", {_of_unseen(other)}: too few to tell the cause",
    }
    assert reason is not None, "an extracted document has a reason"
    return f"{_describe_matched(found, group, mine)}{endings[reason]}."


def _describe_matched(
    found: VerdictInput, group: _Group, counts: VerdictCounts, which: str = ""
) -> str:
    """Return the start of a sentence: how many of its documents were extracted, and ``which``."""
    number = f"{counts.num_matched} of {counts.num_documents}"
    if group.is_attacked:
        return f"Attacks extracted {number} attacked training documents{which}"
    which = f"{which}," if which else ""
    documents = _name_documents(found, group.bucket)
    return f"{number} {documents}{which} {_were(counts.num_matched)} extracted"


def _name_documents(found: VerdictInput, bucket: str | None) -> str:
    if bucket is None:
        return "training documents"
    row = next(row for row in found.tables.buckets if row.bucket == bucket)
    counts = [row.num_repetitions for row in found.tables.buckets if row.role == "trained"]
    is_clear = found.dose_response and counts.count(row.num_repetitions) == 1
    if not is_clear or row.num_repetitions is None:
        # The sentence has at most 20 words.
        is_short = len(bucket.split()) <= _MAX_BUCKET_WORDS
        return f"documents of '{bucket}'" if is_short else "documents of one bucket"
    times = "once" if row.num_repetitions == 1 else f"{row.num_repetitions:,} times"
    return f"documents trained {times}"


def _name_unseen(found: VerdictInput, group: _Group) -> str:
    """Name extracted control documents and references where no trained document was extracted."""
    control, canaries = group.control, found.canaries
    num_references = 0 if canaries is None else canaries.num_references_extracted
    if control.num_matched and num_references:
        return f", but {control.num_matched + num_references:,} unseen texts were"
    if control.num_matched:
        verb = _were(control.num_matched)
        return f", but {control.num_matched} of {control.num_documents} unseen {verb}"
    if canaries is not None and num_references:
        references = _count(canaries.num_references, "reference")
        return f", but {num_references} of {references} {_were(num_references)}"
    return ""


def _of_unseen(counts: VerdictCounts) -> str:
    return f"{counts.num_matched} of {counts.num_documents} unseen ones"


def _of(number: int, total: int, what: str) -> str:
    return f"{number} of {_count(total, what)} {_were(number)}"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _count(number: int, what: str) -> str:
    if number != 1:
        what = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number:,} {what}"


# -- scope -----------------------------------------------------------------------------------------


def _write_scope(found: VerdictInput, decision: Decision, group: _Group) -> str:
    documents = found.documents
    trained = count_documents(documents, documents.is_trained_N, documents.is_extracted_N)
    total = found.coverage.num_trained
    left_out = [
        f"{number:,} {why}"
        for number, why in (
            (found.coverage.num_too_short, "too short or not auditable"),
            (_sum_not_sampled(found.outlines), "not in the sample"),
        )
        if number
    ]
    audited = f"{trained.num_documents:,} of {_count(total, 'trained document')}"
    but = f" ({', '.join(left_out)})" if left_out else ""
    parts = [f"Audited: {audited}{_write_texts(trained)}{but}; {_write_attacked(documents)}."]
    parts += [f"{text}." for text in _list_others(found, decision, group)]
    if found.not_run:
        parts.append(f"Not run: {', '.join(found.not_run)}.")
    parts += _list_not_generated(found.coverage)
    return " ".join(parts)


def _list_not_generated(coverage: Coverage) -> list[str]:
    """Say what was not generated; nothing if all was."""
    if coverage.num_not_generated:
        total = coverage.num_generated + coverage.num_not_generated
        return [
            f"Near-verbatim text of {coverage.num_not_generated:,} of {_count(total, 'document')} "
            "was not generated: the limit of time was reached."
        ]
    return [] if coverage.was_generated else ["Near-verbatim text was not generated."]


def _write_texts(counts: VerdictCounts) -> str:
    if counts.num_clusters == counts.num_documents:
        return ""
    return f", {counts.num_clusters:,} different text{'s' * (counts.num_clusters != 1)}"


def _write_attacked(documents: DocumentResults) -> str:
    num_attacked = int((documents.is_attacked_N & documents.is_trained_N).sum())
    if not num_attacked:
        return "none was attacked"
    return f"attacked: {num_attacked:,} of {int(documents.is_trained_N.sum()):,}"


def _list_others(found: VerdictInput, decision: Decision, group: _Group) -> list[str]:
    """List what else was extracted, and control documents that were left out."""
    documents, canaries, reason = found.documents, found.canaries, decision.reason
    control = count_documents(documents, documents.is_control_N, documents.was_extracted_N)
    told, told_control = group.trained, group.control
    if reason == "control" and decision.test is not None:
        told, told_control = decision.test.trained, decision.test.control
    trained = count_documents(documents, documents.is_trained_N, documents.is_extracted_N)
    is_control_told = reason not in _WITHOUT_CONTROL
    if decision.level == "extracted" and reason == "too-few" and group.num_known:
        is_control_told = False
    texts = []
    for name, where_N, matched_N, is_told in (
        (
            "trained documents",
            documents.is_trained_N,
            documents.is_extracted_N,
            told == trained and not group.is_attacked and reason != "canaries",
        ),
        (
            "documents to be forgotten",
            documents.is_forgotten_N,
            documents.was_extracted_N,
            reason == "forgotten",
        ),
        (
            "unseen documents",
            documents.is_control_N,
            documents.was_extracted_N,
            is_control_told and told_control == control,
        ),
    ):
        counts = count_documents(documents, where_N, matched_N)
        if counts.num_matched and not is_told:
            greedy = count_documents(documents, where_N, documents.is_extracted_N)
            how = "" if counts == greedy else ", attacks included"
            number = f"{counts.num_matched:,} of {counts.num_documents:,}"
            texts.append(f"{number} {name} extracted{how}")
    attacked_N = documents.is_attacked_N & documents.is_trained_N
    attacked = count_documents(documents, attacked_N, documents.is_extracted_by_attack_N)
    if attacked.num_matched and not group.is_attacked:
        texts.append(
            f"Attacks extracted {attacked.num_matched:,} of {attacked.num_documents:,} trained "
            "documents"
        )
    if canaries is not None and not _is_canaries_told(decision, canaries, group):
        texts.append(
            f"{canaries.num_trained_extracted} of {canaries.num_trained} trained canaries and "
            f"{canaries.num_references_extracted} of {canaries.num_references} references extracted"
        )
    left_out = sum(outline.num_near_duplicates for outline in found.outlines)
    if left_out:
        texts.append(
            f"{left_out:,} given control documents left out: near-duplicates of trained ones"
        )
    return texts


def _is_canaries_told(decision: Decision, canaries: Canaries, group: _Group) -> bool:
    """Return whether the sentence counts all extracted canaries and references."""
    if decision.reason in ("canaries", "canaries-too"):
        return True
    if canaries.num_trained_extracted:
        return False
    is_named = decision.level in ("none-found", "inconclusive") and not group.control.num_matched
    return is_named or not canaries.num_references_extracted


def _sum_not_sampled(outlines: Sequence[BucketOutline]) -> int:
    return sum(outline.num_not_sampled for outline in outlines if outline.was_trained)


# -- worst bucket ----------------------------------------------------------------------------------


def _find_worst(found: VerdictInput, decision: Decision) -> tuple[str, str]:
    """Return the trained bucket and the method with the highest extraction rate.

    If one bucket decided the verdict, it is that one. A bucket that training did not reach is used
    only if there is no other.
    """
    trained = [bucket for bucket in found.tables.buckets if bucket.role == "trained"]
    trained = [bucket for bucket in trained if bucket.num_repetitions != 0] or trained
    assert trained, "an audit without trained documents is rejected earlier"
    if decision.level == "memorized" and decision.test and decision.test.bucket is not None:
        trained = [row for row in trained if row.bucket == decision.test.bucket]
    rates = [
        (bucket, risk, row)
        for bucket in trained
        for risk, row in found.tables.risks(bucket.bucket).items()
    ]
    if not rates:
        most = max(trained, key=lambda bucket: bucket.num_repetitions or 0)
        return most.bucket, "verbatim"
    # max returns the first of equal rates, and verbatim, the strongest statement, comes first.
    bucket, risk, _ = max(rates, key=_rank_rate)
    return bucket.bucket, risk


def _rank_rate(candidate: tuple[BucketRow, str, ResultRow]) -> tuple[float, float, float]:
    bucket, _, row = candidate
    # Ties are resolved by the lower end of the interval, then by the number of repetitions.
    low = -1.0 if row.low is None else row.low
    return row.value or 0.0, low, float(bucket.num_repetitions or 0)
