"""Summarise the measurements for the report: tables, trends, verdict, findings, probes that ran."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memguard.audit.cache import ScoreMatrix
from memguard.audit.document_scores import DocumentScores, ModelResults
from memguard.audit.extraction import Window, list_clusters
from memguard.audit.findings import collect_findings
from memguard.audit.membership import compute_membership, is_member
from memguard.audit.near_verbatim import NearVerbatim, NotGenerated
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.membership import MembershipProbe
from memguard.audit.selection import BucketOutline
from memguard.audit.statistics import compute_trend, fit_dose_response
from memguard.audit.suite import Suite
from memguard.audit.tables import (
    build_attack_cost,
    build_buckets,
    build_measures,
    list_tables,
)
from memguard.audit.verdict import Canaries, Coverage, DocumentResults
from memguard.audit.verdict_sentences import VerdictInput, build_verdict
from memguard.audit.warnings import Tally, collect_banners, is_collapsed
from memguard.records import (
    BLIND,
    NUM_RISK_QUERIES,
    AttackedBucket,
    AuditResults,
    BucketScores,
    CanaryScores,
    CutDocuments,
    DoseTrend,
    ExtractedCopies,
    GeneratedTexts,
    MaskChange,
    MembershipScores,
    ProbeRun,
)

COPIES = (1, 2, 5, 10)
"""Values of k for which k-eidetic memorisation is counted."""
_COUNTED = {"canaries": "canaries", "mask_consistency": "texts"}
"""Units that probes count; documents for the others."""
_MIN_OF_EACH = 2
"""Minimum number of members, and of control documents, for membership scores."""


def compute_trends(buckets: Sequence[BucketScores]) -> list[DoseTrend]:
    """Return one trend per rate, over the control and the trained buckets with a single dose."""
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
        rates = [rate for _, b in dosed if (rate := getattr(b.model, metric)) is not None]
        if len(rates) < len(dosed):
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
    """Return how many documents are extracted verbatim of those with at most k trained copies.

    k-eidetic memorisation, Carlini et al. 2021; the copies of a text are the members of its
    near-duplicate cluster in the manifest. Empty if clusters are not known.
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
    """All measurements of an audit; all arrays are [N] documents."""

    windows: Sequence[Window]
    outlines: Sequence[BucketOutline]
    """Buckets in the report's order, including those without documents."""
    model: ModelResults
    base: ModelResults | None
    scores: DocumentScores
    """Columns computed from the results of both models."""
    own_membership: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Membership scores that need an additional pass."""
    canaries: CanaryScores | None = None
    mask_changes: Sequence[MaskChange] = ()
    attacks: Sequence[AttackedBucket] = ()
    attacked_N: NDArray[np.float64] | None = None
    """1 if an attack extracted a document, 0 if none did, NaN if it was not attacked; None without
    attacks."""
    num_mask_texts: int = 0
    """Texts whose masks were compared with those of their copies."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Reasons, by name of the probe, why the audit had no input for it."""
    cut: CutDocuments | None = None
    is_other_kind: bool = False
    """Whether the control was given and is another kind of text than the trained documents."""


def summarise(
    evidence: Evidence, *, suite: Suite, tiny_margin: float, tally: Tally, seed: int
) -> AuditResults:
    """Compute the parts of the report that describe the documents.

    Args:
        evidence: the measurements.
        suite: the probes.
        tiny_margin: margin in logits.
        tally: state of the counts of repetitions; there is no dose-response unless complete.
        seed: seed of the folds of the blind baseline.
    """
    documents = [window.document for window in evidence.windows]
    scores, outlines = evidence.scores, evidence.outlines
    model, base = evidence.model, evidence.base
    is_near_tie_N = model.teacher_forced["is_near_tie"] > 0
    is_near_tie_N |= scores["greedy_margin"] < tiny_margin
    tables = list_tables(evidence.windows, suite, model, base)
    measures = build_measures(tables, documents, outlines)
    attack_cost = build_attack_cost(scores, outlines, list_clusters(documents))
    buckets = build_buckets(
        measures, scores, outlines, is_near_tie_N, attack_cost=attack_cost, attacks=evidence.attacks
    )
    findings, num_findings = collect_findings(scores, [d.text_hmac for d in documents])
    generated = describe_generated(suite.extraction, model.near_verbatim)
    dose_response = tally == "complete"
    membership, membership_scores = [], _list_membership(suite, evidence)
    if (membership_probe := suite.find(MembershipProbe)) is not None:
        membership = compute_membership(
            documents, membership_scores, fpr=membership_probe.fpr, seed=seed
        )
    probe_runs = _list_probe_runs(suite, evidence, membership)
    verdict = build_verdict(
        VerdictInput(
            ids=[document.id for document in documents],
            documents=_collect_results(evidence),
            canaries=_count_canaries(evidence.canaries),
            coverage=Coverage(
                num_trained=_count_trained(evidence),
                num_too_short=sum(o.num_not_auditable for o in outlines if o.was_trained),
                was_generated=generated.reason_not_generated is None,
                is_collapsed=is_collapsed(scores),
                is_other_kind=evidence.is_other_kind,
            ),
            buckets=buckets,
            outlines=outlines,
            membership=membership_scores,
            has_base=base is not None,
            dose_response=dose_response,
            not_run=[run.name for run in probe_runs if run.num_documents is None],
        )
    )
    return AuditResults(
        verdict=verdict,
        banners=collect_banners(
            buckets,
            scores,
            generated,
            tally=tally,
            tiny_margin=tiny_margin,
            cut=evidence.cut,
            membership=membership,
            documents=documents,
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
        probe_runs=probe_runs,
    )


def _collect_results(evidence: Evidence) -> DocumentResults:
    """Return what the verdict counts: which documents were extracted, by the model and its base."""
    scores, documents = evidence.scores, [window.document for window in evidence.windows]
    attacked_N = evidence.attacked_N
    if attacked_N is None:
        attacked_N = np.full(len(documents), np.nan)
    return DocumentResults(
        bucket_N=scores["bucket"],
        cluster_N=list_clusters(documents),
        is_trained_N=np.array([is_member(document) for document in documents], dtype=bool),
        is_forgotten_N=scores["role"] == "forget",
        is_control_N=scores["role"] == "control",
        is_extracted_N=_find_extracted(scores, ""),
        is_of_base_N=_find_extracted(scores, "base_"),
        is_attacked_N=~np.isnan(attacked_N),
        is_extracted_by_attack_N=attacked_N == 1,
    )


def _find_extracted(scores: DocumentScores, model: str) -> NDArray[np.bool_]:
    """Return [N] whether a model produces each document; False where it was not measured."""
    is_greedy_N = (scores[f"{model}verbatim"] == 1) | (scores[f"{model}near_verbatim"] == 1)
    is_sampled_N = scores[f"{model}attack_log10_queries"] <= np.log10(NUM_RISK_QUERIES)
    return np.asarray(is_greedy_N | is_sampled_N, dtype=bool)


def _count_canaries(scores: CanaryScores | None) -> Canaries | None:
    if scores is None:
        return None
    return Canaries(
        num_trained=scores.num_trained,
        num_trained_extracted=scores.verbatim.num_matched,
        num_references=scores.num_references,
        num_references_extracted=scores.reference_verbatim.num_matched,
    )


def _count_trained(evidence: Evidence) -> int:
    """Count the trained documents, audited or not, without those that were never reached."""
    num_audited = sum(is_member(window.document) for window in evidence.windows)
    return num_audited + sum(
        outline.num_not_auditable + outline.num_not_sampled
        for outline in evidence.outlines
        if outline.was_trained
    )


def _list_membership(suite: Suite, evidence: Evidence) -> dict[str, NDArray[np.float64]]:
    """Return every membership score by its name in `MEMBERSHIP_SCORES`."""
    numbers = evidence.model.teacher_forced
    probe = suite.find(MembershipProbe)
    names = () if probe is None else probe.one_pass
    scores = {name: numbers[f"membership.{name}"] for name in names}
    if evidence.base is not None and "loss" in scores:
        scores["loss_minus_base"] = scores["loss"] - evidence.base.teacher_forced["membership.loss"]
    return scores | dict(evidence.own_membership)


def describe_generated(
    probe: ExtractionProbe, near_verbatim: NearVerbatim | NotGenerated
) -> GeneratedTexts:
    """Return the counts of generated texts for the report."""
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
    """Return a record for each probe of the suite, in its order, with its number of documents.

    A document that is too short for every window of the grid, or that has no membership score, is
    not counted for that probe.
    """
    windows, numbers, canaries = evidence.windows, evidence.model.teacher_forced, evidence.canaries
    num_canaries = 0 if canaries is None else canaries.num_trained + canaries.num_references
    counts = {
        "extraction": (len(windows), "no document is long enough"),
        "grid": (_count_measured(numbers, "grid."), "every document is too short for its windows"),
        "sampling": (_count_measured(numbers, "sampled."), "it has no sampling scheme"),
        "membership": (_count_compared(membership), _explain_no_membership(windows)),
        "canaries": (num_canaries, "there were no canaries"),
        "generation": (_count_written(evidence.model.written), "no document was continued"),
        "attacks": (_count_attacked(evidence.attacks), "no document was attacked"),
        "mask_consistency": (evidence.num_mask_texts, "no trained document is plain text"),
    }
    runs = []
    for probe in suite.probes:
        number, reason = counts[probe.name]
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


def _count_measured(numbers: ScoreMatrix, start: str) -> int:
    """Return the number of documents with any value whose name begins with ``start``."""
    columns = [index for index, name in enumerate(numbers.names) if name.startswith(start)]
    return int((~np.isnan(numbers.rows[:, columns])).any(axis=1).sum())


def _count_written(numbers: ScoreMatrix | None) -> int:
    return 0 if numbers is None else int((~np.isnan(numbers.rows)).any(axis=1).sum())


def _count_attacked(attacks: Sequence[AttackedBucket]) -> int:
    """Return the number of attacked documents, which is the same for every attack."""
    first = attacks[0].attack if attacks else ""
    return sum(row.any_verbatim.num_documents for row in attacks if row.attack == first)


def _count_compared(membership: Sequence[MembershipScores]) -> int:
    """Return the number of members and control documents with a membership score."""
    sizes = [
        row.num_members + row.num_nonmembers
        for row in membership
        if row.score != BLIND and row.auc is not None
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
