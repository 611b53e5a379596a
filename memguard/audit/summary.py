"""Evidence into the report's tables, verdict and findings."""

import statistics
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memguard.audit.banners import Tally, collect_banners, is_collapsed
from memguard.audit.doses import compute_trends, count_copies
from memguard.audit.extraction import ExtractionProbe, Window, list_clusters
from memguard.audit.findings import collect_findings
from memguard.audit.measures import ProbeTable, build_measures
from memguard.audit.membership import compute_membership
from memguard.audit.near_verbatim import NearVerbatim, NotGenerated
from memguard.audit.numbers import Numbers
from memguard.audit.one_pass import OnePass
from memguard.audit.probe_runs import list_probe_runs
from memguard.audit.probe_tables import build_attack_cost, list_tables
from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import clopper_pearson, compute_difference, compute_mean
from memguard.audit.suite import Suite
from memguard.audit.verdict import decide_verdict
from memguard.records import (
    NUM_RISK_QUERIES,
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
    GeneratedTexts,
    Interval,
    MaskChange,
    Measure,
    MembershipScores,
    ModelScores,
    ProbeRun,
    Rate,
    RiskName,
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
    near_verbatim: NearVerbatim | NotGenerated
    """Of the model."""
    base_near_verbatim: NearVerbatim | NotGenerated | None
    scores: Sequence[DocumentScore]
    """[N] the same as records."""
    own_membership: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Scores that took a pass of their own."""
    canaries: CanaryScores | None = None
    mask_changes: Sequence[MaskChange] = ()
    written: Sequence[ProbeTable] = ()
    """What was generated."""
    attacks: Sequence[AttackedBucket] = ()
    num_mask_texts: int = 0
    """Texts whose masks were compared with those of their copies."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """By a probe's name, why the audit had nothing to run it on."""
    cut: CutDocuments | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The parts of an `AuditReport` that follow from the evidence."""

    verdict: Verdict
    banners: list[Banner]
    buckets: list[BucketScores]
    generated: GeneratedTexts
    base_generated: GeneratedTexts | None
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
    probe_runs: list[ProbeRun]


def summarise(
    evidence: Evidence, *, suite: Suite, tiny_margin: float, tally: Tally, seed: int
) -> Summary:
    """Return everything the report says of the documents.

    Args:
        evidence: what was asked and said.
        suite: the probes.
        tiny_margin: in logits.
        tally: state of the counts of repetitions; dose-response is refused unless complete.
        seed: owns the folds of the blind baseline.
    """
    documents = [window.document for window in evidence.windows]
    scores, outlines = evidence.scores, evidence.outlines
    hanging = evidence.model["hangs_on_margin"] > 0
    if isinstance(evidence.near_verbatim, NearVerbatim):
        hanging |= evidence.near_verbatim.min_gap_N < tiny_margin
    tiny_margin_ids = frozenset(d.id for d, h in zip(documents, hanging, strict=True) if h)
    attack_cost = build_attack_cost(
        evidence.windows, evidence.one_pass, evidence.model, evidence.base, outlines
    )
    buckets = build_buckets(
        scores,
        outlines,
        tiny_margin_ids,
        list_clusters(documents),
        attack_cost=attack_cost,
        attacks=evidence.attacks,
    )
    findings = collect_findings(scores, {d.id: d.text_hmac for d in documents})
    generated = describe_generated(suite.extraction, evidence.near_verbatim, evidence.model)
    dose_response = tally == "complete"
    membership = []
    if suite.membership is not None:
        membership = compute_membership(
            documents, _list_membership(evidence), fpr=suite.membership.fpr, seed=seed
        )
    tables = list_tables(
        evidence.windows,
        evidence.one_pass,
        evidence.model,
        evidence.base,
        near_verbatim=_matched(evidence.near_verbatim),
        base_near_verbatim=_matched(evidence.base_near_verbatim),
    )
    return Summary(
        verdict=decide_verdict(
            buckets, scores, dose_response=dose_response, collapsed=is_collapsed(scores)
        ),
        banners=collect_banners(
            buckets, scores, generated, tally=tally, tiny_margin=tiny_margin, cut=evidence.cut
        ),
        buckets=buckets,
        generated=generated,
        base_generated=None
        if evidence.base_near_verbatim is None
        else describe_generated(suite.extraction, evidence.base_near_verbatim, evidence.base),
        dose_response=dose_response,
        membership=membership,
        findings=list(findings.kept),
        num_findings=findings.num_findings,
        cut=evidence.cut,
        measures=build_measures([*tables, *evidence.written], documents, outlines),
        attack_cost=attack_cost,
        attacks=list(evidence.attacks),
        extracted_copies=count_copies(scores),
        canaries=evidence.canaries,
        mask_changes=list(evidence.mask_changes),
        trends=compute_trends(buckets) if dose_response else [],
        probe_runs=list_probe_runs(
            suite,
            windows=evidence.windows,
            model=evidence.model,
            membership=membership,
            canaries=evidence.canaries,
            written=evidence.written,
            attacks=evidence.attacks,
            num_mask_texts=evidence.num_mask_texts,
            why_not=evidence.why_not,
        ),
    )


def _list_membership(evidence: Evidence) -> dict[str, NDArray[np.float64]]:
    """Return every membership score, as `MEMBERSHIP_SCORES` names them."""
    found = {name: evidence.model[f"membership.{name}"] for name in evidence.one_pass.membership}
    if evidence.base is not None and "loss" in found:
        found["loss_minus_base"] = found["loss"] - evidence.base["membership.loss"]
    return found | dict(evidence.own_membership)


def describe_generated(
    probe: ExtractionProbe, near_verbatim: NearVerbatim | NotGenerated, one_pass: Numbers | None
) -> GeneratedTexts:
    """Return how near-verbatim matches were found, as the report tells it."""
    if isinstance(near_verbatim, NotGenerated):
        return GeneratedTexts(
            reason_not_generated=near_verbatim.reason,
            num_verbatim=0,
            num_generated=0,
            floor=probe.generation_floor,
            num_below_floor=0,
            num_checked=0,
            num_matched_below_floor=0,
        )
    return GeneratedTexts(
        reason_not_generated=None,
        num_verbatim=near_verbatim.num_verbatim,
        num_generated=near_verbatim.num_generated,
        floor=probe.generation_floor,
        num_below_floor=near_verbatim.num_below_floor,
        num_checked=near_verbatim.num_checked,
        num_matched_below_floor=near_verbatim.num_matched_below_floor,
    )


def _matched(near_verbatim: NearVerbatim | NotGenerated | None) -> NDArray[np.float64] | None:
    if not isinstance(near_verbatim, NearVerbatim):
        return None
    return near_verbatim.matched_N.astype(np.float64)


def build_buckets(
    scores: Sequence[DocumentScore],
    outlines: Sequence[BucketOutline],
    tiny_margin_ids: frozenset[str],
    cluster_N: NDArray[np.int64],
    *,
    attack_cost: Sequence[AttackCostBucket] = (),
    attacks: Sequence[AttackedBucket] = (),
) -> list[BucketScores]:
    """Return the report's table, one row an outline, in their order.

    Args:
        scores: [N] documents.
        outlines: the buckets.
        tiny_margin_ids: documents whose verdict hangs on a tiny margin.
        cluster_N: [N] near-duplicate clusters.
        attack_cost: of each bucket; empty where it was not measured.
        attacks: those that ran.
    """
    groups = {outline.bucket: _Group() for outline in outlines}
    for score, cluster in zip(scores, cluster_N.tolist(), strict=True):
        assert score.bucket in groups, "a score belongs to no outlined bucket"
        groups[score.bucket].add(score, score.id in tiny_margin_ids, cluster)
    costs = {cost.bucket: cost for cost in attack_cost}
    # A bucket without documents cannot tell.
    generated, base_generated = (
        any(one.accuracy and one.is_generated for one in verdicts)
        for verdicts in (
            [group.model for group in groups.values()],
            [group.base for group in groups.values()],
        )
    )
    rows = []
    for outline in outlines:
        cost = costs.get(outline.bucket)
        best = [one.any_verbatim for one in attacks if one.bucket == outline.bucket]
        rows.append(
            _build_bucket(
                outline,
                groups[outline.bucket],
                None if cost is None else cost.model.within[NUM_RISK_QUERIES],
                None if cost is None or cost.base is None else cost.base.within[NUM_RISK_QUERIES],
                max(best, key=lambda rate: rate.rate or 0.0, default=None),
                generated=generated,
                base_generated=base_generated,
            )
        )
    control = next((row for row in rows if row.role == "control"), None)
    if control is None:
        return rows
    return [
        row
        if row is control
        else row.model_copy(update={"minus_control": _subtract(row.risks, control.risks)})
        for row in rows
    ]


def _subtract(
    risks: Mapping[RiskName, Rate], control: Mapping[RiskName, Rate]
) -> dict[RiskName, Interval]:
    differences = {
        name: compute_difference(rate, control[name])
        for name, rate in risks.items()
        if name in control
    }
    return {name: one for name, one in differences.items() if one is not None}


class _Verdicts:
    """What one model did with the documents of a bucket, a few bytes each."""

    def __init__(self) -> None:
        self.num_verbatim = self.num_near_verbatim = self.num_teacher_forced_90 = 0
        self.is_generated = True
        self.accuracy, self.logprob = array("d"), array("d")
        self.divergence = array("q")

    def add(
        self,
        *,
        correct: int,
        verbatim: bool,
        near: bool | None,
        teacher_forced_90: bool,
        divergence: int,
        logprob: float,
        size: int,
    ) -> None:
        self.num_verbatim += verbatim
        self.num_near_verbatim += bool(near)
        self.is_generated &= near is not None
        self.num_teacher_forced_90 += teacher_forced_90
        self.accuracy.append(correct / size)
        self.logprob.append(logprob / size)
        self.divergence.append(divergence)


class _Group:
    """The documents of one bucket."""

    def __init__(self) -> None:
        self.model, self.base = _Verdicts(), _Verdicts()
        self.strength, self.ratio, self.argmax_ratio = array("d"), array("d"), array("d")
        self.cluster = array("q")
        self.num_documents = self.num_tiny_margin = 0

    def add(self, score: DocumentScore, is_tiny: bool, cluster: int) -> None:
        """Take one document."""
        self.num_documents += 1
        self.num_tiny_margin += is_tiny
        self.cluster.append(cluster)
        self.strength.append(score.extraction_strength)
        self.ratio.append(score.type_token_ratio)
        self.argmax_ratio.append(score.argmax_type_token_ratio)
        size = score.continuation_tokens
        self.model.add(
            correct=score.num_correct,
            verbatim=score.verbatim,
            near=score.near_verbatim,
            teacher_forced_90=score.teacher_forced_90,
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
            near=score.base_near_verbatim,
            teacher_forced_90=bool(score.base_teacher_forced_90),
            divergence=score.base_first_divergence,
            logprob=score.base_logprob,
            size=size,
        )


def _build_bucket(
    outline: BucketOutline,
    group: _Group,
    within: Rate | None,
    base_within: Rate | None,
    best_attack: Rate | None,
    *,
    generated: bool,
    base_generated: bool,
) -> BucketScores:
    model = _build_model_scores(group.model, group.cluster, generated)
    # Of a base that did not score all of them, the numbers would not stand beside the model's.
    has_base = 0 < len(group.base.accuracy) == group.num_documents
    base = _build_model_scores(group.base, group.cluster, base_generated) if has_base else None
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
        base=base,
        mean_extraction_strength=_mean(group.strength),
        mean_type_token_ratio=_mean(group.ratio),
        mean_argmax_type_token_ratio=_mean(group.argmax_ratio),
        num_tiny_margin=group.num_tiny_margin,
        risks=_list_risks(model, within, best_attack),
        base_risks={} if base is None else _list_risks(base, base_within, None),
        minus_control={},
    )


def _list_risks(
    scores: ModelScores, within: Rate | None, best_attack: Rate | None
) -> dict[RiskName, Rate]:
    risks: dict[RiskName, Rate | None] = {
        "verbatim": scores.verbatim,
        "near_verbatim": scores.near_verbatim,
        "attack_cost": within,
        "attack": best_attack,
    }
    return {name: rate for name, rate in risks.items() if rate is not None}


def _build_model_scores(
    verdicts: _Verdicts, clusters: Sequence[int], generated: bool
) -> ModelScores:
    count = len(verdicts.accuracy)
    near = clopper_pearson(verdicts.num_near_verbatim, count) if generated else None
    return ModelScores(
        verbatim=clopper_pearson(verdicts.num_verbatim, count),
        near_verbatim=near,
        teacher_forced_90=clopper_pearson(verdicts.num_teacher_forced_90, count),
        mean_token_accuracy=compute_mean(verdicts.accuracy, bounds=(0, 1), clusters=clusters),
        median_first_divergence=_median(verdicts.divergence),
        mean_logprob=compute_mean(verdicts.logprob, clusters=clusters),
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Sequence[int]) -> float | None:
    return float(statistics.median(values)) if values else None
