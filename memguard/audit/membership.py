"""Do trained documents score above the control, and could one tell without the model?

Each score's AUC stands beside that of a bag of words that never asks the model: where that one
tells members from nonmembers, the documents themselves differ, and no score proves anything.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.audit.blind import score_blind
from memguard.audit.extraction import AuditDocument
from memguard.audit.membership_scores import MEMBERSHIP_SCORES
from memguard.audit.statistics import compute_auc, compute_tpr_at_fpr
from memguard.records import BLIND, MembershipScores
from memguard.seeds import derive_generator

# Of each kind: an AUC is then known to 0.01, and memory does not grow with the documents.
_BLIND_DOCUMENTS = 10_000
_OTHERS: Mapping[str, str] = {
    "loss_minus_base": "Loss, minus that of the model before training on the same tokens.",
    BLIND: "Bag of words, cross-fitted: never asks the model. What it tells, the texts tell.",
}


def is_member(document: AuditDocument) -> bool:
    """Tell whether training fed the document: None means that nobody counted, 0 that it did not."""
    return document.role == "trained" and document.num_repetitions != 0


def compute_membership(
    documents: Sequence[AuditDocument],
    scores: Mapping[str, NDArray[np.float64]],
    *,
    fpr: Sequence[float],
    seed: int,
) -> list[MembershipScores]:
    """Return one row for each score, the blind baseline last; none below two of either kind.

    Args:
        documents: N of all roles; members are the trained, nonmembers the control.
        scores: ``[N]`` by name, NaN where one is missing; higher means more likely trained.
        fpr: false-positive rates.
        seed: decides the folds of the baseline.
    """
    member_N = np.array([is_member(document) for document in documents], dtype=bool)
    control_N = np.array([document.role == "control" for document in documents], dtype=bool)
    if min(member_N.sum(), control_N.sum()) < 2:
        return []
    blind_N = score_blind_documents(documents, member_N, control_N, seed)
    everything = dict(scores) | ({} if blind_N is None else {BLIND: blind_N})
    return [
        _compare(name, score_N, member_N, control_N, fpr) for name, score_N in everything.items()
    ]


def _compare(
    name: str,
    score_N: NDArray[np.float64],
    member_N: NDArray[np.bool_],
    control_N: NDArray[np.bool_],
    fpr: Sequence[float],
) -> MembershipScores:
    known_N = np.isfinite(score_N)
    members, nonmembers = score_N[member_N & known_N], score_N[control_N & known_N]
    is_enough = min(len(members), len(nonmembers)) >= 2
    score = MEMBERSHIP_SCORES.get(name)
    return MembershipScores(
        score=name,
        num_members=len(members),
        num_nonmembers=len(nonmembers),
        auc=compute_auc(members, nonmembers) if is_enough else None,
        definition=_OTHERS[name] if score is None else score.definition,
        tpr_at_fpr={
            f"{rate:g}": compute_tpr_at_fpr(members, nonmembers, rate) if is_enough else None
            for rate in fpr
        },
        num_missing=int(((member_N | control_N) & ~known_N).sum()),
    )


def score_blind_documents(
    documents: Sequence[AuditDocument],
    member_N: NDArray[np.bool_],
    control_N: NDArray[np.bool_],
    seed: int,
) -> NDArray[np.float64] | None:
    """Return the blind baseline's scores ``[N]``, NaN where a document was not scored.

    Args:
        documents: N of all roles.
        member_N: which are members.
        control_N: which are nonmembers.
        seed: decides the sample of each kind, and the folds.

    Returns:
        None where there are too few of either kind, see `score_blind`.
    """
    kinds = [
        derive_generator(seed, f"blind sample {index}").permutation(np.flatnonzero(kind_N))
        for index, kind_N in enumerate((member_N, control_N))
    ]
    asked = np.sort(np.concatenate([kind[:_BLIND_DOCUMENTS] for kind in kinds])).tolist()
    clusters = [cluster for i in asked if (cluster := documents[i].cluster) is not None]
    found = score_blind(
        [documents[index].input_ids for index in asked],
        member_N[asked],
        generator=derive_generator(seed, "blind baseline"),
        clusters=clusters if len(clusters) == len(asked) else None,
    )
    if found is None:
        return None
    score_N = np.full(len(documents), np.nan)
    score_N[asked] = found
    return score_N
