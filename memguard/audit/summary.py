"""What was measured into the report: tables, trends, verdict, findings, which probes ran."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memguard.audit.cache import Numbers
from memguard.audit.document_scores import DocumentScores, ModelResults
from memguard.audit.extraction import ExtractionProbe, Window
from memguard.audit.membership import compute_membership, is_member
from memguard.audit.near_verbatim import NearVerbatim, NotGenerated
from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import compute_trend, fit_dose_response
from memguard.audit.suite import Suite
from memguard.audit.tables import (
    ProbeTable,
    build_attack_cost,
    build_buckets,
    build_measures,
    list_tables,
)
from memguard.audit.teacher_forcing import OnePass
from memguard.audit.verdict import collect_findings, decide_verdict
from memguard.audit.warnings import Tally, collect_banners, is_collapsed
from memguard.records import (
    BLIND,
    AttackCostBucket,
    AttackedBucket,
    Banner,
    BucketScores,
    CanaryScores,
    CutDocuments,
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

COPIES = (1, 2, 5, 10)
"""The k of k-eidetic memorisation that are counted."""
_COUNTED = {"canaries": "canaries", "mask_consistency": "texts"}
"""What a probe's number counts, where that is not documents."""
_MIN_OF_EACH = 2
"""Members, and control documents, below which there is no membership score."""


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


def count_copies(scores: DocumentScores) -> list[ExtractedCopies]:
    """Return how many documents are extracted verbatim though at most k trained ones hold them.

    k-eidetic memorisation, Carlini et al. 2021, with the manifest's clusters of near-duplicates for
    what holds a text. Empty where clusters are not known.
    """
    is_trained_N = (scores["role"] == "trained") & (scores["num_repetitions"] != 0)
    copies_N, verbatim_N = scores["num_copies"][is_trained_N], scores["verbatim"][is_trained_N]
    if not (copies_N >= 1).all() or not len(copies_N):
        return []
    return [
        ExtractedCopies(
            k=k,
            num_documents=int((copies_N <= k).sum()),
            num_extracted=int(verbatim_N[copies_N <= k].sum()),
        )
        for k in COPIES
    ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evidence:
    """Everything that was measured; all arrays are [N] documents."""

    windows: Sequence[Window]
    outlines: Sequence[BucketOutline]
    """In the report's order, also those without a document."""
    one_pass: OnePass
    """Which numbers the score matrices hold."""
    model: ModelResults
    base: ModelResults | None
    scores: DocumentScores
    """The columns made of these."""
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
        evidence: what was measured.
        suite: the probes.
        tiny_margin: in logits.
        tally: state of the counts of repetitions; dose-response is refused unless complete.
        seed: owns the folds of the blind baseline.
    """
    documents = [window.document for window in evidence.windows]
    scores, outlines = evidence.scores, evidence.outlines
    model, base = evidence.model, evidence.base
    hangs_N = model.one_pass["hangs_on_margin"] > 0
    hangs_N |= scores["greedy_margin"] < tiny_margin
    tables = list_tables(evidence.windows, evidence.one_pass, model, base)
    measures = build_measures([*tables, *evidence.written], documents, outlines)
    attack_cost = build_attack_cost(scores, outlines)
    buckets = build_buckets(
        measures, scores, outlines, hangs_N, attack_cost=attack_cost, attacks=evidence.attacks
    )
    findings, num_findings = collect_findings(scores, [d.text_hmac for d in documents])
    generated = describe_generated(suite.extraction, model.near_verbatim)
    dose_response = tally == "complete"
    membership = []
    if suite.membership is not None:
        membership = compute_membership(
            documents, _list_membership(evidence), fpr=suite.membership.fpr, seed=seed
        )
    return Summary(
        verdict=decide_verdict(
            buckets, evidence.windows, dose_response=dose_response, collapsed=is_collapsed(scores)
        ),
        banners=collect_banners(
            buckets, scores, generated, tally=tally, tiny_margin=tiny_margin, cut=evidence.cut
        ),
        buckets=buckets,
        generated=generated,
        base_generated=None
        if base is None
        else describe_generated(suite.extraction, base.near_verbatim),
        dose_response=dose_response,
        membership=membership,
        findings=findings,
        num_findings=num_findings,
        cut=evidence.cut,
        measures=measures,
        attack_cost=attack_cost,
        attacks=list(evidence.attacks),
        extracted_copies=count_copies(scores),
        canaries=evidence.canaries,
        mask_changes=list(evidence.mask_changes),
        trends=compute_trends(buckets) if dose_response else [],
        probe_runs=_list_probe_runs(suite, evidence, membership),
    )


def _list_membership(evidence: Evidence) -> dict[str, NDArray[np.float64]]:
    """Return every membership score, as `MEMBERSHIP_SCORES` names them."""
    numbers = evidence.model.one_pass
    found = {name: numbers[f"membership.{name}"] for name in evidence.one_pass.membership}
    if evidence.base is not None and "loss" in found:
        found["loss_minus_base"] = found["loss"] - evidence.base.one_pass["membership.loss"]
    return found | dict(evidence.own_membership)


def describe_generated(
    probe: ExtractionProbe, near_verbatim: NearVerbatim | NotGenerated
) -> GeneratedTexts:
    """Return how near-verbatim matches were found, for the report."""
    counts = [name for name in GeneratedTexts.model_fields if name.startswith("num_")]
    return GeneratedTexts.model_validate(
        {
            "reason_not_generated": getattr(near_verbatim, "reason", None),
            "floor": probe.generation_floor,
            **{name: getattr(near_verbatim, name, 0) for name in counts},
        }
    )


def _list_probe_runs(
    suite: Suite, evidence: Evidence, membership: Sequence[MembershipScores]
) -> list[ProbeRun]:
    """Return a record for each probe of the suite, in its order: how much it has results for.

    A document that is too short for every window of a grid, or has no membership score, does not
    count.
    """
    windows, numbers, canaries = evidence.windows, evidence.model.one_pass, evidence.canaries
    num_canaries = 0 if canaries is None else canaries.num_trained + canaries.num_references
    found = {
        "extraction": (len(windows), "no document is long enough"),
        "grid": (_count_measured(numbers, "grid."), "every document is too short for its windows"),
        "sampling": (_count_measured(numbers, "sampled."), "it names no way to draw"),
        "membership": (_count_compared(membership), _explain_no_membership(windows)),
        "canaries": (num_canaries, "there were no canaries"),
        "generation": (_count_written(evidence.written), "no document was continued"),
        "attacks": (_count_attacked(evidence.attacks), "no document was attacked"),
        "mask_consistency": (evidence.num_mask_texts, "no trained document is plain text"),
    }
    runs = []
    for probe in suite.probes:
        number, reason = found[probe.name]
        runs.append(
            ProbeRun.model_validate(
                {
                    "name": probe.name,
                    "version": probe.VERSION,
                    "num_documents": number or None,
                    "counted": _COUNTED.get(probe.name, "documents"),
                    "reason_not_run": None if number else evidence.why_not.get(probe.name, reason),
                }
            )
        )
    return runs


def _count_measured(numbers: Numbers, start: str) -> int:
    """Return the documents with any number whose name begins with ``start``."""
    columns = [index for index, name in enumerate(numbers.names) if name.startswith(start)]
    return int((~np.isnan(numbers.rows[:, columns])).any(axis=1).sum())


def _count_written(tables: Sequence[ProbeTable]) -> int:
    known = [~np.isnan(values_N) for table in tables for values_N in table.model.values()]
    return int(np.any(known, axis=0).sum()) if known else 0


def _count_attacked(attacks: Sequence[AttackedBucket]) -> int:
    """Every attack takes the same documents: return those of the first."""
    first = attacks[0].attack if attacks else ""
    return sum(each.any_verbatim.num_documents for each in attacks if each.attack == first)


def _count_compared(membership: Sequence[MembershipScores]) -> int:
    """Return the members and control documents that some score of the model compares."""
    sizes = [
        each.num_members + each.num_nonmembers
        for each in membership
        if each.score != BLIND and each.auc is not None
    ]
    return max(sizes, default=0)


def _explain_no_membership(windows: Sequence[Window]) -> str:
    num_members = sum(is_member(window.document) for window in windows)
    num_control = sum(window.document.role == "control" for window in windows)
    if not num_control:
        return "no control documents"
    if min(num_members, num_control) < _MIN_OF_EACH:
        return (
            f"{num_members} trained and {num_control} control documents; it needs "
            f"{_MIN_OF_EACH} of each"
        )
    return "none of its scores could be computed"
