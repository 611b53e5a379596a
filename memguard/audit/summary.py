"""Evidence into the report's tables, verdict and findings."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memguard.audit.bucket_table import build_buckets
from memguard.audit.cache import Numbers
from memguard.audit.extraction import ExtractionProbe, Window, list_clusters
from memguard.audit.membership import compute_membership
from memguard.audit.near_verbatim import NearVerbatim, NotGenerated
from memguard.audit.probe_runs import list_probe_runs
from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import compute_trend, fit_dose_response
from memguard.audit.suite import Suite
from memguard.audit.tables import ProbeTable, build_attack_cost, build_measures, list_tables
from memguard.audit.teacher_forcing import OnePass
from memguard.audit.verdict import collect_findings, decide_verdict
from memguard.audit.warnings import Tally, collect_banners, is_collapsed
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
    GeneratedTexts,
    MaskChange,
    Measure,
    MembershipScores,
    ProbeRun,
    Verdict,
)

# Rates against the number of repetitions and of copies: trend, monotone fit, k-eidetic counts.

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
