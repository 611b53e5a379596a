"""Two settings on the same documents."""

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from memguard.audit.statistics.bootstrap import (
    NUM_RESAMPLES,
    Sample,
    compute_bootstrap_mean,
)
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
    first: ArrayLike,
    second: ArrayLike,
    *,
    generator: np.random.Generator,
    strata: ArrayLike | None = None,
    clusters: ArrayLike | None = None,
    num_resamples: int = NUM_RESAMPLES,
) -> Interval | None:
    """Return the mean of first minus second over documents, with a bootstrap interval.

    Documents are resampled with both their values, so what makes a document easy for either
    setting cancels. See `compute_bootstrap_mean` for what has no interval.

    Args:
        first: ``[num_documents]`` one value a document under one setting.
        second: ``[num_documents]`` the same documents, in the same order, under the other.
        generator: where the resamples come from.
        strata: ``[num_documents]`` see `Sample`.
        clusters: ``[num_documents]`` see `Sample`.
        num_resamples: how often the documents are drawn again.
    """
    values_D, others_D = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    assert values_D.shape == others_D.shape, "pairs need two values a document"
    sample = Sample(values=values_D - others_D, strata=strata, clusters=clusters)
    return compute_bootstrap_mean(sample, generator=generator, num_resamples=num_resamples)
