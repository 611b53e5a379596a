"""Are members and nonmembers one kind of text? Told before any model is loaded.

A control says what a model does on texts of the same kind that it never saw. Where members are code
and nonmembers news, or members long and nonmembers short, rates and membership scores differ
between them whatever the model was trained on.
"""

import statistics
from collections.abc import Sequence

import numpy as np

from memguard.audit.extraction import AuditDocument
from memguard.audit.membership import is_member, score_blind_documents
from memguard.audit.statistics import compute_auc
from memguard.records import Interval

_LENGTHS_APART = 2.0
"""Medians that differ by less are not told, however surely."""
_FORMS = {
    "text": "plain text",
    "prompt_completion": "prompts with completions",
    "messages": "conversations",
}


def compare_kinds(documents: Sequence[AuditDocument], *, seed: int) -> str:
    """Say how members and control documents differ as texts; "" where no difference shows.

    Words are compared by the blind baseline that stands beside the membership scores, with the
    same folds, so that both have one AUC; lengths by the AUC of the number of tokens, where the
    medians are `_LENGTHS_APART` times apart.

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
    blind_N = score_blind_documents(documents, member_N, control_N, seed)
    found = []
    if blind_N is not None:
        known_N = np.isfinite(blind_N)
        auc = compute_auc(blind_N[member_N & known_N], blind_N[control_N & known_N])
        if _is_apart(auc) and auc.value > 0.5:
            found.append(
                "a bag of words that never asks the model tells them apart (AUC "
                f"{auc.value:.2f}{_bracket(auc)}; 0.5 is chance)"
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


def _bracket(auc: Interval) -> str:
    return "" if auc.ci is None else f", 95 % CI {auc.ci[0]:.2f}–{auc.ci[1]:.2f}"
