"""Whether trained and control documents differ as texts: a baseline without access to the model.

The AUC of each membership score is compared with that of a multinomial naive Bayes classifier with
add-one smoothing on token ids, cross-fitted in five folds. If members and nonmembers differ in
words, date or source, any score can separate them without any effect of training (the flaw of
benchmarks that split by time, Duan et al. 2024). A baseline near one half means that the two kinds
are indistinguishable as texts, as random samples of one source are. A baseline well above it means
that this much separation is possible without the model. The choice of the classifier is memguard's.
"""

import hashlib
import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array

from memguard.audit.statistics import compute_auc
from memguard.audit.windows import AuditDocument, is_member
from memguard.seeds import derive_generator

NUM_FOLDS = 5
"""Also the minimum number of documents of either kind, so that each fold can hold one."""


def score_blind(
    token_ids: Sequence[ArrayLike],
    is_member: ArrayLike,
    *,
    generator: np.random.Generator,
    clusters: ArrayLike | None = None,
) -> NDArray[np.float64] | None:
    """Return ``[num_documents]`` log-odds of membership, each from folds without that document.

        score = sum over tokens t of log (n_t + 1) / (N + V) of members - the same of nonmembers

    where n_t of N training tokens equal t, and V is the number of distinct tokens in all documents.
    The prior is left out because it differs between folds by chance. A document without tokens
    scores 0.

    Args:
        token_ids: token ids of each document, in any order of documents.
        is_member: ``[num_documents]`` true where the document was trained.
        generator: shuffles documents before they are assigned to folds.
        clusters: ``[num_documents]`` near-duplicate clusters; copies are in the same fold, because
            otherwise each would reveal the other. None: every document is its own cluster.

    Returns:
        Scores, higher for likely members. With copies, DeLong's interval of the AUC is too narrow,
        because it treats each copy as independent. None if fewer than five clusters (without
        clusters: documents) contain either kind, or if all of a kind are in one fold.
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
    """Assign clusters to folds, the largest first, each to the fold where its kind is rarest."""
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
    # With clusters of both kinds, all of a kind can be in one fold, which then cannot be fitted.
    return fold_C[cluster_D] if (held_FK > 0).sum(axis=0).min() >= 2 else None


def _count_tokens(token_ids: Sequence[ArrayLike]) -> csr_array:
    """Return ``[D, V]`` counts with a column per occurring token id; duplicates are not summed."""
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


# Documents of each kind: enough for an error of 0.01 of the AUC, and a limit to memory.
_BLIND_DOCUMENTS = 10_000


def score_blind_documents(
    documents: Sequence[AuditDocument],
    member_N: NDArray[np.bool_],
    control_N: NDArray[np.bool_],
) -> NDArray[np.float64] | None:
    """Return the blind baseline's scores ``[N]``, NaN where a document was not scored.

    Returns:
        None if there are too few of either kind, see `score_blind`.
    """
    sample, draw = _draw_sample(documents, (member_N, control_N), _BLIND_DOCUMENTS)
    scores = score_blind(
        [documents[index].input_ids for index in sample],
        member_N[sample],
        generator=draw,
        clusters=number_clusters([documents[index] for index in sample]),
    )
    if scores is None:
        return None
    score_N = np.full(len(documents), np.nan)
    score_N[sample] = scores
    return score_N


def _draw_sample(
    documents: Sequence[AuditDocument], kinds: Sequence[NDArray[np.bool_]], most: int
) -> tuple[list[int], np.random.Generator]:
    """Return indices of at most ``most`` documents of each kind, and a generator for what follows.

    Both depend on the tokens of these documents alone: with another seed, in another order or under
    other ids, an audit says the same of them.
    """
    hashes = {
        index: hashlib.sha256(documents[index].input_ids.tobytes()).digest()
        for kind_N in kinds
        for index in np.flatnonzero(kind_N).tolist()
    }
    order = sorted(hashes, key=lambda index: hashes[index])
    of_all = hashlib.sha256(b"".join(hashes[index] for index in order)).digest()
    draw = derive_generator(int.from_bytes(of_all), "blind baseline")
    place = {index: number for number, index in enumerate(order)}
    of_kind = ([index for index in order if kind_N[index]] for kind_N in kinds)
    drawn = [draw.permutation(np.array(chosen, dtype=np.int64))[:most] for chosen in of_kind]
    return sorted(np.concatenate(drawn).tolist(), key=place.__getitem__), draw


# Members and nonmembers as kinds of text, compared before any model is loaded. A control measures
# what a model does on texts of the same kind that it never saw. If members are code and nonmembers
# are news, or members are long and nonmembers are short, rates and membership scores differ between
# them whatever the model was trained on.

_LENGTHS_APART = 2.0
"""Medians of the length that differ by a smaller factor are not reported."""
_TESTED_DOCUMENTS = 500
"""Number of documents of each kind, which limits the test to about a second."""
_NUM_PERMUTATIONS = 39
"""The false-positive rate of the test is 1 / (permutations + 1) = 1/40."""
_FORMS = {
    "text": "plain text",
    "prompt_completion": "prompts with completions",
    "messages": "conversations",
}


def compare_kinds(documents: Sequence[AuditDocument]) -> str:
    """Describe how members and control documents differ as texts; "" if no difference is found.

    Words are compared by the blind baseline of the membership scores, with the same folds, so that
    report and warning give the same AUC of the same documents. A permutation test at the level 1/40
    decides whether the AUC exceeds chance: folds share their training documents, so DeLong's
    interval of this AUC is a third too narrow (with documents of one kind it was above 1/2 in 7 to
    9 of 100 samples instead of 2.5). Near-duplicates count once; words are not compared where they
    leave too few documents (see `score_blind`). Lengths are compared by the AUC of the number of
    tokens if the medians differ by a factor of `_LENGTHS_APART`.
    """
    member_N = np.array([is_member(document) for document in documents], dtype=bool)
    control_N = np.array([document.role == "control" for document in documents], dtype=bool)
    if min(member_N.sum(), control_N.sum()) < 2:
        return ""
    members = [document for document, chosen in zip(documents, member_N, strict=True) if chosen]
    control = [document for document, chosen in zip(documents, control_N, strict=True) if chosen]
    differences = _compare_words(documents, member_N, control_N)
    differences += _compare_forms(members, control)
    differences += _compare_lengths(members, control)
    if not differences:
        return ""
    return (
        f"Trained and control documents are not the same kind of text: {'; '.join(differences)}. "
        "Membership scores and differences from the control may then be caused by the kind of text "
        "instead of training. Give control documents of the same source, form and length that were "
        "never trained."
    )


def _compare_words(
    documents: Sequence[AuditDocument],
    is_member_N: NDArray[np.bool_],
    is_control_N: NDArray[np.bool_],
) -> list[str]:
    """Return the blind AUC if it is above that of all random assignments, clusters together."""
    sample, draw = _draw_sample(documents, (is_member_N, is_control_N), _TESTED_DOCUMENTS)
    chosen = [documents[index] for index in sample]
    token_ids = [document.input_ids for document in chosen]
    cluster_N, member_N = number_clusters(chosen), is_member_N[sample]
    # Clusters of both kinds are rare: near-duplicates of members are left out of a given control.
    member_C = np.zeros(int(cluster_N.max()) + 1, dtype=bool)
    member_C[cluster_N[member_N]] = True
    auc = _compute_blind_auc(token_ids, member_N, cluster_N, draw)
    if auc is None:
        return []
    for _ in range(_NUM_PERMUTATIONS):
        assigned_N = draw.permutation(member_C)[cluster_N]
        if (_compute_blind_auc(token_ids, assigned_N, cluster_N, draw) or 0.0) >= auc:
            return []
    return [
        f"a bag-of-words classifier without access to the model separates them (AUC {auc:.2f}; 0.5 "
        "is chance)"
    ]


def number_clusters(documents: Sequence[AuditDocument]) -> NDArray[np.int64]:
    """Return ``[N]`` near-duplicate clusters, numbered in the order of their first documents.

    If the cluster of a document is not known, every document is its own.
    """
    if any(document.cluster is None for document in documents):
        return np.arange(len(documents))
    numbers: dict[int | None, int] = {}
    return np.array([numbers.setdefault(d.cluster, len(numbers)) for d in documents], dtype=int)


def _compute_blind_auc(
    token_ids: Sequence[NDArray[np.int32]],
    member_N: NDArray[np.bool_],
    cluster_N: NDArray[np.int64],
    draw: np.random.Generator,
) -> float | None:
    score_N = score_blind(token_ids, member_N, generator=draw, clusters=cluster_N)
    return None if score_N is None else compute_auc(score_N[member_N], score_N[~member_N]).value


def _compare_forms(members: Sequence[AuditDocument], control: Sequence[AuditDocument]) -> list[str]:
    ours, theirs = ({document.format for document in side} for side in (members, control))
    if ours & theirs:
        return []
    one, other = (" and ".join(_FORMS[form] for form in sorted(side)) for side in (ours, theirs))
    return [f"members are {one}, nonmembers {other}"]


def _compare_lengths(
    members: Sequence[AuditDocument], control: Sequence[AuditDocument]
) -> list[str]:
    ours, theirs = (
        [float(document.num_tokens) for document in side] for side in (members, control)
    )
    one, other = statistics.median(ours), statistics.median(theirs)
    if max(one, other) < _LENGTHS_APART * min(one, other):
        return []
    ci = compute_auc(np.array(ours), np.array(theirs)).ci
    if ci is None or ci[0] <= 0.5 <= ci[1]:
        return []
    return [f"the median member has {one:,.0f} tokens, the median nonmember {other:,.0f}"]
