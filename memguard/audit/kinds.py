"""Are members and nonmembers one kind of text? Told before any model is loaded.

A control says what a model does on texts of the same kind that it never saw. Where members are code
and nonmembers news, or members long and nonmembers short, rates and membership scores differ
between them whatever the model was trained on.
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
"""Medians that differ by less are not told, however surely."""
_TESTED_DOCUMENTS = 500
"""Of each kind, so that the test takes a second however many there are."""
_NUM_PERMUTATIONS = 39
"""Documents of one kind are taken for two with a probability of 1 in 40."""
_FORMS = {
    "text": "plain text",
    "prompt_completion": "prompts with completions",
    "messages": "conversations",
}


def compare_kinds(documents: Sequence[AuditDocument], *, seed: int) -> str:
    """Say how members and control documents differ as texts; "" where no difference shows.

    Words are compared by the blind baseline of the membership scores, with the same folds, so that
    report and warning have one AUC. Whether it is more than chance a permutation test decides, at
    the level 1/40: folds share their training documents, so that DeLong's interval of this AUC is
    a third too narrow (it lay above 1/2 in 7 to 9 of 100 draws of one kind, not in 2.5). Lengths
    are compared by the AUC of the number of tokens, where the medians are `_LENGTHS_APART` times
    apart.

    Args:
        documents: those that the audit will score.
        seed: the audit's.
    """
    member_N = np.array([is_member(document) for document in documents], dtype=bool)
    control_N = np.array([document.role == "control" for document in documents], dtype=bool)
    if min(member_N.sum(), control_N.sum()) < 2:
        return ""
    members = [document for document, chosen in zip(documents, member_N, strict=True) if chosen]
    control = [document for document, chosen in zip(documents, control_N, strict=True) if chosen]
    found = []
    if _differ_in_words(members, control, seed):
        blind_N = score_blind_documents(documents, member_N, control_N, seed)
        assert blind_N is not None, "a part of them could be scored"
        known_N = np.isfinite(blind_N)
        auc = compute_auc(blind_N[member_N & known_N], blind_N[control_N & known_N])
        found.append(
            "a bag of words that never asks the model tells them apart (AUC "
            f"{auc.value:.2f}; 0.5 is chance)"
        )
    found += _compare_forms(members, control)
    found += _compare_lengths(members, control)
    if not found:
        return ""
    return (
        f"Members and nonmembers are not the same kind of text: {'; '.join(found)}. Membership "
        "scores and differences to the control can then come from the kind of text instead of from "
        "training. Give nonmembers of the same source, form and length that were never trained."
    )


def _differ_in_words(
    members: Sequence[AuditDocument], control: Sequence[AuditDocument], seed: int
) -> bool:
    """Tell whether the blind AUC is above that of every random assignment to the two kinds."""
    draw = derive_generator(seed, "kinds")
    chosen = [
        [side[index] for index in draw.permutation(len(side))[:_TESTED_DOCUMENTS]]
        for side in (members, control)
    ]
    token_ids = [document.input_ids for side in chosen for document in side]
    member_N = np.arange(len(token_ids)) < len(chosen[0])
    found = _compute_blind_auc(token_ids, member_N, draw)
    return found is not None and all(
        (_compute_blind_auc(token_ids, draw.permutation(member_N), draw) or 0.0) < found
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
    one, other = (" and ".join(_FORMS[each] for each in sorted(side)) for side in (ours, theirs))
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
