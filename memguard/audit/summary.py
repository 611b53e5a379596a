"""Document scores into the report's table, verdict and findings."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memguard.audit.banners import Tally, collect_banners, is_collapsed
from memguard.audit.findings import collect_findings
from memguard.audit.membership import compute_membership
from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import clopper_pearson, compute_difference, compute_mean
from memguard.audit.verdict import decide_verdict
from memguard.records import (
    Banner,
    BucketScores,
    DocumentScore,
    Finding,
    MembershipScores,
    ModelScores,
    Verdict,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The parts of an `AuditReport` that follow from the document scores."""

    verdict: Verdict
    banners: list[Banner]
    buckets: list[BucketScores]
    dose_response: bool
    membership: list[MembershipScores]
    findings: list[Finding]
    num_findings: int


def summarise(
    scores: Sequence[DocumentScore],
    outlines: Sequence[BucketOutline],
    *,
    tiny_margin_ids: frozenset[str],
    tiny_margin: float,
    tally: Tally,
    membership: bool,
    text_hmacs: Mapping[str, str | None],
) -> Summary:
    """Return everything the report says of the documents.

    Args:
        scores: one for each scored document.
        outlines: the buckets in the report's order, also those without a score.
        tiny_margin_ids: documents whose verdict hangs on a margin below ``tiny_margin``.
        tiny_margin: in logits.
        tally: state of the counts of repetitions; dose-response is refused unless complete.
        membership: whether the suite asks for membership scores.
        text_hmacs: keyed hash of the text by document id.
    """
    buckets = build_buckets(scores, outlines, tiny_margin_ids)
    findings = collect_findings(scores, text_hmacs)
    dose_response = tally == "complete"
    return Summary(
        verdict=decide_verdict(
            buckets, scores, dose_response=dose_response, collapsed=is_collapsed(scores)
        ),
        banners=collect_banners(buckets, scores, tally=tally, tiny_margin=tiny_margin),
        buckets=buckets,
        dose_response=dose_response,
        membership=compute_membership(scores) if membership else [],
        findings=list(findings.kept),
        num_findings=findings.num_findings,
    )


def build_buckets(
    scores: Sequence[DocumentScore],
    outlines: Sequence[BucketOutline],
    tiny_margin_ids: frozenset[str],
) -> list[BucketScores]:
    """Return the report's table, one row an outline, in their order."""
    groups = {o.bucket: [s for s in scores if s.bucket == o.bucket] for o in outlines}
    assert sum(map(len, groups.values())) == len(scores), "a score belongs to no outlined bucket"
    controls = [o.bucket for o in outlines if o.role == "control"]
    control = _build_model_scores(groups[controls[0]]) if controls else None
    return [_build_bucket(o, groups[o.bucket], control, tiny_margin_ids) for o in outlines]


def _build_bucket(
    outline: BucketOutline,
    scores: Sequence[DocumentScore],
    control: ModelScores | None,
    tiny_margin_ids: frozenset[str],
) -> BucketScores:
    model = _build_model_scores(scores)
    compared = None if outline.role == "control" else control
    return BucketScores(
        bucket=outline.bucket,
        role=outline.role,
        num_repetitions=outline.num_repetitions,
        num_documents=len(scores),
        num_too_short=outline.num_too_short,
        num_not_sampled=outline.num_not_sampled,
        model=model,
        base=_build_base_scores(scores),
        mean_extraction_strength=_mean([s.extraction_strength for s in scores]),
        mean_type_token_ratio=_mean([s.type_token_ratio for s in scores]),
        mean_argmax_type_token_ratio=_mean([s.argmax_type_token_ratio for s in scores]),
        num_tiny_margin=sum(score.id in tiny_margin_ids for score in scores),
        verbatim_minus_control=compared and compute_difference(model.verbatim, compared.verbatim),
        near_verbatim_minus_control=compared
        and compute_difference(model.near_verbatim, compared.near_verbatim),
    )


def _build_model_scores(scores: Sequence[DocumentScore]) -> ModelScores:
    return ModelScores(
        verbatim=clopper_pearson(sum(s.verbatim for s in scores), len(scores)),
        near_verbatim=clopper_pearson(sum(s.near_verbatim for s in scores), len(scores)),
        mean_token_accuracy=compute_mean(
            [s.num_correct / s.continuation_tokens for s in scores], bounds=(0, 1)
        ),
        median_first_divergence=_median([s.first_divergence for s in scores]),
        mean_logprob=compute_mean([s.logprob / s.continuation_tokens for s in scores]),
    )


def _build_base_scores(scores: Sequence[DocumentScore]) -> ModelScores | None:
    """Return the same of the model before training; None where it did not score all of them."""
    before = [
        score.model_copy(
            update={
                "num_correct": score.base_num_correct,
                "verbatim": score.base_verbatim,
                "near_verbatim": score.base_near_verbatim,
                "first_divergence": score.base_first_divergence,
                "logprob": score.base_logprob,
            }
        )
        for score in scores
        if score.base_num_correct is not None
    ]
    return _build_model_scores(before) if before and len(before) == len(scores) else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Sequence[int]) -> float | None:
    return float(statistics.median(values)) if values else None
