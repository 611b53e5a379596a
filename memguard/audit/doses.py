"""Rates against the number of repetitions and of copies: trend, monotone fit, k-eidetic counts."""

from collections import Counter
from collections.abc import Sequence

from memguard.audit.statistics import compute_trend, fit_dose_response
from memguard.records import BucketScores, DocumentScore, DoseTrend, ExtractedCopies

COPIES = (1, 2, 5, 10)
"""The k of k-eidetic memorisation that are counted."""


def compute_trends(buckets: Sequence[BucketScores]) -> list[DoseTrend]:
    """Return one trend for each rate, over the control and the trained buckets of one dose each."""
    dosed = sorted(
        (
            (0 if bucket.role == "control" else bucket.num_repetitions or 0, bucket)
            for bucket in buckets
            if bucket.num_documents
            and (bucket.role == "control" or (bucket.role == "trained" and bucket.num_repetitions))
        ),
        key=lambda pair: pair[0],
    )
    if len(dosed) < 2:
        return []
    doses = [dose for dose, _ in dosed]
    trends = []
    for metric in ("verbatim", "near_verbatim"):
        known = [getattr(bucket.model, metric) for _, bucket in dosed]
        rates = [rate for rate in known if rate is not None]
        if len(rates) < len(known):
            continue
        matched = [rate.num_matched for rate in rates]
        documents = [rate.num_documents for rate in rates]
        trend = compute_trend(matched, documents, doses)
        fitted = fit_dose_response(matched, documents)
        trends.append(
            DoseTrend(
                metric=metric,
                doses=doses,
                fitted=[rate for rate in fitted if rate is not None],
                z=None if trend is None else trend.z,
                p_value=None if trend is None else trend.p_value,
            )
        )
    return trends


def count_copies(scores: Sequence[DocumentScore]) -> list[ExtractedCopies]:
    """Return how many documents were recited verbatim though at most k trained ones hold them.

    k-eidetic memorisation, Carlini et al. 2021, with the manifest's clusters of near-duplicates for
    what holds a text. Empty where clusters are not known.
    """
    held: Counter[tuple[int | None, bool]] = Counter(
        (score.num_copies, score.verbatim)
        for score in scores
        if score.role == "trained" and score.num_repetitions != 0
    )
    if not held or any(not copies for copies, _ in held):
        return []

    def count(k: int, *, verbatim_only: bool) -> int:
        return sum(
            number
            for (copies, verbatim), number in held.items()
            if copies is not None and copies <= k and (verbatim or not verbatim_only)
        )

    return [
        ExtractedCopies(
            k=k,
            num_documents=count(k, verbatim_only=False),
            num_extracted=count(k, verbatim_only=True),
        )
        for k in COPIES
    ]
