"""Shares of documents that match, and differences of shares, each with its interval.

Near-duplicates are memorised together, so n documents in clusters of copies are less evidence than
n different texts. A rate keeps its counts, and every interval is computed at the effective number
of documents, `count_effective`, with the same rate: it contains the rate, and without copies it is
the usual one. Intervals of means share this number, and the difference of two estimates.

Coverage of nominal 95 % by `scripts/check_intervals.py`, exact, for 12 to 100 documents and rates
from 0 to 1: the lowest of all cases, and the lowest of their means. Copies are in pairs, in fours,
or half of them in fours. The copies of a text all match or none does, in all clusters, in half of
them, or in none.

                                        no copies    copies       a third is one text
    rates                               .95 (.97)    .95 (.97)    .92 (.99)
    rates of the same documents         .94 (.96)    .94 (.98)    .92 (.99)
    rates minus those of a control      .88 (.96)    .86 (.96)    .88 (.96)
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from memguard.records import Interval, Rate, Texts

TAIL = 0.025
"""Probability outside either end of an interval."""
Z = float(special.ndtri(1 - TAIL))


def count_effective(size_C: NDArray[np.int64]) -> float:
    """Return the effective number of documents in clusters of copies.

        (sum of sizes)^2 / sum of squared sizes

    The share of so many independent documents varies as much as that of these, if the copies of a
    cluster match together (Kish 1965). It is the number of documents if no cluster has two, and
    above 1 if there are two clusters. There is at least one.
    """
    return float(int(size_C.sum()) ** 2 / int(np.square(size_C).sum()))


def find_clusters(
    num_documents: int, clusters: ArrayLike | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the cluster of each of D documents, counted from 0, and the size of each cluster.

    ``clusters`` are ``[D]`` names or numbers; None: every document is its own cluster.
    """
    if clusters is None:
        return np.arange(num_documents), np.ones(num_documents, dtype=np.int64)
    names_D = np.asarray(clusters)
    assert names_D.shape == (num_documents,), "each document needs one cluster"
    _, cluster_D, size_C = np.unique(names_D, return_inverse=True, return_counts=True)
    return cluster_D.astype(np.int64), size_C.astype(np.int64)


def subtract(first: Interval, second: Interval, bounds: tuple[float, float]) -> Interval:
    """Return first minus second, two independent estimates, from the interval of each.

    Newcombe's method 10 (1998) for any two estimates (Zou & Donner 2008). With intervals l to u of
    values x:

        x1 - x2 - hypot(x1 - l1, u2 - x2)   to   x1 - x2 + hypot(u1 - x1, x2 - l2)

    If neither interval leaves its range, the difference's does not either, because a hypotenuse is
    not longer than the two other sides. There is no interval if one of them has none.
    """
    value = first.value - second.value
    if first.ci is None or second.ci is None:
        return Interval(value=value, ci=None)
    low = value - math.hypot(first.value - first.ci[0], second.ci[1] - second.value)
    high = value + math.hypot(first.ci[1] - first.value, second.value - second.ci[0])
    return Interval(value=value, ci=(max(low, bounds[0]), min(high, bounds[1])))


_RANGE = (-1.0, 1.0)
_HALVINGS = 60
"""Steps of a bisection, after which the ends of an interval of length 2 are equal."""


def compute_rate(matched: ArrayLike, clusters: ArrayLike | None = None) -> Rate:
    """Return the share of documents that match, with Clopper and Pearson's interval.

    ``matched`` ``[D]`` is 1 or true where a document matches, else 0; see `find_clusters`.
    """
    matched_D = _as_matches(matched)
    cluster_D, size_C = find_clusters(len(matched_D), clusters)
    texts = None
    if len(size_C) < len(matched_D):
        texts = Texts(
            num_texts=len(size_C),
            num_matched=len(np.unique(cluster_D[matched_D])),
            num_effective=count_effective(size_C),
        )
    return clopper_pearson(int(matched_D.sum()), len(matched_D), texts)


def _as_matches(values: ArrayLike) -> NDArray[np.bool_]:
    values_D = np.asarray(values)
    assert np.isin(values_D, (0, 1)).all(), "a document matches or not: 1 or 0, none is missing"
    return values_D.astype(np.bool_)


def clopper_pearson(num_matched: int, num_documents: int, texts: Texts | None = None) -> Rate:
    """Return a share with the exact binomial interval (Clopper & Pearson 1934).

    The rate is null without documents, the interval null below two texts. ``texts`` are the
    different ones among the documents; None if no two are near-duplicates.
    """
    rate = Rate(
        num_documents=num_documents,
        num_matched=num_matched,
        rate=num_matched / num_documents if num_documents else None,
        ci=None,
        texts=texts,
    )
    ci = compute_exact_interval(num_matched, num_documents, rate.num_effective)
    return rate.model_copy(update={"ci": ci})


def compute_exact_interval(
    num_matched: int, num_documents: int, num_effective: float
) -> tuple[float, float] | None:
    """Return Clopper and Pearson's interval of a share at an effective number above 1, else None.

    The binomial tails are those of incomplete beta functions, which take any real counts.
    """
    assert 0 <= num_matched <= num_documents, f"{num_matched} of {num_documents} is not a share"
    if num_effective <= 1:
        return None
    matched = num_matched * (num_effective / num_documents)
    missed = (num_documents - num_matched) * (num_effective / num_documents)
    low = special.betaincinv(matched, missed + 1, TAIL) if num_matched else 0.0
    high = special.betaincinv(matched + 1, missed, 1 - TAIL) if missed else 1.0
    return float(low), float(high)


def compute_difference(first: Rate, second: Rate) -> Interval | None:
    """Return first minus second with Newcombe's hybrid score interval (1998, method 10).

    None if one of them has no documents; no interval if one has fewer than two texts.
    """
    if first.rate is None or second.rate is None:
        return None
    ones, others = (
        Interval(value=share, ci=_find_score_interval(share, rate.num_effective))
        for share, rate in ((first.rate, first), (second.rate, second))
    )
    return subtract(ones, others, _RANGE)


def _find_score_interval(share: float, count: float) -> tuple[float, float] | None:
    if count <= 1:
        return None
    centre = share + Z**2 / (2 * count)
    spread = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    scale = 1 + Z**2 / count
    # At a share of 0 or 1, centre and spread are equal up to rounding.
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def compute_paired_rates(
    first: ArrayLike, second: ArrayLike, *, clusters: ArrayLike | None = None
) -> Interval | None:
    """Return the rate of first minus that of second, on the same documents.

    Tango's score interval (1998): the differences d that his test does not reject, with b documents
    that match only under the first, c only under the second, and q the maximum-likelihood
    probability of the latter given d:

        (b - c - n d)^2 <= z^2 n (2 q + d (1 - d))

    If b or c is 0, the interval also covers Clopper and Pearson's of the other of n; else, if b + c
    is n, that of b of n, of which the difference is 2 b / n - 1. None without documents; no
    interval below two texts.
    """
    first_D, second_D = _as_matches(first), _as_matches(second)
    assert first_D.shape == second_D.shape, "pairs need two values per document"
    count = len(first_D)
    if not count:
        return None
    only_first, only_second = int((first_D & ~second_D).sum()), int((second_D & ~first_D).sum())
    _, size_C = find_clusters(count, clusters)
    return Interval(
        value=(only_first - only_second) / count,
        ci=compute_paired_interval(only_first, only_second, count, count_effective(size_C)),
    )


def compute_paired_interval(
    only_first: int, only_second: int, num_documents: int, num_effective: float
) -> tuple[float, float] | None:
    """Return the interval of `compute_paired_rates` from counts; None at one document."""
    if num_effective <= 1:
        return None
    joined = [_find_tango(only_first, only_second, num_documents, num_effective)]
    firsts = compute_exact_interval(only_first, num_documents, num_effective)
    seconds = compute_exact_interval(only_second, num_documents, num_effective)
    if firsts and not only_second:
        joined.append(firsts)
    if seconds and not only_first:
        joined.append((-seconds[1], -seconds[0]))
    if firsts and len(joined) == 1 and only_first + only_second == num_documents:
        joined.append((2 * firsts[0] - 1, 2 * firsts[1] - 1))
    return min(low for low, _ in joined), max(high for _, high in joined)


def _find_tango(
    only_first: int, only_second: int, num_documents: int, num_effective: float
) -> tuple[float, float]:
    n = num_effective
    b, c = only_first * (n / num_documents), only_second * (n / num_documents)
    estimate = (only_first - only_second) / num_documents

    def is_accepted(d: float) -> bool:
        # q is the larger root of 2 n q^2 + linear q - c d (1 - d), without cancellation.
        linear, product = (2 * n - b + c) * d - b - c, c * d * (1 - d)
        root = math.sqrt(max(0.0, linear**2 + 8 * n * product))
        if linear < 0:
            q = (root - linear) / (4 * n)
        else:
            q = 2 * product / (root + linear) if product else 0.0
        return (b - c - n * d) ** 2 <= Z**2 * n * (2 * q + d * (1 - d))

    return _bisect(is_accepted, estimate, -1.0), _bisect(is_accepted, estimate, 1.0)


def _bisect(is_accepted: Callable[[float], bool], inside: float, outside: float) -> float:
    """Return the end of an interval between a point in it and one at or beyond its end."""
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        if is_accepted(middle):
            inside = middle
        else:
            outside = middle
    return inside


def num_needed_to_see(rate: float, power: float = 0.95) -> int | None:
    """Return the number of documents with a match among them with probability ``power``.

    The smallest n with ``1 - (1 - rate)^n >= power``; None for a rate of 0.
    """
    assert 0 <= rate <= 1, f"{rate} is not a share"
    assert 0 < power < 1, f"power must be between 0 and 1, got {power}"
    if rate == 0:
        return None
    if rate == 1:
        return 1
    count = math.log1p(-power) / math.log1p(-rate)
    # An integer with a rounding error (rate 0.1, power 0.19: exactly 2) must not be rounded up.
    return max(1, math.ceil(count * (1 - 2**-50)))
