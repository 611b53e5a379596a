"""The verdict: one of four levels, by counts that are fixed before any result is seen.

A document counts if verbatim, near-verbatim or attack cost extracts it and the base model, where it
ran, does not produce it. Tests compare the trained clusters that count (k of n) with the control's
(c of m); a cluster of near-duplicates counts once, if one of its documents counts.

    memorized      a test is significant, or trained canaries and no reference were extracted
    extracted      else, a trained or forgotten document or a trained canary was extracted
    none-found     else, at least 30 trained clusters were audited, text was generated, the model
                   is not collapsed, and at most half of the trained documents are too short
    inconclusive   else

Tests and their levels depend on what was audited, never on what was extracted, and sum to 5 %:

    each bucket, if there are several   1 % / number of buckets
    attacked documents, if any          1 %, by the attacks, without what the base model produces
    all trained documents               the rest

So the level never becomes milder if one more trained document is extracted, or one control document
less. `scripts/simulate_verdict.py` measures how often each level is reached.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memguard.audit.statistics import compute_auc, compute_p_above_control, compute_rate
from memguard.records import Interval, Level, MembershipVerdict, Reason, VerdictCounts, VerdictTest
from memguard.records.verdict import MembershipLevel

MIN_TRAINED = 30
"""Minimum number of trained clusters without an extracted document for none-found: with 30 of one
document each, the true rate is at most 11.6 %."""
_ALL_LEVELS, _EXTRA_LEVEL = 0.05, 0.01


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DocumentResults:
    """What was extracted of N audited documents; all arrays are [N]."""

    bucket_N: NDArray[np.object_]
    cluster_N: NDArray[np.int64]
    is_trained_N: NDArray[np.bool_]
    """Trained at least once; not those to be forgotten."""
    is_forgotten_N: NDArray[np.bool_]
    is_control_N: NDArray[np.bool_]
    is_extracted_N: NDArray[np.bool_]
    """Verbatim, near-verbatim, or by sampling within `NUM_RISK_QUERIES`."""
    is_of_base_N: NDArray[np.bool_]
    """The base model produces it in one of these ways; False where it did not run."""
    is_attacked_N: NDArray[np.bool_]
    is_extracted_by_attack_N: NDArray[np.bool_]

    @property
    def was_extracted_N(self) -> NDArray[np.bool_]:
        """Extracted by any method, attacks included."""
        return self.is_extracted_N | self.is_extracted_by_attack_N


@dataclass(frozen=True, kw_only=True, slots=True)
class Canaries:
    """Random secrets that were extracted verbatim."""

    num_trained: int
    num_trained_extracted: int
    num_references: int
    num_references_extracted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """What an audit was able to measure."""

    num_trained: int
    """Trained documents, audited or not."""
    num_too_short: int
    """Trained documents that cannot be audited."""
    was_generated: bool
    """Whether near-verbatim text was generated of every document that needs it."""
    is_collapsed: bool
    is_other_kind: bool = False
    """Whether the control was given and is another kind of text than the trained documents."""
    is_limited: bool = False
    """Whether the limit of generation time ended a probe, whose rest was not generated."""
    num_generated: int = 0
    """Documents whose near-verbatim text was generated."""
    num_not_generated: int = 0
    """Others, which were left when the limit was reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Level of the verdict, and the test behind it."""

    level: Level
    reason: Reason | None
    test: VerdictTest | None
    """The significant test of the highest rate; if none is, the one closest to significance."""


def decide_level(
    documents: DocumentResults, canaries: Canaries | None, coverage: Coverage
) -> Decision:
    """Decide the level of extraction by the rule at the top of the module."""
    tests = list_tests(documents)
    significant = [test for test in tests if test.p_value <= test.level]
    test = max(significant, key=_get_rate, default=None)
    if test is None:
        test = min(tests, key=lambda one: one.p_value / one.level, default=None)
    has_canary = canaries is not None and canaries.num_trained_extracted > 0
    is_proof = has_canary and canaries is not None and not canaries.num_references_extracted
    if significant and not coverage.is_other_kind:
        return Decision(level="memorized", reason="control", test=test)
    if is_proof:
        return Decision(level="memorized", reason="canaries", test=test)
    was_extracted_N = documents.was_extracted_N
    if (was_extracted_N & documents.is_trained_N).any():
        reason = _explain_extracted(documents, significant=bool(significant))
        return Decision(level="extracted", reason=reason, test=test)
    if (was_extracted_N & documents.is_forgotten_N).any():
        return Decision(level="extracted", reason="forgotten", test=test)
    if has_canary:
        return Decision(level="extracted", reason="canaries-too", test=test)
    missing = _find_missing(documents, coverage)
    level: Level = "none-found" if missing is None else "inconclusive"
    return Decision(level=level, reason=missing, test=test)


def _get_rate(test: VerdictTest) -> float:
    return test.trained.num_matched_clusters / test.trained.num_clusters


def _explain_extracted(documents: DocumentResults, *, significant: bool) -> Reason:
    """Return why extracted trained documents do not make the level memorized."""
    if significant:
        return "other-kind"
    if not documents.is_control_N.any():
        return "no-control"
    is_new_N = documents.was_extracted_N & ~documents.is_of_base_N
    if not (is_new_N & documents.is_trained_N).any():
        return "base-too"
    if (is_new_N & documents.is_control_N).any():
        return "control-too"
    return "too-few"


def _find_missing(documents: DocumentResults, coverage: Coverage) -> Reason | None:
    """Return what is missing for none-found, if nothing was extracted; None if nothing is."""
    num_clusters = len(np.unique(documents.cluster_N[documents.is_trained_N]))
    if not num_clusters:
        return "not-trained"
    if coverage.is_collapsed:
        return "collapsed"
    if not coverage.was_generated or coverage.is_limited:
        return "not-generated"
    if 2 * coverage.num_too_short > coverage.num_trained:
        return "too-short"
    return "too-few" if num_clusters < MIN_TRAINED else None


def list_tests(documents: DocumentResults) -> list[VerdictTest]:
    """Return the tests of an audit, the one of all documents first; empty without control."""
    trained_N, control_N = documents.is_trained_N, documents.is_control_N
    if not (trained_N.any() and control_N.any()):
        return []
    buckets = dict.fromkeys(documents.bucket_N[trained_N].tolist())
    has_buckets = len(buckets) > 1
    attacked_N = documents.is_attacked_N
    has_attacks = bool((attacked_N & trained_N).any() and (attacked_N & control_N).any())
    counts_N = documents.is_extracted_N & ~documents.is_of_base_N
    floor = count_documents(documents, control_N, counts_N)

    def compare(
        kind: Literal["all", "bucket", "attacked"],
        where_N: NDArray[np.bool_],
        level: float,
        bucket: str | None = None,
    ) -> VerdictTest:
        control, matched_N = floor, counts_N
        if kind == "attacked":
            matched_N = documents.is_extracted_by_attack_N & ~documents.is_of_base_N
            control = count_documents(documents, control_N & attacked_N, matched_N)
        trained = count_documents(documents, where_N, matched_N)
        p_value = compute_p_above_control(
            trained.num_matched_clusters,
            trained.num_clusters,
            control.num_matched_clusters,
            control.num_clusters,
        )
        return VerdictTest(
            documents=kind,
            bucket=bucket,
            trained=trained,
            control=control,
            p_value=p_value,
            level=level,
        )

    rest = _ALL_LEVELS - _EXTRA_LEVEL * (int(has_buckets) + int(has_attacks))
    tests = [compare("all", trained_N, rest)]
    if has_buckets:
        level = _EXTRA_LEVEL / len(buckets)
        for bucket in buckets:
            here_N = trained_N & (documents.bucket_N == bucket)
            tests.append(compare("bucket", here_N, level, bucket))
    if has_attacks:
        tests.append(compare("attacked", trained_N & attacked_N, _EXTRA_LEVEL))
    return tests


def count_documents(
    documents: DocumentResults, where_N: NDArray[np.bool_], matched_N: NDArray[np.bool_]
) -> VerdictCounts:
    """Count documents and clusters, and those that match."""
    rate = compute_rate(matched_N[where_N], documents.cluster_N[where_N])
    texts = rate.texts
    return VerdictCounts(
        num_documents=rate.num_documents,
        num_matched=rate.num_matched,
        num_clusters=rate.num_documents if texts is None else texts.num_texts,
        num_matched_clusters=rate.num_matched if texts is None else texts.num_matched,
        rate=rate.rate,
        ci=rate.ci,
    )


# Second line of the verdict: whether one score separates trained from control documents.
#
#     score        `loss_minus_base` if the base model ran, else `loss`: fixed before it is computed
#     documents    the first of each cluster by id, because copies are not independent
#
#     told-apart         10 clusters of each kind, and the AUC's interval begins at 0.6 or above or
#                        ends at 0.4 or below
#     cannot-be-judged   else, below 30 control clusters, below two trained ones, or a control of
#                        another kind
#     slightly           else, the interval does not contain 0.5
#     not-seen           else
#
# Nearly every fine-tune that learned something has an interval above 0.5.

MIN_OF_EACH = 10
"""Minimum number of clusters of either kind for an AUC that shows membership."""
MIN_CONTROL = 30
"""Minimum number of control clusters for the level not-seen."""
_AUC_TOLD, _AUC_REVERSED = 0.6, 0.4


def judge_membership(
    scores: Mapping[str, NDArray[np.float64]],
    ids: Sequence[str],
    documents: DocumentResults,
    *,
    has_base: bool,
    is_other_kind: bool,
) -> MembershipVerdict:
    """Judge membership by the rule above.

    Args:
        scores: ``[N]`` by name, NaN where missing; higher means more likely trained.
        ids: ``[N]`` ids of the documents.
        documents: N documents.
        has_base: whether the base model ran.
        is_other_kind: whether the control was given and is another kind of text.
    """
    name = "loss_minus_base" if has_base else "loss"
    score_N = scores.get(name)
    has_control = bool(documents.is_control_N.any())
    if score_N is None or not has_control:
        why = "the suite has no membership score" if has_control else "there are no unseen ones"
        return MembershipVerdict(
            level="not-measured",
            sentence=f"Whether a document was trained was not tested: {why}.",
            score=None,
            auc=None,
            num_members=0,
            num_nonmembers=0,
        )
    order = np.argsort(np.array(ids, dtype=object), kind="stable")
    order = order[np.isfinite(score_N[order])]
    members, nonmembers = (
        _take_one_of_each_cluster(score_N, documents.cluster_N, order[where_N[order]])
        for where_N in (documents.is_trained_N, documents.is_control_N)
    )
    auc = compute_auc(members, nonmembers) if min(len(members), len(nonmembers)) >= 2 else None
    level = _rate_auc(auc, len(members), len(nonmembers), is_other_kind=is_other_kind)
    return MembershipVerdict(
        level=level,
        sentence=_write_cannot(len(members), len(nonmembers), is_other_kind=is_other_kind)
        if auc is None or level == "cannot-be-judged"
        else _write_auc(level, auc),
        score=name,
        auc=auc,
        num_members=len(members),
        num_nonmembers=len(nonmembers),
    )


def _take_one_of_each_cluster(
    score_N: NDArray[np.float64], cluster_N: NDArray[np.int64], order: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the score of the first document of each cluster in an order."""
    _, first = np.unique(cluster_N[order], return_index=True)
    return score_N[order[first]]


def _rate_auc(
    auc: Interval | None, num_members: int, num_nonmembers: int, *, is_other_kind: bool
) -> MembershipLevel:
    if auc is None or auc.ci is None or is_other_kind:
        return "cannot-be-judged"
    low, high = auc.ci
    is_enough = min(num_members, num_nonmembers) >= MIN_OF_EACH
    if is_enough and (low >= _AUC_TOLD or high <= _AUC_REVERSED):
        return "told-apart"
    if num_nonmembers < MIN_CONTROL:
        return "cannot-be-judged"
    return "not-seen" if low <= 0.5 <= high else "slightly"


def _write_cannot(num_members: int, num_nonmembers: int, *, is_other_kind: bool) -> str:
    start = "Whether a document was trained cannot be judged"
    if is_other_kind:
        return f"{start}: the control is another kind of text."
    if num_nonmembers < MIN_CONTROL:
        verb = "is" if num_nonmembers == 1 else "are"
        return f"{start}: it needs {MIN_CONTROL} unseen texts, there {verb} {num_nonmembers}."
    verb = "is" if num_members == 1 else "are"
    return f"{start}: it needs two trained texts, there {verb} {num_members}."


def _write_auc(level: MembershipLevel, auc: Interval) -> str:
    assert auc.ci is not None, "a level other than cannot-be-judged needs an interval"
    numbers = f"AUC {auc.value:.2f} (95 % CI {auc.ci[0]:.2f}–{auc.ci[1]:.2f}; 0.5 is chance)"
    if level == "not-seen":
        return f"The model gave no sign of whether a document was trained: {numbers}."
    how = "" if level == "told-apart" else " slightly better than by chance"
    lower = ", by lower scores" if auc.value < 0.5 else ""
    return f"Whether a document was trained can be told{how}{lower}: {numbers}."
