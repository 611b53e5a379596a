"""Members above nonmembers: AUC, and TPR at a fixed FPR."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special

from memguard.audit.statistics.rates import clopper_pearson
from memguard.records import Interval, Rate

_Z = float(special.ndtri(0.975))


def compute_auc(members: ArrayLike, nonmembers: ArrayLike) -> Interval:
    """Return P(member > nonmember) + P(equal)/2 by ranks, with its interval.

    DeLong's variance (1988), applied on the logit scale, which keeps the interval inside (0, 1).
    Where that variance is 0 or the AUC is 0 or 1, the interval is all
    values that Hanley & McNeil's variance (1982) at that value does not reject (the score interval
    of Newcombe 2006), so that perfect separation of few documents is no certainty.

    Args:
        members: scores of trained documents, at least two.
        nonmembers: scores of control documents, at least two.
    """
    wins_M = _placements(members, nonmembers)
    wins_N = 1 - _placements(nonmembers, members)
    num_members, num_nonmembers = len(wins_M), len(wins_N)
    assert min(num_members, num_nonmembers) >= 2, "an AUC needs two documents of either kind"
    auc = float(wins_M.mean())
    variance = float(wins_M.var(ddof=1) / num_members + wins_N.var(ddof=1) / num_nonmembers)
    if variance <= 0 or not 0 < auc < 1:
        return Interval(value=auc, ci=_hanley_mcneil(auc, num_members, num_nonmembers))
    centre, reach = special.logit(auc), _Z * math.sqrt(variance) / (auc * (1 - auc))
    low, high = special.expit(centre - reach), special.expit(centre + reach)
    return Interval(value=auc, ci=(float(low), float(high)))


def compute_tpr_at_fpr(members: ArrayLike, nonmembers: ArrayLike, fpr: float) -> Rate | None:
    """Return the share of members above a threshold that at most ``fpr`` of nonmembers exceed.

    The threshold is the lowest nonmember score with that property; only what is strictly above it
    counts, so ties never help. None where there are fewer than 1/fpr nonmembers: no threshold of
    theirs could show such an FPR.

    The interval is the exact one of the members at this threshold. That the threshold itself comes
    from a sample of nonmembers is not in it.

    Args:
        members: scores of trained documents.
        nonmembers: scores of control documents.
        fpr: between 0 and 1, both excluded.
    """
    assert 0 < fpr < 1, f"a threshold needs an FPR between 0 and 1, got {fpr}"
    ranked_N = np.sort(_as_scores(nonmembers))
    # 0.29 of 100 is 28.999999999999996 in floating point; a hair is given.
    num_allowed = math.floor(fpr * len(ranked_N) * (1 + 1e-12))
    if num_allowed < 1:
        return None
    threshold = ranked_N[-1 - num_allowed]
    scores_M = _as_scores(members)
    return clopper_pearson(int((scores_M > threshold).sum()), len(scores_M))


def _as_scores(scores: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(scores, dtype=np.float64)
    assert not np.isnan(values).any(), "a missing score has no rank"
    return values


def _placements(ones: ArrayLike, others: ArrayLike) -> NDArray[np.float64]:
    """Return for each of ``ones`` the share of ``others`` below it, ties counting half."""
    ranked = np.sort(_as_scores(others))
    values = _as_scores(ones)
    below = np.searchsorted(ranked, values, side="left")
    not_above = np.searchsorted(ranked, values, side="right")
    return np.asarray((below + not_above) / (2 * len(ranked)))


def _hanley_mcneil(auc: float, num_members: int, num_nonmembers: int) -> tuple[float, float]:
    mean_count = (num_members + num_nonmembers) / 2

    def excess(value: float) -> float:
        shape = (1 - value) / (2 - value) + value / (1 + value)
        scale = value * (1 - value) / (num_members * num_nonmembers)
        return (auc - value) ** 2 - _Z**2 * scale * (1 + (mean_count - 1) * shape)

    # Both edges have variance 0, so `excess` is positive there unless the AUC itself lies there.
    low = 0.0 if auc <= 0 else float(optimize.brentq(excess, 0.0, auc - 1e-12))
    high = 1.0 if auc >= 1 else float(optimize.brentq(excess, auc + 1e-12, 1.0))
    return low, high
