"""Members above nonmembers: AUC, TPR at a fixed FPR, and the curve of both."""

import math

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray
from scipy import special

from memguard.audit.statistics.rates import TAIL, Z, clopper_pearson
from memguard.records import Interval, Rate

_STEPS_PER_DECADE = 16
"""Points of a curve between one number of nonmembers and ten times as many."""


def compute_auc(members: ArrayLike, nonmembers: ArrayLike) -> Interval:
    """Return P(member > nonmember) + P(equal)/2 by ranks, with its interval.

    The interval uses DeLong's variance (1988) on the logit scale, which keeps it inside (0, 1). If
    that variance is 0 or the AUC is 0 or 1, the interval contains all values that are not rejected
    with Hanley & McNeil's variance (1982) at that value (the score interval of Newcombe 2006), so
    that perfect separation of few documents is not treated as certain.
    """
    wins_M = _placements(members, nonmembers)
    wins_N = 1 - _placements(nonmembers, members)
    num_members, num_nonmembers = len(wins_M), len(wins_N)
    assert min(num_members, num_nonmembers) >= 2, "an AUC needs two documents of either kind"
    auc = float(wins_M.mean())
    variance = float(wins_M.var(ddof=1) / num_members + wins_N.var(ddof=1) / num_nonmembers)
    if variance <= 0 or not 0 < auc < 1:
        return Interval(value=auc, ci=_hanley_mcneil(auc, num_members, num_nonmembers))
    centre, reach = special.logit(auc), Z * math.sqrt(variance) / (auc * (1 - auc))
    low, high = special.expit(centre - reach), special.expit(centre + reach)
    return Interval(value=auc, ci=(float(low), float(high)))


def compute_tpr_at_fpr(members: ArrayLike, nonmembers: ArrayLike, fpr: float) -> Rate | None:
    """Return the share of members above a threshold that at most ``fpr`` of nonmembers exceed.

    The threshold is the lowest nonmember score with that property; only scores strictly above it
    count, so ties do not increase the rate. None with fewer than 1/fpr nonmembers, because no
    threshold can show such an FPR.

    The interval refers to the threshold in the population of nonmembers. Of a sample of N, the
    number above that threshold is binomial (N, ``fpr``), so that the threshold is between two of
    the N scores in 95 % of samples (order statistics, for any distribution). The difference of the
    rate at these two is the error of the threshold. It is combined with the exact interval of the
    members at the threshold used, for each end as the root of the sum of squares (MOVER, Zou &
    Donner 2008). If that binomial is 0 with P > 2.5 % (fewer than 368 nonmembers at an FPR of 1 %),
    all sampled nonmembers may be below the threshold, and the interval starts at 0.

    Coverage of nominal 95 %: .95 to 1.00 in 54 settings (100, 200 and 1,000 of either kind; FPR
    .01, .05 and .1; normal and t(3) scores, 0, 1 and 2.5 apart; 2,000 samples each). The exact
    interval without the error of the threshold covers .34 to .90; a bootstrap of both kinds .74 to
    .98.
    """
    assert 0 < fpr < 1, f"a threshold needs an FPR between 0 and 1, got {fpr}"
    ranked_N = np.sort(_as_scores(nonmembers))
    # 0.29 * 100 is 28.999999999999996 in floating point, hence the tolerance.
    num_allowed = math.floor(fpr * len(ranked_N) * (1 + 1e-12))
    if num_allowed < 1:
        return None
    scores_M = _as_scores(members)

    def count_above(place: int) -> int:
        """Count the members above the nonmember at a rank from the top; rank 0 is the highest."""
        if place < 0:
            return 0
        if place >= len(ranked_N):
            return len(scores_M)
        return int((scores_M > ranked_N[-1 - place]).sum())

    rate = clopper_pearson(count_above(num_allowed), len(scores_M))
    if rate.rate is None or rate.ci is None:
        return rate
    highest, lowest = _place_threshold(len(ranked_N), fpr)
    at_highest, at_lowest = (count_above(place) / len(scores_M) for place in (highest, lowest))
    low = rate.rate - math.hypot(rate.rate - rate.ci[0], rate.rate - at_highest)
    high = rate.rate + math.hypot(rate.ci[1] - rate.rate, at_lowest - rate.rate)
    return rate.model_copy(update={"ci": (max(low, 0.0), min(high, 1.0))})


def trace_roc(members: ArrayLike, nonmembers: ArrayLike) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the receiver operating characteristic (ROC), with even distances on a log axis.

    Maximum numbers of nonmembers above a threshold, ascending, from 0 to all; and for each the
    members above the lowest threshold that no more nonmembers exceed. Up to ten nonmembers, every
    number has a point. The thresholds are those of `compute_tpr_at_fpr`. The counts are ranks: no
    score can be computed from them.
    """
    ranked_N, ranked_M = np.sort(_as_scores(nonmembers)), np.sort(_as_scores(members))
    count = len(ranked_N)
    assert count, "a ROC needs a nonmember"
    steps = np.arange(math.ceil(math.log10(count) * _STEPS_PER_DECADE) + 1) / _STEPS_PER_DECADE
    places = np.minimum(np.rint(10**steps), count).astype(int)
    allowed = np.unique([*range(min(count, 10) + 1), *places.tolist(), count])
    # All nonmembers are allowed only below all of them, where every member counts.
    thresholds = np.append(ranked_N[::-1][allowed[:-1]], -np.inf)
    matched = len(ranked_M) - np.searchsorted(ranked_M, thresholds, side="right")
    return tuple(allowed.tolist()), tuple(matched.tolist())


def _place_threshold(num_nonmembers: int, fpr: float) -> tuple[int, int]:
    """Return ranks from the top, -1 above all, that enclose the threshold in 95 % of samples."""
    counts_N = np.arange(num_nonmembers + 1)
    is_rarely_so_few_N = special.bdtr(counts_N, num_nonmembers, fpr) <= TAIL
    is_rarely_more_N = special.bdtrc(counts_N, num_nonmembers, fpr) <= TAIL
    return int(is_rarely_so_few_N.sum()) - 1, int(is_rarely_more_N.argmax())


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
        return (auc - value) ** 2 - Z**2 * scale * (1 + (mean_count - 1) * shape)

    # The variance is 0 at both edges, so `excess` is positive there unless the AUC is at the edge.
    low = 0.0 if auc <= 0 else float(scipy.optimize.brentq(excess, 0.0, auc - 1e-12))
    high = 1.0 if auc >= 1 else float(scipy.optimize.brentq(excess, auc + 1e-12, 1.0))
    return low, high
