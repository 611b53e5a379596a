"""Two settings on the same documents."""

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from memguard.audit.statistics.means import compute_mean
from memguard.records import Interval


def compute_mcnemar(num_only_first: int, num_only_second: int) -> float:
    """Return McNemar's exact two-sided p-value.

    Under the null a document on which two settings differ is as likely to be matched by either, so
    the count is binomial with probability 1/2. Source: McNemar 1947, exact form; 1 where the
    settings nowhere differ.
    """
    differing = num_only_first + num_only_second
    tail = special.bdtr(min(num_only_first, num_only_second), differing, 0.5)
    return min(1.0, 2.0 * float(tail))


def compute_paired_difference(
    first: ArrayLike, second: ArrayLike, *, clusters: ArrayLike | None = None
) -> Interval | None:
    """Return the mean of first minus second over documents, with its jackknife interval.

    What makes a document easy for either setting cancels. See `compute_mean` for what has no
    interval.

    Args:
        first: ``[num_documents]`` one value a document under one setting.
        second: ``[num_documents]`` the same documents, in the same order, under the other.
        clusters: ``[num_documents]`` as for `compute_mean`.
    """
    values_D, others_D = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    assert values_D.shape == others_D.shape, "pairs need two values a document"
    return compute_mean(values_D - others_D, clusters=clusters)
