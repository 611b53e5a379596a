"""Do trained documents score above the control, and could one tell without the model?

Each score's AUC is shown beside that of a baseline that never runs the model: a multinomial naive
Bayes with add-one smoothing that learns from the token ids of four fifths of the documents and
scores the last fifth, five times over. If members and nonmembers differ in their words, date or
source, any score can seem to tell them apart and owe the model nothing (the trap of benchmarks that
split by time, Duan et al. 2024). A baseline near one half: the two kinds look alike, as randomly
drawn ones do. Well above: so much can be had without the model. The classifier is our choice.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array

from memguard.audit.extraction import AuditDocument
from memguard.audit.membership_scores import MEMBERSHIP_SCORES
from memguard.audit.statistics import compute_auc, compute_tpr_at_fpr
from memguard.records import BLIND, MembershipScores
from memguard.seeds import derive_generator

NUM_FOLDS = 5
"""Also the fewest documents of either kind: one for each fold to be judged on."""


def score_blind(
    token_ids: Sequence[ArrayLike],
    is_member: ArrayLike,
    *,
    generator: np.random.Generator,
    clusters: ArrayLike | None = None,
) -> NDArray[np.float64] | None:
    """Return ``[num_documents]`` log-odds of membership, each from folds without that document.

        score = sum over tokens t of log (n_t + 1) / (N + V) of members - the same of nonmembers

    with n_t of N training tokens being t, V distinct tokens in all documents. How common members
    are is left out: it differs between folds by chance. A document without tokens scores 0.

    Args:
        token_ids: of each document, in any order of documents.
        is_member: ``[num_documents]`` true where the document was trained.
        generator: shuffles documents before they are dealt to folds.
        clusters: ``[num_documents]`` near-duplicate clusters: copies stay in one fold, else each
            would be recognised by the other. None: every document is its own.

    Returns:
        Higher means more likely a member. Of copies, DeLong's interval of the AUC is too narrow: it
        takes each for evidence of its own. None where fewer than five clusters (without clusters:
        documents) hold either kind, or where all of a kind fell into one fold.
    """
    member_D = np.asarray(is_member, dtype=np.bool_)
    assert len(token_ids) == len(member_D), "each document needs its tokens and its kind"
    fold_D = _assign_folds(member_D, clusters, generator)
    if fold_D is None:
        return None
    counts_DV = _count_tokens(token_ids)
    scores_D = np.zeros(len(member_D))
    for fold in range(NUM_FOLDS):
        held_D = fold_D == fold
        log_ratio_V = _log_shares(counts_DV, member_D & ~held_D) - _log_shares(
            counts_DV, ~member_D & ~held_D
        )
        scores_D[held_D] = (counts_DV @ log_ratio_V)[held_D]
    return scores_D


def _assign_folds(
    member_D: NDArray[np.bool_], clusters: ArrayLike | None, generator: np.random.Generator
) -> NDArray[np.int64] | None:
    """Deal clusters to folds, the largest first, each to where its kind is rarest so far."""
    names = np.arange(len(member_D)) if clusters is None else np.asarray(clusters)
    assert names.shape == member_D.shape, "each document needs one cluster"
    cluster_D = np.unique(names, return_inverse=True)[1]
    num_clusters = int(cluster_D.max(initial=-1)) + 1
    sizes = [np.bincount(cluster_D[k], minlength=num_clusters) for k in (member_D, ~member_D)]
    counts_CK = np.stack(sizes, axis=1)
    if (counts_CK > 0).sum(axis=0).min() < NUM_FOLDS:
        return None
    shares_CK = counts_CK / counts_CK.sum(axis=0)
    shuffled = generator.permutation(num_clusters)
    order = shuffled[np.argsort(-counts_CK.sum(axis=1)[shuffled], kind="stable")]
    held_FK = np.zeros((NUM_FOLDS, 2))
    fold_C = np.zeros(num_clusters, dtype=np.int64)
    for cluster in order:
        fold_C[cluster] = np.argmin(held_FK @ shares_CK[cluster])
        held_FK[fold_C[cluster]] += shares_CK[cluster]
    # Clusters of both kinds can crowd: a fold whose training documents lack a kind learns nothing.
    return fold_C[cluster_D] if (held_FK > 0).sum(axis=0).min() >= 2 else None


def _count_tokens(token_ids: Sequence[ArrayLike]) -> csr_array:
    """Return ``[D, V]`` counts, columns being the token ids that occur. Equal ids stay unsummed."""
    documents = [np.asarray(ids, dtype=np.int32) for ids in token_ids]
    tokens_N = np.concatenate(documents)
    assert not tokens_N.size or tokens_N.min() >= 0, "a token id is not negative"
    occurring_V = np.flatnonzero(np.bincount(tokens_N))
    column = np.zeros(int(tokens_N.max(initial=-1)) + 1, dtype=np.int32)
    column[occurring_V] = np.arange(len(occurring_V))
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids in documents])])
    return csr_array(
        (np.ones(len(tokens_N)), column[tokens_N], starts), shape=(len(documents), len(occurring_V))
    )


def _log_shares(counts_DV: csr_array, chosen_D: NDArray[np.bool_]) -> NDArray[np.float64]:
    counts_V = counts_DV.T @ chosen_D.astype(np.float64) + 1
    return np.asarray(np.log(counts_V / counts_V.sum()))


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
