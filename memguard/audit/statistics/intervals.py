"""What intervals of rates and of means share: the effective number, and a difference of two."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from memguard.records import Interval

TAIL = 0.025
"""Probability outside either end of an interval."""
Z = float(special.ndtri(1 - TAIL))


def count_effective(size_C: NDArray[np.int64]) -> float:
    """Return the effective number of documents in clusters of copies.

        (sum of sizes)^2 / sum of squared sizes

    The share of so many independent documents varies as much as that of these, if the copies of a
    cluster match together (Kish 1965). It is the number of documents if no cluster has two, and
    above 1 if there are two clusters.

    Args:
        size_C: documents of each cluster; at least one cluster.
    """
    return float(int(size_C.sum()) ** 2 / int(np.square(size_C).sum()))


def find_clusters(
    num_documents: int, clusters: ArrayLike | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the cluster of each document, counted from 0, and the size of each cluster.

    Args:
        num_documents: D.
        clusters: ``[D]`` names or numbers; None: every document is its own cluster.
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

    Args:
        first: minuend.
        second: subtrahend.
        bounds: smallest and largest possible difference, which rounding must not leave.
    """
    value = first.value - second.value
    if first.ci is None or second.ci is None:
        return Interval(value=value, ci=None)
    low = value - math.hypot(first.value - first.ci[0], second.ci[1] - second.value)
    high = value + math.hypot(first.ci[1] - first.value, second.value - second.ci[0])
    return Interval(value=value, ci=(max(low, bounds[0]), min(high, bounds[1])))
