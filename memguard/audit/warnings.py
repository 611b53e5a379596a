"""What a reader must know before the numbers."""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from memguard.audit.document_scores import DocumentScores
from memguard.audit.parts import tell_cut
from memguard.records import Banner, BucketScores, CutDocuments, GeneratedTexts, Rate

Tally = Literal["complete", "missing", "contradicting"]
"""Whether the counts of repetitions are there and agree with the steps that were trained."""
FEW_DOCUMENTS = 30
COLLAPSED_TYPE_TOKEN_RATIO = 0.1
_SHORTEST_TO_JUDGE = 5


def collect_banners(
    buckets: Sequence[BucketScores],
    scores: DocumentScores,
    generated: GeneratedTexts,
    *,
    tally: Tally,
    tiny_margin: float,
    cut: CutDocuments | None = None,
) -> list[Banner]:
    """Return warnings, then notes.

    Args:
        buckets: the report's table.
        scores: columns of all documents.
        generated: how near-verbatim matches were found.
        tally: state of the counts of repetitions.
        tiny_margin: margin (logits) below which a verdict may flip.
        cut: documents of which only a part was audited.
    """
    warnings = [
        *_warn_of_model(scores),
        *_warn_of_control(buckets),
        *_warn_of_tally(scores, tally),
        *_warn_of_generation(generated),
    ]
    notes = [
        *([] if cut is None else [tell_cut(cut)]),
        *_note_forgotten(buckets),
        *_note_not_audited(buckets),
        *_note_floor(generated),
        *_note_limits(buckets, tiny_margin),
    ]
    return [Banner(level="warning", text=text) for text in warnings] + [
        Banner(level="note", text=text) for text in notes
    ]


def is_collapsed(scores: DocumentScores) -> bool:
    """Tell whether the model predicts the same few tokens in every context.

    That is, in each of at least two documents, a type-token ratio of its first choices below 0.1
    (in short ones a single token), unless the true texts are all like that themselves.
    """
    size_N = scores["continuation_tokens"]
    limit_N = np.maximum(2, COLLAPSED_TYPE_TOKEN_RATIO * size_N)
    is_long_N = size_N >= _SHORTEST_TO_JUDGE
    said_N, true_N = (
        (np.rint(scores[ratio] * size_N) < limit_N)[is_long_N]
        for ratio in ("argmax_type_token_ratio", "type_token_ratio")
    )
    return len(said_N) >= 2 and bool(said_N.all()) and not true_N.all()


def _warn_of_model(scores: DocumentScores) -> Iterator[str]:
    if is_collapsed(scores):
        yield (
            "The model says the same few tokens whatever it is given: it seems collapsed. Low "
            "rates then say nothing of what it has memorised."
        )


def _warn_of_control(buckets: Sequence[BucketScores]) -> Iterator[str]:
    control = next((bucket for bucket in buckets if bucket.role == "control"), None)
    if control is None:
        yield (
            "There is no control: without documents that were never trained, reciting cannot be "
            "told from what the model could continue anyway, and there are no membership scores."
        )
        return
    rate, how = _worse_of_greedy(control)
    if rate.num_documents == 0:
        yield "No control document is long enough to audit: nothing to compare the rates with."
    elif rate.num_matched:
        yield (
            f"{rate.num_matched} of {rate.num_documents} control documents are extracted {how} "
            "although they were never trained: near-duplicates of trained ones, text the base "
            "model knew or templates? The difference from control then understates memorization."
        )


def _worse_of_greedy(bucket: BucketScores) -> tuple[Rate, str]:
    """Return the rate of greedy text, near-verbatim where it was generated."""
    near = bucket.model.near_verbatim
    return (bucket.model.verbatim, "verbatim") if near is None else (near, "near-verbatim")


def _warn_of_generation(generated: GeneratedTexts) -> Iterator[str]:
    if generated.reason_not_generated is not None:
        yield (
            f"Near-verbatim extraction was not measured: {generated.reason_not_generated}. The "
            "verdict rests on verbatim matches."
        )


def _note_floor(generated: GeneratedTexts) -> Iterator[str]:
    if not generated.num_below_floor:
        return
    below = (
        f"{generated.num_below_floor} {_documents(generated.num_below_floor)} below the "
        f"teacher-forced accuracy of {generated.floor:.0%} from which on text is generated"
    )
    if generated.num_checked < generated.num_below_floor:
        yield (
            f"{below}; of a random sample of {generated.num_checked} of them that was generated "
            "all the same, none is near-verbatim."
        )
    elif generated.num_matched_below_floor:
        yield (
            f"{below}; a sample held near-verbatim text, so all of them were generated: "
            f"{generated.num_matched_below_floor} match."
        )
    else:
        yield f"{below}; all of them were generated, and none is near-verbatim."


def _warn_of_tally(scores: DocumentScores, tally: Tally) -> Iterator[str]:
    if tally == "missing":
        yield "How often each document was trained is not known: no dose-response is shown."
    elif tally == "contradicting":
        yield (
            "The tally of repetitions contradicts the steps that were trained: no dose-response is "
            "shown, and what counts as trained may not have been."
        )
    count_N = scores["num_repetitions"][scores["role"] == "trained"]
    missed = int((count_N == 0).sum())
    if missed:
        yield (
            f"{missed} of {len(count_N)} documents meant to be trained were never reached; they "
            "lower the rates of their bucket."
        )


def _note_forgotten(buckets: Sequence[BucketScores]) -> Iterator[str]:
    for bucket in buckets:
        if bucket.role != "forget":
            continue
        rate, how = _worse_of_greedy(bucket)
        base = None if bucket.base is None else getattr(bucket.base, how.replace("-", "_"))
        before = "" if base is None else f"; {base.num_matched} from the model before training"
        yield (
            f"'{bucket.bucket}' was to be forgotten: {rate.num_matched} of {rate.num_documents} of "
            f"its documents are still extracted {how}{before}. The verdict is about the trained "
            "documents."
        )


def _note_not_audited(buckets: Sequence[BucketScores]) -> Iterator[str]:
    reasons = {
        "too short to audit": sum(b.num_too_short for b in buckets),
        "cut into parts of which none is long enough to audit": sum(
            b.num_cut_too_short for b in buckets
        ),
        "without a token that receives loss, special ones aside": sum(
            b.num_nothing_supervised for b in buckets
        ),
    }
    for reason, count in reasons.items():
        if count:
            yield (
                f"{count} {_documents(count)} {reason}: trained or held back as planned, but in "
                "none of the rates."
            )


def _note_limits(buckets: Sequence[BucketScores], tiny_margin: float) -> Iterator[str]:
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
    num_tiny = sum(bucket.num_tiny_margin for bucket in buckets)
    if num_tiny:
        yield (
            f"{num_tiny} {'match hangs' if num_tiny == 1 else 'matches hang'} on a gap below "
            f"{tiny_margin:g} logits along the greedy text: another device or batch size could "
            f"flip {'it' if num_tiny == 1 else 'them'}."
        )
    if any(bucket.num_documents for bucket in buckets) and all(
        bucket.base is None for bucket in buckets
    ):
        yield (
            "The model before training was not scored: what it could recite already counts as if "
            "the training had taught it."
        )


def _documents(count: int) -> str:
    return "document is" if count == 1 else "documents are"
