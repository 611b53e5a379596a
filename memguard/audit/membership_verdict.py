"""Second line of the verdict: whether one score separates trained from control documents.

    score        `loss_minus_base` if the base model ran, else `loss`: fixed before it is computed
    documents    the first of each cluster by id, because copies are not independent

    told-apart         10 clusters of either kind, and the AUC's interval begins at 0.6 or above, or
                       ends at 0.4 or below
    cannot-be-judged   else, below 30 control clusters, below two trained ones, or a control of
                       another kind
    slightly           else, the interval does not contain 0.5
    not-seen           else

Nearly every fine-tune that learned something has an interval above 0.5.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.audit.statistics import compute_auc
from memguard.audit.verdict import DocumentResults
from memguard.records.scores import Interval
from memguard.records.verdict import MembershipLevel, MembershipVerdict

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
    """Judge membership by the rule of the module.

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
