"""Do trained documents score above the control?

    loss               mean log-probability of a continuation token
    loss_minus_base    the same, minus that of the model before training

Higher means more likely trained, always (Yeom et al. 2018; Carlini et al. 2021 for the second).
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from memguard.audit.statistics import compute_auc
from memguard.config.schema import Settings
from memguard.records import DocumentScore, MembershipScores


class MembershipProbe(Settings):
    """Tell trained from control documents by the extraction probe's log-probabilities."""

    name: Literal["membership"] = Field("membership", description="Which probe.")


def is_trained(score: DocumentScore) -> bool:
    """Tell whether training fed the document: null means that nobody counted, 0 that it did not."""
    return score.role == "trained" and score.num_repetitions != 0


def compute_membership(scores: Sequence[DocumentScore]) -> list[MembershipScores]:
    """Return one row for each score; none below two members or two nonmembers.

    Args:
        scores: of all documents; members are the trained, nonmembers the control.
    """
    members = [score for score in scores if is_trained(score)]
    nonmembers = [score for score in scores if score.role == "control"]
    if min(len(members), len(nonmembers)) < 2:
        return []
    rows = [_compare("loss", [_loss(s) for s in members], [_loss(s) for s in nonmembers])]
    changes = [[_change(score) for score in group] for group in (members, nonmembers)]
    known = [[value for value in group if value is not None] for group in changes]
    if known[0] and known[1] and len(known[0]) == len(members) and len(known[1]) == len(nonmembers):
        rows.append(_compare("loss_minus_base", *known))
    return rows


def _loss(score: DocumentScore) -> float:
    return score.logprob / score.continuation_tokens


def _change(score: DocumentScore) -> float | None:
    if score.base_logprob is None:
        return None
    return (score.logprob - score.base_logprob) / score.continuation_tokens


def _compare(name: str, members: list[float], nonmembers: list[float]) -> MembershipScores:
    return MembershipScores(
        score=name,
        num_members=len(members),
        num_nonmembers=len(nonmembers),
        auc=compute_auc(members, nonmembers),
    )
