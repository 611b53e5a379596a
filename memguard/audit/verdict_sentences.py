"""The sentences of the verdict, and the record that holds them.

sentence   at most 20 words: what was extracted, against the control, why it is not another level
scope      how much was audited and attacked, what else was extracted, what was not run
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from memguard.audit.requests import NOT_NEEDED
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
from memguard.records.texts import format_at_most
from memguard.records.verdict import ComparedTexts, OtherMethod, Verdict, VerdictCounts

_WHY_INCONCLUSIVE = {
    "collapsed": "the model seems collapsed",
    "not-generated": "near-verbatim text was not tested",
    "too-few": "too few to say more",
}
_MAX_WORDS, _MAX_BUCKET_WORDS = 20, 2
_METHODS: dict[OtherMethod, str] = {
    "attacked": "Attacks extracted {} attacked {}",
    "generated": "Generated text contains {} {}",
    "windows": "Other passages of {} {} were extracted",
}
"""Starts of a sentence by the method that extracted its documents: their number, and which."""
_OF_METHOD: dict[OtherMethod, str] = {
    "attacked": "by attacks",
    "generated": "in generated text",
    "windows": "in another window",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictInput:
    """The results of an audit that its verdict depends on."""

    ids: Sequence[str]
    documents: DocumentResults
    canaries: Canaries | None
    coverage: Coverage
    tables: Tables
    """Of the report."""
    membership: Mapping[str, NDArray[np.float64]]
    """``[N]`` membership scores by name."""
    dose_response: bool
    """Whether the counts of repetitions are valid and may be stated."""
    not_run: Mapping[str, str] = field(default_factory=dict)
    """Reason, by name, of each probe that did not run."""


def build_verdict(results: VerdictInput) -> Verdict:
    """Decide the verdict and write its sentences."""
    decision = decide_level(results.documents, results.canaries, results.coverage)
    group = _choose_group(results.documents, decision)
    sentence = _write_sentence(results, decision, group)
    bucket, metric = _find_worst(results, decision)
    return Verdict(
        level=decision.level,
        reason=decision.reason,
        true_share=decision.true_share,
        sentence=sentence.text,
        scope=_write_scope(results, sentence),
        membership=judge_membership(
            results.membership,
            results.ids,
            results.documents,
            has_base=results.coverage.has_base,
            is_other_kind=results.coverage.control == "other-kind",
        ),
        trained=group.trained,
        control=group.control,
        base=group.base if results.coverage.has_base else None,
        test=decision.test,
        bucket=bucket,
        metric=metric,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """The documents that the sentence counts."""

    bucket: str | None
    """Name of the bucket; None for all trained documents."""
    method: OtherMethod | None
    """The only method that it counts, and on the documents that this one was tried on; None counts
    greedy text and sampling."""
    texts: ComparedTexts
    trained: VerdictCounts
    control: VerdictCounts
    base: VerdictCounts
    num_known: int
    """Extracted trained documents that the base model produces too."""


def _choose_group(documents: DocumentResults, decision: Decision) -> _Group:
    """Return the documents of the test that decided; else all, or those of another method."""
    trained_N, control_N = documents.is_trained_N, documents.is_control_N
    matched_N, new_N = documents.is_extracted_N, documents.is_new_N
    bucket, test = None, decision.test
    texts: ComparedTexts = "all"
    method: OtherMethod | None = None
    is_test = decision.reason == "control"
    if is_test and test is not None:
        bucket, texts = test.bucket, test.texts
        method = next((name for name in documents.others if name == test.documents), None)
    elif decision.level == "extracted" and not (matched_N & trained_N).any():
        method = next(
            (
                name
                for name, results in documents.others.items()
                if (results.is_extracted_N & trained_N).any()
            ),
            None,
        )
    if method is not None:
        results = documents.others[method]
        matched_N, new_N = results.is_extracted_N, results.is_new_N
        trained_N, control_N = (trained_N & results.is_tried_N, control_N & results.is_tried_N)
    if bucket is not None:
        trained_N = trained_N & (documents.bucket_N == bucket)
    if texts != "all":
        texts_N = documents.is_own_N if texts == "own" else ~documents.is_own_N
        texts = texts if (trained_N & ~texts_N).any() else "all"
        trained_N, control_N = trained_N & texts_N, control_N & texts_N
    control = count_documents(documents, control_N, matched_N)
    by_any = count_documents(documents, documents.is_control_N, documents.was_extracted_N)
    # Control documents that only other methods extracted count too, unless a test decided.
    if not is_test and not control.num_matched and by_any.num_matched:
        control = by_any
    return _Group(
        bucket=bucket,
        method=method,
        texts=texts,
        trained=count_documents(documents, trained_N, matched_N),
        control=control,
        base=count_documents(documents, trained_N, documents.is_of_base_N),
        num_known=int((trained_N & matched_N & ~new_N).sum()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sentence:
    """A sentence, and the counts that it names."""

    text: str
    counts: Mapping[str, VerdictCounts | Canaries] = field(default_factory=dict)
    """By ``trained``, ``forgotten``, ``control``, ``canaries`` and method; the scope lists those
    that the sentence does not name."""


def _write_sentence(results: VerdictInput, decision: Decision, group: _Group) -> _Sentence:
    if decision.reason in ("canaries", "canaries-too"):
        return _write_canaries(results.canaries, decision)
    if decision.reason == "forgotten":
        return _write_forgotten(results.documents, group.trained)
    if decision.level == "memorized":
        return _write_memorized(results, decision, group)
    if decision.level == "extracted":
        return _write_extracted(results, decision, group)
    others = _name_unseen(results, group)
    text = _write_none(results, decision, group, others.text)
    if len(text.split()) > _MAX_WORDS:  # The scope names the unseen documents.
        return _Sentence(text=_write_none(results, decision, group, ""))
    return replace(others, text=text)


def _write_none(results: VerdictInput, decision: Decision, group: _Group, others: str) -> str:
    """Return the sentence of an audit that extracted no trained document."""
    trained, coverage = group.trained, results.coverage
    unaudited = f"{coverage.num_unaudited:,} of {coverage.num_trained:,}"
    none = f"0 of {_count(trained.num_documents, 'training document')} were extracted"
    if trained.num_documents == 1:
        none = "The only training document was not extracted"
    if not trained.num_documents and decision.reason == "unaudited":
        return f"{unaudited} training documents could not be audited{others}; nothing can be said."
    if decision.reason == "not-trained":
        return f"No audited document was trained in full{others}; nothing can be said."
    if decision.reason == "unaudited":
        none = none.replace("training document", "audited document")
        return f"{none}{others}; {unaudited} were not audited: too few to say more."
    if decision.reason == "weakened":
        return f"{none} with {' and '.join(coverage.weakened)}{others}."
    if decision.reason == "not-generated" and coverage.is_limited:
        return f"{none}{others}; generation ended at its limit of time."
    if decision.reason is not None:
        return f"{none}{others}; {_WHY_INCONCLUSIVE[decision.reason]}."
    assert decision.true_share is not None, "none-found needs it"
    return f"{none} ({format_at_most(decision.true_share)} could be){others}."


def _write_canaries(canaries: Canaries | None, decision: Decision) -> _Sentence:
    assert canaries is not None, "they decided"
    found = canaries.num_trained_extracted
    trained = f"{found} of {_count(canaries.num_trained, 'trained canary')} {_were(found)}"
    references = _count(canaries.num_references, "reference")
    text = f"{trained} extracted, none of {references}: the model memorized random secrets."
    if decision.level == "extracted":
        number = canaries.num_references_extracted
        text = f"{trained} extracted, and {number} of {references} too: chance is not excluded."
    return _Sentence(text=text, counts={"canaries": canaries})


def _write_forgotten(documents: DocumentResults, trained: VerdictCounts) -> _Sentence:
    forgotten = count_documents(documents, documents.is_forgotten_N, documents.was_extracted_N)
    text = (
        f"{forgotten.num_matched} of {forgotten.num_documents} documents to be forgotten "
        f"{'is' if forgotten.num_matched == 1 else 'are'} still extracted"
    )
    counts = f", {trained.num_matched} of {trained.num_documents} training documents."
    if not trained.num_documents:
        counts = "; no audited document was trained in full."
    return _Sentence(text=f"{text}{counts}", counts={"forgotten": forgotten, "trained": trained})


def _write_memorized(results: VerdictInput, decision: Decision, group: _Group) -> _Sentence:
    assert decision.test is not None, "it decided"
    trained, control = decision.test.trained, decision.test.control
    # What the base model produces is not counted by the test.
    counted = (trained.num_matched, control.num_matched)
    is_part = counted != (group.trained.num_matched, group.control.num_matched)
    unknown = ", unknown to the base model" if is_part else ""
    start = _describe_matched(results, group, trained, unknown)
    text = f"{start}, {_of_unseen(control)}: the model memorized training text."
    if is_part:
        text = f"{start}; {_of_unseen(control)}."
    mine = trained if group.method is None else group.trained
    return _Sentence(text=text, counts={group.method or "trained": mine, "control": control})


def _write_extracted(results: VerdictInput, decision: Decision, group: _Group) -> _Sentence:
    trained, control = group.trained, group.control
    counts: dict[str, VerdictCounts] = {group.method or "trained": trained}
    if decision.reason == "no-control":
        ending = "; without unseen documents the cause is open"
    elif decision.reason == "base-too":
        which = "it" if trained.num_matched == 1 else "them"
        ending = f"; the base model produces {which} too"
    elif decision.reason == "other-kind":
        ending = "; one side has fewer than five texts"
        if results.coverage.control == "other-kind":
            ending = "; the control is another kind of text"
        ending += ", with too little own text" if results.coverage.has_base else ", without a base"
    elif decision.reason == "too-few" and group.num_known:
        ending = f", {group.num_known} also from the base model: too few others to blame training"
    else:
        counts["control"] = control
        why = "one is " if trained.num_matched == 1 and group.method is None else ""
        ending = f", {_of_unseen(control)}: {why}too few to blame training"
        if decision.reason == "control-too":
            ending = f", and {_of_unseen(control)} too: chance is not excluded"
            if group.method is not None:  # Not always by this method.
                unseen = f"{_of_unseen(control)} {_were(control.num_matched)} extracted"
                ending = f"; {unseen}: chance is not excluded"
    return _Sentence(text=f"{_describe_matched(results, group, trained)}{ending}.", counts=counts)


def _describe_matched(
    results: VerdictInput, group: _Group, counts: VerdictCounts, which: str = ""
) -> str:
    """Return the start of a sentence: how many of its documents were extracted, and ``which``."""
    number = f"{counts.num_matched} of {counts.num_documents}"
    documents = _name_documents(results, group.bucket)
    if group.texts != "all":
        kind = "own" if group.texts == "own" else "shared"
        documents = documents.replace("training documents", f"{kind} training texts")
        documents = documents.replace("documents", f"{kind} texts", 1)
    if group.method is not None:
        return f"{_METHODS[group.method].format(number, documents)}{which}"
    which = f"{which}," if which else ""
    return f"{number} {documents}{which} {_were(counts.num_matched)} extracted"


def _name_documents(results: VerdictInput, bucket: str | None) -> str:
    if bucket is None:
        return "training documents"
    row = next(row for row in results.tables.buckets if row.bucket == bucket)
    counts = [row.num_repetitions for row in results.tables.buckets if row.role == "trained"]
    is_clear = results.dose_response and counts.count(row.num_repetitions) == 1
    if not is_clear or row.num_repetitions is None:
        # The sentence has at most 20 words.
        is_short = len(bucket.split()) <= _MAX_BUCKET_WORDS
        return f"documents of '{bucket}'" if is_short else "documents of one bucket"
    times = "once" if row.num_repetitions == 1 else f"{row.num_repetitions:,} times"
    return f"documents trained {times}"


def _name_unseen(results: VerdictInput, group: _Group) -> _Sentence:
    """Name extracted control documents and references where no trained document was extracted."""
    control, canaries = group.control, results.canaries
    num_references = 0 if canaries is None else canaries.num_references_extracted
    if control.num_matched:
        verb = _were(control.num_matched)
        text = f", but {control.num_matched} of {control.num_documents} unseen {verb}"
        if num_references:
            text = f", but {control.num_matched + num_references:,} unseen texts were"
        return _Sentence(text=text, counts={"control": control})
    if canaries is None or not num_references:
        return _Sentence(text="")
    references = _count(canaries.num_references, "reference")
    text = f", but {num_references} of {references} {_were(num_references)}"
    return _Sentence(text=text, counts={"canaries": canaries})


def _of_unseen(counts: VerdictCounts) -> str:
    return f"{counts.num_matched} of {counts.num_documents} unseen ones"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _count(number: int, what: str) -> str:
    if number != 1:
        what = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number:,} {what}"


# -- scope -----------------------------------------------------------------------------------------


def _write_scope(results: VerdictInput, sentence: _Sentence) -> str:
    documents, coverage = results.documents, results.coverage
    trained = count_documents(documents, documents.is_trained_N, documents.is_extracted_N)
    outlines = [outline for outline in results.tables.buckets if outline.was_trained]
    num_labels = sum(outline.num_labels for outline in outlines)
    left_out = [
        f"{number:,} {why}"
        for number, why in (
            (coverage.num_unaudited - num_labels, "too short or not auditable"),
            (num_labels, "short answers that many documents share"),
            (sum(outline.num_not_sampled for outline in outlines), "not in the sample"),
        )
        if number
    ]
    audited = f"{trained.num_documents:,} of {_count(coverage.num_trained, 'trained document')}"
    if trained.num_clusters != trained.num_documents:
        audited += f", {_count(trained.num_clusters, 'different text')}"
    if left_out:
        audited += f" ({', '.join(left_out)})"
    attacks = documents.others.get("attacked")
    attacked = "none was attacked"
    if attacks is not None and (attacked_N := attacks.is_tried_N & documents.is_trained_N).any():
        num_attacked = int(attacked_N.sum())
        attacked = f"attacked: {num_attacked:,} of {trained.num_documents:,}"
    parts = [f"Audited: {audited}; {attacked}."]
    parts += [f"{text}." for text in _list_others(results, sentence)]
    if results.not_run:
        names = (
            f"{name} ({reason})" if reason.startswith(NOT_NEEDED) else name
            for name, reason in results.not_run.items()
        )
        parts.append(f"Not run: {', '.join(names)}.")
    if coverage.num_not_generated:
        total = coverage.num_generated + coverage.num_not_generated
        parts.append(
            f"Near-verbatim text of {coverage.num_not_generated:,} of {_count(total, 'document')} "
            "was not generated: the limit of time was reached."
        )
    elif not coverage.was_generated:
        parts.append("Near-verbatim text was not generated.")
    return " ".join(parts)


def _list_others(results: VerdictInput, sentence: _Sentence) -> list[str]:
    """List what was extracted and is not in the sentence, and control documents left out."""
    documents, canaries = results.documents, results.canaries
    greedy_N, by_any_N = documents.is_extracted_N, documents.was_extracted_N
    texts = []
    for key, name, where_N, matched_N in (
        ("trained", "trained documents", documents.is_trained_N, by_any_N),
        ("forgotten", "documents to be forgotten", documents.is_forgotten_N, by_any_N),
        ("control", "unseen documents", documents.is_control_N, by_any_N),
    ):
        counts = count_documents(documents, where_N, matched_N)
        if counts.num_matched and counts != sentence.counts.get(key):
            how = ""
            if counts != count_documents(documents, where_N, greedy_N):
                how = ", by any method"
            texts.append(
                f"{counts.num_matched:,} of {counts.num_documents:,} {name} extracted{how}"
            )
    for method, tried in documents.others.items():
        where_N = tried.is_tried_N & documents.is_trained_N
        counts = count_documents(documents, where_N, tried.is_extracted_N)
        if counts.num_matched and method not in sentence.counts:
            number = f"{counts.num_matched:,} of {counts.num_documents:,} trained documents"
            texts.append(f"{number} extracted {_OF_METHOD[method]}")
    if canaries is not None and "canaries" not in sentence.counts:
        found, too = canaries.num_trained_extracted, canaries.num_references_extracted
        if found or too:
            texts.append(
                f"{found} of {canaries.num_trained} trained canaries and {too} of "
                f"{canaries.num_references} references extracted"
            )
    left_out = sum(outline.num_near_duplicates for outline in results.tables.buckets)
    if left_out:
        texts.append(
            f"{left_out:,} given control documents left out: near-duplicates of trained ones"
        )
    return texts


# -- worst bucket ----------------------------------------------------------------------------------


def _find_worst(results: VerdictInput, decision: Decision) -> tuple[str, str]:
    """Return the trained bucket, the deciding one if any, and method with the highest rate."""
    trained = [bucket for bucket in results.tables.buckets if bucket.role == "trained"]
    # A bucket that training did not reach is used only if there is no other.
    trained = [bucket for bucket in trained if bucket.num_repetitions != 0] or trained
    assert trained, "an audit without trained documents is rejected earlier"
    if decision.level == "memorized" and decision.test and decision.test.bucket is not None:
        trained = [row for row in trained if row.bucket == decision.test.bucket]
    rates = [
        (bucket, risk, row)
        for bucket in trained
        for risk, row in results.tables.risks(bucket.bucket).items()
    ]
    if not rates:
        most = max(trained, key=lambda bucket: bucket.num_repetitions or 0)
        return most.bucket, "verbatim"

    def rank(candidate: tuple[BucketRow, str, ResultRow]) -> tuple[float, float, float]:
        bucket, _, row = candidate
        # Ties are resolved by the lower end of the interval, then by the number of repetitions.
        low = -1.0 if row.low is None else row.low
        return row.value or 0.0, low, float(bucket.num_repetitions or 0)

    bucket, *_ = max(rates, key=rank)
    risk, _ = results.tables.find_risk(bucket.bucket) or ("verbatim", None)
    return bucket.bucket, risk
