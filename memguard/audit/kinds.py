"""Check that members and nonmembers are the same kind of text, before any model is loaded.

A control measures what a model does on texts of the same kind that it never saw. If members are
code and nonmembers are news, or members are long and nonmembers are short, rates and membership
scores differ between them whatever the model was trained on.
"""

import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.audit.extraction import AuditDocument
from memguard.audit.membership import is_member, score_blind, score_blind_documents
from memguard.audit.statistics import compute_auc
from memguard.records import Interval
from memguard.seeds import derive_generator

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


def compare_kinds(documents: Sequence[AuditDocument], *, seed: int) -> str:
    """Describe how members and control documents differ as texts; "" if no difference is found.

    Words are compared by the blind baseline of the membership scores, with the same folds, so that
    report and warning give the same AUC. A permutation test at the level 1/40 decides whether the
    AUC exceeds chance: folds share their training documents, so DeLong's interval of this AUC is a
    third too narrow (with documents of one kind it was above 1/2 in 7 to 9 of 100 samples instead
    of 2.5). Lengths are compared by the AUC of the number of tokens if the medians differ by a
    factor of `_LENGTHS_APART`.

    Args:
        documents: documents that the audit will score.
        seed: seed of the audit.
    """
    member_N = np.array([is_member(document) for document in documents], dtype=bool)
    control_N = np.array([document.role == "control" for document in documents], dtype=bool)
    if min(member_N.sum(), control_N.sum()) < 2:
        return ""
    members = [document for document, chosen in zip(documents, member_N, strict=True) if chosen]
    control = [document for document, chosen in zip(documents, control_N, strict=True) if chosen]
    differences = []
    if _differ_in_words(members, control, seed):
        blind_N = score_blind_documents(documents, member_N, control_N, seed)
        assert blind_N is not None, "the sample could be scored, so all documents can"
        known_N = np.isfinite(blind_N)
        auc = compute_auc(blind_N[member_N & known_N], blind_N[control_N & known_N])
        differences.append(
            "a bag-of-words classifier without access to the model separates them (AUC "
            f"{auc.value:.2f}; 0.5 is chance)"
        )
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


def _differ_in_words(
    members: Sequence[AuditDocument], control: Sequence[AuditDocument], seed: int
) -> bool:
    """Return whether the blind AUC is above that of every random assignment to the two kinds."""
    draw = derive_generator(seed, "kinds")
    chosen = [
        [side[index] for index in draw.permutation(len(side))[:_TESTED_DOCUMENTS]]
        for side in (members, control)
    ]
    token_ids = [document.input_ids for side in chosen for document in side]
    member_N = np.arange(len(token_ids)) < len(chosen[0])
    auc = _compute_blind_auc(token_ids, member_N, draw)
    return auc is not None and all(
        (_compute_blind_auc(token_ids, draw.permutation(member_N), draw) or 0.0) < auc
        for _ in range(_NUM_PERMUTATIONS)
    )


def _compute_blind_auc(
    token_ids: Sequence[NDArray[np.int32]], member_N: NDArray[np.bool_], draw: np.random.Generator
) -> float | None:
    score_N = score_blind(token_ids, member_N, generator=draw)
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
    if not _is_apart(compute_auc(np.array(ours), np.array(theirs))):
        return []
    return [f"the median member has {one:,.0f} tokens, the median nonmember {other:,.0f}"]


def _is_apart(auc: Interval) -> bool:
    return auc.ci is not None and not auc.ci[0] <= 0.5 <= auc.ci[1]
