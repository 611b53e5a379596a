"""The statistics of a report, written again: loops, SciPy and scikit-learn, nothing of memguard.

Every function returns (value, low, high); low and high are None without an interval. Slow and
short, so that a reader can compare each with its source.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from scipy import optimize, stats
from sklearn.metrics import roc_auc_score

Estimate = tuple[float, float | None, float | None]
Z = stats.norm.ppf(0.975)
TINY = 1e-11
"""Relative; smaller differences of values are rounding errors."""


def count_effective(clusters: Sequence[Any]) -> float:
    """Return Kish's effective number of documents."""
    sizes = list(Counter(clusters).values())
    return sum(sizes) ** 2 / sum(size**2 for size in sizes)


def make_exact(matched: float, count: float, effective: float) -> tuple[float, float] | None:
    """Return Clopper and Pearson's interval by quantiles of beta distributions."""
    if effective <= 1:
        return None
    yes, no = (part * effective / count for part in (matched, count - matched))
    low = stats.beta.ppf(0.025, yes, no + 1) if matched else 0.0
    high = stats.beta.ppf(0.975, yes + 1, no) if matched < count else 1.0
    return float(low), float(high)


def estimate_rate(values: Sequence[float], clusters: Sequence[Any]) -> Estimate:
    """Return a share of documents with its exact interval at their effective number."""
    matched, count = sum(values), len(values)
    ends = make_exact(matched, count, count_effective(clusters))
    return (matched / count, *(ends or (None, None)))


def make_wilson(share: float, effective: float) -> tuple[float, float]:
    """Return the roots p of (share - p)^2 = z^2 p (1 - p) / n."""
    z = Z**2 / effective
    roots = np.roots([1 + z, -2 * share - z, share**2])
    low, high = sorted(np.clip(roots.real, 0.0, 1.0))
    return float(low), float(high)


def subtract(one: Estimate, other: Estimate, limit: float = math.inf) -> Estimate:
    """Return the difference of two independent estimates (Newcombe 1998, Zou & Donner 2008)."""
    (a, a_low, a_high), (b, b_low, b_high) = one, other
    if a_low is None or a_high is None or b_low is None or b_high is None:
        return a - b, None, None
    low = a - b - math.sqrt((a - a_low) ** 2 + (b_high - b) ** 2)
    high = a - b + math.sqrt((a_high - a) ** 2 + (b - b_low) ** 2)
    return a - b, max(low, -limit), min(high, limit)


def subtract_rates(
    values: Sequence[float], clusters: Sequence[Any], others: Sequence[float], of: Sequence[Any]
) -> Estimate | None:
    """Return Newcombe's difference of two rates of different documents."""
    if not len(values) or not len(others):
        return None
    ends = []
    for matched, names in ((values, clusters), (others, of)):
        share, effective = float(np.mean(matched)), count_effective(names)
        ends.append((share, *(make_wilson(share, effective) if effective > 1 else (None, None))))
    return subtract(ends[0], ends[1], 1.0)


def estimate_paired_rates(
    values: Sequence[float], others: Sequence[float], clusters: Sequence[Any]
) -> Estimate:
    """Return Tango's interval: where the score statistic of a difference is within z."""
    count, effective = len(values), count_effective(clusters)
    gained = sum(a > b for a, b in zip(values, others, strict=True))
    lost = sum(b > a for a, b in zip(values, others, strict=True))
    value = (gained - lost) / count
    if effective <= 1:
        return value, None, None
    b, c, n = gained * effective / count, lost * effective / count, effective

    def excess(d: float) -> float:
        # The likelihood's root q of 2 n q^2 + ((2 n - b + c) d - b - c) q - c d (1 - d).
        roots = np.roots([2 * n, (2 * n - b + c) * d - b - c, -c * d * (1 - d)])
        q = max(roots.real)
        return float((b - c - n * d) ** 2 - Z**2 * n * (2 * q + d * (1 - d)))

    def find_end(outside: float) -> float:
        # The statistic is 0 at the estimate, where the excess can be 0 too: begin beside it.
        inside = value + math.copysign(1e-9, outside - value)
        if value == outside or excess(outside) <= 0:
            return outside
        return float(optimize.brentq(excess, inside, outside, xtol=1e-14))

    ends = [(find_end(-1.0), find_end(1.0))]
    only_gained = make_exact(gained, count, effective)
    only_lost = make_exact(lost, count, effective)
    assert only_gained is not None
    assert only_lost is not None
    if not lost:
        ends.append(only_gained)
    if not gained:
        ends.append((-only_lost[1], -only_lost[0]))
    if gained and lost and gained + lost == count:
        ends.append((2 * only_gained[0] - 1, 2 * only_gained[1] - 1))
    return value, min(low for low, _ in ends), max(high for _, high in ends)


def leave_out(values: Sequence[float], clusters: Sequence[Any]) -> tuple[list[float], float] | None:
    """Return the means without each cluster, and Satterthwaite's degrees of freedom."""
    sizes = Counter(clusters)
    freedom = sum(s**2 for s in sizes.values()) ** 2 / sum(s**4 for s in sizes.values()) - 1
    if len(sizes) < 2 or freedom < 1:
        return None
    mean, scale = float(np.mean(values)), max(map(abs, values))
    pairs = list(zip(values, clusters, strict=True))
    means = [float(np.mean([v for v, name in pairs if name != out])) for out in sizes]
    return [mean if abs(m - mean) <= TINY * scale else m for m in means], freedom


def estimate_mean(
    values: Sequence[float], clusters: Sequence[Any], bounds: tuple[float, float]
) -> Estimate:
    """Return a mean with its jackknife interval over clusters; ``bounds`` may be infinite."""
    mean, left = float(np.mean(values)), leave_out(values, clusters)
    if left is None:
        return mean, None, None
    means, freedom = left
    count, (low, high) = len(means), bounds
    t = stats.t.ppf(0.975, freedom)

    def reach(deviations: list[float]) -> float:
        return float(t * math.sqrt((count - 1) / count * sum(d**2 for d in deviations)))

    is_equal = all(m == mean for m in means)
    if not math.isfinite(high - low):
        if is_equal:
            return mean, None, None
        half = reach([m - mean for m in means])
        return mean, max(mean - half, low), min(mean + half, high)
    if is_equal:
        way = 1 - 0.025 ** (1 / count_effective(clusters))
        return mean, mean - (mean - low) * way, mean + (high - mean) * way
    share = (mean - low) / (high - low)
    shares = [(m - low) / (high - low) for m in means]

    def logit(p: float) -> float:
        return math.log(p / (1 - p))

    at_low, at_high = (any(abs(p - edge) <= TINY for p in shares) for edge in (0.0, 1.0))
    deviations = [
        logit(p) - logit(share)
        if TINY < p < 1 - TINY
        # The cluster that alone differs from the bound: the tangent of the logit.
        else (p - share) / (share * (1 - share))
        for p in shares
    ]
    half = reach(deviations)

    def back(x: float) -> float:
        return low + (high - low) / (1 + math.exp(-x))

    return (
        mean,
        low if at_low else back(logit(share) - half),
        high if at_high else back(logit(share) + half),
    )


def subtract_means(
    values: Sequence[float],
    clusters: Sequence[Any],
    others: Sequence[float],
    of: Sequence[Any],
    bounds: tuple[float, float],
) -> Estimate | None:
    """Return the difference of the means of different documents: by bounds, or Welch's."""
    if not len(values) or not len(others):
        return None
    span = bounds[1] - bounds[0]
    if math.isfinite(span):
        one, other = estimate_mean(values, clusters, bounds), estimate_mean(others, of, bounds)
        return subtract(one, other, span)
    difference = float(np.mean(values) - np.mean(others))
    lefts = [leave_out(values, clusters), leave_out(others, of)]
    if None in lefts:
        return difference, None, None
    variances = []
    for (means, _), mean in zip(lefts, map(np.mean, (values, others)), strict=True):  # type: ignore[misc]
        variances.append((len(means) - 1) / len(means) * sum((m - mean) ** 2 for m in means))
    total = sum(variances)
    parts = zip(variances, lefts, strict=True)
    freedom = total**2 / sum(v**2 / left[1] for v, left in parts)  # type: ignore[index]
    half = float(stats.t.ppf(0.975, freedom) * math.sqrt(total))
    return difference, difference - half, difference + half


def estimate_auc(members: Sequence[float], control: Sequence[float]) -> Estimate:
    """Return scikit-learn's AUC with DeLong's interval on the logit scale, from all pairs."""
    count, others = len(members), len(control)
    truth = [1] * count + [0] * others
    auc = float(roc_auc_score(truth, [*members, *control]))
    wins = np.array([[(a > b) + (a == b) / 2 for b in control] for a in members], dtype=float)
    variance = np.var(wins.mean(1), ddof=1) / count + np.var(wins.mean(0), ddof=1) / others
    if variance > 0 and 0 < auc < 1:
        half = Z * math.sqrt(variance) / (auc * (1 - auc))
        centre = math.log(auc / (1 - auc))
        return auc, *(1 / (1 + math.exp(-(centre + sign * half))) for sign in (-1, 1))

    def excess(a: float) -> float:
        """Hanley and McNeil's variance at ``a``, with the mean of both counts (Newcombe 2006)."""
        mean = (count + others) / 2 - 1
        spread = 1 + mean * (1 - a) / (2 - a) + mean * a / (1 + a)
        return (auc - a) ** 2 - Z**2 * a * (1 - a) * spread / (count * others)

    ends = [0.0 if auc == 0 else _solve(excess, 0.0, auc - 1e-12)]
    ends.append(1.0 if auc == 1 else _solve(excess, auc + 1e-12, 1.0))
    return auc, *ends


def _solve(function: Callable[[float], float], low: float, high: float) -> float:
    return float(optimize.brentq(function, low, high, xtol=1e-15))


def estimate_tpr(members: Sequence[float], control: Sequence[float], fpr: str) -> Estimate | None:
    """Return the share of members above the control at an FPR, with the threshold's error."""
    count, others = len(members), len(control)
    allowed = math.floor(Fraction(fpr) * others)
    if allowed < 1:
        return None
    falling = sorted(control, reverse=True)

    def count_above(rank: int) -> int:
        if rank < 0:
            return 0
        return count if rank >= others else sum(score > falling[rank] for score in members)

    matched = count_above(allowed)
    exact = make_exact(matched, count, count)
    if exact is None:
        return matched / count, None, None
    exceeding = stats.binom(others, float(fpr))
    # Of the control, the number above the population's threshold is binomial.
    highest = max(k for k in range(-1, others) if k < 0 or exceeding.cdf(k) <= 0.025)
    lowest = min(k for k in range(others + 1) if exceeding.sf(k) <= 0.025)
    share, at_highest, at_lowest = (
        number / count for number in (matched, count_above(highest), count_above(lowest))
    )
    low = share - math.sqrt((share - exact[0]) ** 2 + (share - at_highest) ** 2)
    high = share + math.sqrt((exact[1] - share) ** 2 + (at_lowest - share) ** 2)
    return share, max(low, 0.0), min(high, 1.0)
