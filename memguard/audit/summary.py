"""Evidence into the report's tables, verdict and findings."""

import statistics
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memguard.audit.banners import Tally, collect_banners, is_collapsed
from memguard.audit.doses import compute_trends, count_copies
from memguard.audit.extraction import Window
from memguard.audit.findings import collect_findings
from memguard.audit.measures import ProbeTable, build_measures
from memguard.audit.membership import compute_membership
from memguard.audit.numbers import Numbers
from memguard.audit.one_pass import OnePass
from memguard.audit.probe_tables import build_attack_cost, list_tables
from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import clopper_pearson, compute_difference, compute_mean
from memguard.audit.suite import Suite
from memguard.audit.verdict import decide_verdict
from memguard.records import (
    AttackCostBucket,
    AttackedBucket,
    Banner,
    BucketScores,
    CanaryScores,
    CutDocuments,
    DocumentScore,
    DoseTrend,
    ExtractedCopies,
    Finding,
    MaskChange,
    Measure,
    MembershipScores,
    ModelScores,
    Verdict,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evidence:
    """Everything that the models were asked and said; all arrays are [N] documents."""

    windows: Sequence[Window]
    """[N]"""
    outlines: Sequence[BucketOutline]
    """In the report's order, also those without a document."""
    one_pass: OnePass
    model: Numbers
    base: Numbers | None
    scores: Sequence[DocumentScore]
    """[N] the same as records."""
    own_membership: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Scores that took a pass of their own."""
    canaries: CanaryScores | None = None
    mask_changes: Sequence[MaskChange] = ()
    written: Sequence[ProbeTable] = ()
    """What was generated."""
    attacks: Sequence[AttackedBucket] = ()
    cut: CutDocuments | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The parts of an `AuditReport` that follow from the evidence."""

    verdict: Verdict
    banners: list[Banner]
    buckets: list[BucketScores]
    dose_response: bool
    membership: list[MembershipScores]
    findings: list[Finding]
    num_findings: int
    cut: CutDocuments | None
    measures: list[Measure]
    attack_cost: list[AttackCostBucket]
    attacks: list[AttackedBucket]
    extracted_copies: list[ExtractedCopies]
    canaries: CanaryScores | None
    mask_changes: list[MaskChange]
    trends: list[DoseTrend]


def summarise(
    evidence: Evidence, *, suite: Suite, tiny_margin: float, tally: Tally, seed: int
) -> Summary:
    """Return everything the report says of the documents.

    Args:
        evidence: what was asked and said.
        suite: the probes.
        tiny_margin: in logits.
        tally: state of the counts of repetitions; dose-response is refused unless complete.
        seed: owns resampling and the folds of the blind baseline.
    """
    documents = [window.document for window in evidence.windows]
    scores, outlines = evidence.scores, evidence.outlines
    hanging = evidence.model["hangs_on_margin"] > 0
    tiny_margin_ids = frozenset(d.id for d, h in zip(documents, hanging, strict=True) if h)
    buckets = build_buckets(scores, outlines, tiny_margin_ids)
    findings = collect_findings(scores, {d.id: d.text_hmac for d in documents})
    dose_response = tally == "complete"
    membership = []
    if suite.membership is not None:
        membership = compute_membership(
            documents, _list_membership(evidence), fpr=suite.membership.fpr, seed=seed
        )
    tables = [*list_tables(evidence.windows, evidence.one_pass, evidence.model, evidence.base)]
    return Summary(
        verdict=decide_verdict(
            buckets, scores, dose_response=dose_response, collapsed=is_collapsed(scores)
        ),
        banners=collect_banners(
            buckets, scores, tally=tally, tiny_margin=tiny_margin, cut=evidence.cut
        ),
        buckets=buckets,
        dose_response=dose_response,
        membership=membership,
        findings=list(findings.kept),
        num_findings=findings.num_findings,
        cut=evidence.cut,
        measures=build_measures([*tables, *evidence.written], documents, outlines, seed=seed),
        attack_cost=build_attack_cost(
            evidence.windows, evidence.one_pass, evidence.model, evidence.base, outlines
        ),
        attacks=list(evidence.attacks),
        extracted_copies=count_copies(scores),
        canaries=evidence.canaries,
        mask_changes=list(evidence.mask_changes),
        trends=compute_trends(buckets) if dose_response else [],
    )


def _list_membership(evidence: Evidence) -> dict[str, NDArray[np.float64]]:
    """Return every membership score, as `MEMBERSHIP_SCORES` names them."""
    found = {name: evidence.model[f"membership.{name}"] for name in evidence.one_pass.membership}
    if evidence.base is not None and "loss" in found:
        found["loss_minus_base"] = found["loss"] - evidence.base["membership.loss"]
    return found | dict(evidence.own_membership)


def build_buckets(
    scores: Sequence[DocumentScore],
    outlines: Sequence[BucketOutline],
    tiny_margin_ids: frozenset[str],
) -> list[BucketScores]:
    """Return the report's table, one row an outline, in their order."""
    groups = {outline.bucket: _Group() for outline in outlines}
    for score in scores:
        assert score.bucket in groups, "a score belongs to no outlined bucket"
        groups[score.bucket].add(score, score.id in tiny_margin_ids)
    controls = [o.bucket for o in outlines if o.role == "control"]
    control = _build_model_scores(groups[controls[0]].model) if controls else None
    return [_build_bucket(outline, groups[outline.bucket], control) for outline in outlines]


class _Verdicts:
    """What one model did with the documents of a bucket, a few bytes each."""

    def __init__(self) -> None:
        self.num_verbatim = self.num_near_verbatim = 0
        self.accuracy, self.logprob = array("d"), array("d")
        self.divergence = array("q")

    def add(
        self,
        *,
        correct: int,
        verbatim: bool,
        near: bool,
        divergence: int,
        logprob: float,
        size: int,
    ) -> None:
        self.num_verbatim += verbatim
        self.num_near_verbatim += near
        self.accuracy.append(correct / size)
        self.logprob.append(logprob / size)
        self.divergence.append(divergence)


class _Group:
    """The documents of one bucket."""

    def __init__(self) -> None:
        self.model, self.base = _Verdicts(), _Verdicts()
        self.strength, self.ratio, self.argmax_ratio = array("d"), array("d"), array("d")
        self.num_documents = self.num_tiny_margin = 0

    def add(self, score: DocumentScore, is_tiny: bool) -> None:
        """Take one document."""
        self.num_documents += 1
        self.num_tiny_margin += is_tiny
        self.strength.append(score.extraction_strength)
        self.ratio.append(score.type_token_ratio)
        self.argmax_ratio.append(score.argmax_type_token_ratio)
        size = score.continuation_tokens
        self.model.add(
            correct=score.num_correct,
            verbatim=score.verbatim,
            near=score.near_verbatim,
            divergence=score.first_divergence,
            logprob=score.logprob,
            size=size,
        )
        if score.base_num_correct is None:
            return
        assert score.base_first_divergence is not None, "the base scored it or did not"
        assert score.base_logprob is not None, "the base scored it or did not"
        self.base.add(
            correct=score.base_num_correct,
            verbatim=bool(score.base_verbatim),
            near=bool(score.base_near_verbatim),
            divergence=score.base_first_divergence,
            logprob=score.base_logprob,
            size=size,
        )


def _build_bucket(
    outline: BucketOutline, group: _Group, control: ModelScores | None
) -> BucketScores:
    model = _build_model_scores(group.model)
    compared = None if outline.role == "control" else control
    # Of a base that did not score all of them, the numbers would not stand beside the model's.
    has_base = 0 < len(group.base.accuracy) == group.num_documents
    return BucketScores(
        bucket=outline.bucket,
        role=outline.role,
        num_repetitions=outline.num_repetitions,
        num_documents=group.num_documents,
        num_too_short=outline.num_too_short,
        num_cut_too_short=outline.num_cut_too_short,
        num_nothing_supervised=outline.num_nothing_supervised,
        num_not_sampled=outline.num_not_sampled,
        model=model,
        base=_build_model_scores(group.base) if has_base else None,
        mean_extraction_strength=_mean(group.strength),
        mean_type_token_ratio=_mean(group.ratio),
        mean_argmax_type_token_ratio=_mean(group.argmax_ratio),
        num_tiny_margin=group.num_tiny_margin,
        verbatim_minus_control=compared and compute_difference(model.verbatim, compared.verbatim),
        near_verbatim_minus_control=compared
        and compute_difference(model.near_verbatim, compared.near_verbatim),
    )


def _build_model_scores(verdicts: _Verdicts) -> ModelScores:
    count = len(verdicts.accuracy)
    return ModelScores(
        verbatim=clopper_pearson(verdicts.num_verbatim, count),
        near_verbatim=clopper_pearson(verdicts.num_near_verbatim, count),
        mean_token_accuracy=compute_mean(verdicts.accuracy, bounds=(0, 1)),
        median_first_divergence=_median(verdicts.divergence),
        mean_logprob=compute_mean(verdicts.logprob),
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Sequence[int]) -> float | None:
    return float(statistics.median(values)) if values else None
