"""Rates, differences, means and AUCs with their 95 % intervals.

No interval claims what a handful of documents cannot show: below two there is none, and an
estimate at the edge of its range (0 of n, AUC 1, all values equal) never gets one of zero width.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special

from memguard.records import Interval, Rate

_TAIL = 0.025
_Z = float(special.ndtri(1 - _TAIL))


def clopper_pearson(num_matched: int, num_documents: int) -> Rate:
    """Return a share with the exact binomial interval (Clopper & Pearson 1934).

    The rate is null without documents, the interval null below two.
    """
    assert 0 <= num_matched <= num_documents, f"{num_matched} of {num_documents} is no share"
    misses = num_documents - num_matched
    ci = None
    if num_documents >= 2:
        low = special.betaincinv(num_matched, misses + 1, _TAIL) if num_matched else 0.0
        high = special.betaincinv(num_matched + 1, misses, 1 - _TAIL) if misses else 1.0
        ci = (float(low), float(high))
    return Rate(
        num_documents=num_documents,
        num_matched=num_matched,
        rate=num_matched / num_documents if num_documents else None,
        ci=ci,
    )


def compute_difference(first: Rate, second: Rate) -> Interval | None:
    """Return first minus second with Newcombe's hybrid score interval (1998, method 10).

    None where one of them has no documents; no interval where one has fewer than two.
    """
    if first.rate is None or second.rate is None:
        return None
    difference = first.rate - second.rate
    if min(first.num_documents, second.num_documents) < 2:
        return Interval(value=difference, ci=None)
    low_1, high_1 = _wilson(first)
    low_2, high_2 = _wilson(second)
    low = difference - math.hypot(first.rate - low_1, high_2 - second.rate)
    high = difference + math.hypot(high_1 - first.rate, second.rate - low_2)
    return Interval(value=difference, ci=(max(low, -1.0), min(high, 1.0)))


def _wilson(rate: Rate) -> tuple[float, float]:
    count, share = rate.num_documents, rate.num_matched / rate.num_documents
    centre = share + _Z**2 / (2 * count)
    spread = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    return (centre - spread) / scale, (centre + spread) / scale


def compute_mean(
    values: Sequence[float], bounds: tuple[float, float] = (-math.inf, math.inf)
) -> Interval | None:
    """Return the mean over documents with Student's t interval, cut to the possible ``bounds``.

    None without values; no interval below two, nor where all are equal, which the t distribution
    would call certain.
    """
    count = len(values)
    if not count:
        return None
    mean = math.fsum(values) / count
    if count < 2 or min(values) == max(values):
        return Interval(value=mean, ci=None)
    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    reach = float(special.stdtrit(count - 1, 1 - _TAIL)) * error
    return Interval(value=mean, ci=(max(mean - reach, bounds[0]), min(mean + reach, bounds[1])))


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


def _placements(ones: ArrayLike, others: ArrayLike) -> NDArray[np.float64]:
    """Return for each of ``ones`` the share of ``others`` below it, ties counting half."""
    ranked = np.sort(np.asarray(others, dtype=np.float64))
    values = np.asarray(ones, dtype=np.float64)
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
