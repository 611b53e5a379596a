"""Warnings and notes that a report shows above its results."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from memguard.audit.document_scores import DocumentScores
from memguard.audit.selection import describe_cut
from memguard.audit.statistics.blind import NUM_FOLDS, number_clusters
from memguard.audit.windows import AuditDocument, is_member
from memguard.records import (
    BLIND,
    Banner,
    BucketRow,
    CutDocuments,
    ResultRow,
    Tables,
    write_parameters,
)

Tally = Literal["complete", "missing", "contradicting"]
"""Whether the counts of repetitions exist and agree with the number of training steps."""
FEW_DOCUMENTS = 30
COLLAPSED_TYPE_TOKEN_RATIO = 0.1
_BASE_APART = 1e-3
"""Nats a token: rounding a model to bf16 changes the median document by a third of this."""
_SHORTEST_TO_JUDGE = 5
NOT_AUDITED = {
    "too short to audit": "num_too_short",
    "split into parts of which none is long enough to audit": "num_cut_too_short",
    "without a token, other than special tokens, that receives loss": "num_nothing_supervised",
    "with a short answer that many documents share (a label)": "num_labels",
    "whose text is mostly unknown to the tokenizer": "num_unknown",
}
_COLLAPSED = (
    "The model predicts the same few tokens for every input: it seems collapsed. Low rates then do "
    "not show what it has memorized."
)


def collect_banners(
    tables: Tables,
    scores: DocumentScores,
    *,
    tally: Tally,
    tiny_margin: float,
    cut: CutDocuments | None = None,
    documents: Sequence[AuditDocument] = (),
) -> list[Banner]:
    """Return warnings, then notes."""
    generated = tables.find_detail("extraction") or {}
    warnings = [
        *([_COLLAPSED] if is_collapsed(scores) else []),
        *warn_of_base(scores),
        *_warn_of_control(tables),
        *_warn_of_tally(scores, tally),
        *_warn_of_generation(generated),
    ]
    notes = [
        *([] if cut is None else [describe_cut(cut)]),
        *_note_forgotten(tables),
        *_note_not_audited(tables.buckets),
        *_note_floor(generated),
        *_note_limits(tables, tiny_margin),
        *_note_not_compared(tables, documents),
    ]
    return [Banner(level="warning", text=text) for text in warnings] + [
        Banner(level="note", text=text) for text in notes
    ]


def is_collapsed(scores: DocumentScores) -> bool:
    """Return whether the model predicts the same few tokens in every context.

    The criterion is a type-token ratio of its most likely tokens below 0.1 (in short documents a
    single token) in each of at least two documents, unless all true texts are like that too.
    """
    size_N = scores["continuation_tokens"]
    limit_N = np.maximum(2, COLLAPSED_TYPE_TOKEN_RATIO * size_N)
    is_long_N = size_N >= _SHORTEST_TO_JUDGE
    predicted_N, true_N = (
        (np.rint(scores[ratio] * size_N) < limit_N)[is_long_N]
        for ratio in ("extraction.argmax_type_token_ratio", "type_token_ratio")
    )
    return len(predicted_N) >= 2 and bool(predicted_N.all()) and not true_N.all()


def is_base_nearly_equal(scores: DocumentScores) -> bool:
    """Return whether the base gives the model's losses, so that it is used as no base."""
    return any(warn_of_base(scores))


def warn_of_base(scores: DocumentScores) -> Iterator[str]:
    """Yield that the base gives nearly the same losses: the median over the documents decides."""
    name = "extraction.logprob"
    change_N = np.abs(scores[name] - scores[f"base.{name}"]) / scores["continuation_tokens"]
    change_N = change_N[np.isfinite(change_N)]
    if len(change_N) and (median := float(np.median(change_N))) < _BASE_APART:
        yield (
            f"The base model gives nearly the same losses (median difference {median:.2g} nats a "
            "token): it is not used as a base. Give the model before the fine-tuning."
        )


def _warn_of_control(tables: Tables) -> Iterator[str]:
    control = tables.control
    if control is None:
        yield (
            "There is no control: without documents that were never trained, memorization cannot "
            "be distinguished from text that the model could generate anyway, and there are no "
            "membership scores."
        )
        return
    rate, how = _find_worse_of_greedy(tables, control.bucket)
    if rate.num_documents == 0:
        yield "No control document is long enough to audit: the rates have no baseline."
    elif rate.num_matched:
        yield (
            f"{rate.num_matched} of {rate.num_documents} control documents are extracted {how} "
            "although they were never trained. They may be near-duplicates of trained documents, "
            "text that the base model knew, or templates; the difference from control then "
            "understates memorization."
        )


def _find_worse_of_greedy(tables: Tables, bucket: str) -> tuple[ResultRow, str]:
    """Return the near-verbatim rate, or the verbatim rate if nothing was generated."""
    near = tables.find("extraction", "near_verbatim", bucket)
    if near is not None and (near.is_known or not near.num_documents):
        return near, "near-verbatim"
    verbatim = tables.find("extraction", "verbatim", bucket)
    assert verbatim is not None, "every bucket has this rate"
    return verbatim, "verbatim"


def _warn_of_generation(generated: Mapping[str, Any]) -> Iterator[str]:
    if generated.get("reason_not_generated") is not None:
        of_all = " of all documents" if generated.get("num_not_generated") else ""
        yield (
            f"Near-verbatim extraction was not measured{of_all}: "
            f"{generated['reason_not_generated']}. The verdict can then not say that none was "
            "found."
        )


def _note_floor(generated: Mapping[str, Any]) -> Iterator[str]:
    num_below, num_checked = (generated.get(n, 0) for n in ("num_below_floor", "num_checked"))
    if not num_below or generated.get("num_not_generated"):
        return
    documents = "document" if num_below == 1 else "documents"
    start = f"{num_below:,} {documents} looked unlikely to be extractable"
    if num_matched := generated["num_matched_below_floor"]:
        verb = "matches" if num_matched == 1 else "match"
        yield f"{start}; a sample matched, so all were tested: {num_matched:,} {verb}."
    elif num_checked == num_below:
        how = "it was tested and was not" if num_below == 1 else "all were tested, none was"
        yield f"{start}; {how}."
    else:
        yield f"{start}; we tested {num_checked:,}, none was."


def _warn_of_tally(scores: DocumentScores, tally: Tally) -> Iterator[str]:
    if tally == "missing":
        yield "The number of repetitions of each document is not known: no dose-response is shown."
    elif tally == "contradicting":
        yield (
            "The counts of repetitions contradict the number of training steps: no dose-response "
            "is shown, and documents that count as trained may not have been trained."
        )
    count_N = scores["num_repetitions"][scores["role"] == "trained"]
    missed = int((count_N == 0).sum())
    if missed:
        yield (
            f"{missed} of {len(count_N)} documents that should have been trained were never "
            "reached; they lower the rates of their bucket."
        )


def _note_forgotten(tables: Tables) -> Iterator[str]:
    for bucket in tables.buckets:
        if bucket.role != "forget":
            continue
        rate, how = _find_worse_of_greedy(tables, bucket.bucket)
        if not rate.num_documents:
            yield f"'{bucket.bucket}' was to be forgotten, and none of its documents was audited."
            continue
        base = tables.find("extraction", rate.metric, bucket.bucket, model="base")
        is_known = base is not None and base.is_known
        before = f"; {base.num_matched} from the model before training" if base and is_known else ""
        yield (
            f"'{bucket.bucket}' was to be forgotten: {rate.num_matched} of {rate.num_documents} of "
            f"its documents are still extracted {how}{before}."
        )


def _note_not_audited(buckets: Sequence[BucketRow]) -> Iterator[str]:
    for reason, name in NOT_AUDITED.items():
        if count := sum(getattr(bucket, name) for bucket in buckets):
            yield (
                f"{count} {_documents(count)} {reason}: trained or held out as planned, but not "
                "included in the rates."
            )


def _note_limits(tables: Tables, tiny_margin: float) -> Iterator[str]:
    buckets = tables.buckets
    few = [
        f"'{bucket.bucket}' ({bucket.num_documents})"
        for bucket in buckets
        if bucket.role in ("trained", "control") and bucket.num_documents < FEW_DOCUMENTS
    ]
    if few:
        yield f"Fewer than {FEW_DOCUMENTS} documents in {', '.join(few)}: the intervals are wide."
    num_left = sum(bucket.num_not_sampled for bucket in buckets)
    if num_left:
        yield f"{num_left} {_documents(num_left)} not in the sample that was scored."
    num_tiny = sum(r.num_matched or 0 for r in tables.select("extraction", "tiny_margin"))
    if num_tiny:
        yield (
            f"{num_tiny} {'result depends' if num_tiny == 1 else 'results depend'} on a near-tie "
            f"(<{tiny_margin:g} logits) in the greedy text: another device or batch size could "
            f"change {'it' if num_tiny == 1 else 'them'}."
        )
    if any(bucket.num_documents for bucket in buckets) and not tables.select(
        "extraction", "verbatim", model="base"
    ):
        yield (
            "The model before training was not scored: text that it already knew counts as if "
            "it had been learned in this training."
        )


def _note_not_compared(tables: Tables, documents: Sequence[AuditDocument]) -> Iterator[str]:
    """Say why there are membership scores without the blind baseline that they are read with."""
    blind = write_parameters({"score": BLIND})
    scores = {row.parameters for row in tables.select("membership", "auc")}
    if not scores or blind in scores:
        return
    compared = [d for d in documents if is_member(d) or d.role == "control"]
    cluster_N = number_clusters(compared)
    member_N = np.array([is_member(document) for document in compared], dtype=bool)
    num_members, num_control = (len(np.unique(cluster_N[side])) for side in (member_N, ~member_N))
    reason = "near-duplicates hold the documents of one kind together"
    if min(num_members, num_control) < NUM_FOLDS:
        reason = (
            f"it needs {NUM_FOLDS} of either kind, near-duplicates counted once, and there are "
            f"{num_members} trained and {num_control} control documents"
        )
    yield (
        "The bag-of-words classifier without access to the model was not run: "
        f"{reason}. Whether the kind of text alone causes the membership scores and the "
        "differences from the control is not known."
    )


def _documents(count: int) -> str:
    return "document is" if count == 1 else "documents are"
