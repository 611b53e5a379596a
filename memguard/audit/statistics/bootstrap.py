"""Means resampled by cluster within strata, where documents are not independent.

Near-duplicates are memorised together: a hundred copies of one licence are one piece of evidence.
So whole clusters are drawn, each stratum (bucket) keeping its number of clusters, and the interval
is cut from the resampled means at 2.5 and 97.5 % (percentile method, Efron & Tibshirani 1993).

The percentile method is somewhat short with few clusters: of nominal 95 % it covered 81 % with 4
clusters of one to five documents, 86 % with 8, 91 % with 20, 92 % with 40 and 95 % with 100; with
the clusters ignored, about 70 % (1,000 samples each, correlation within a cluster 0.8).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from memguard.records import Interval

NUM_RESAMPLES = 2000
# Indices drawn at a time: one megabyte, however many documents and resamples there are.
_CHUNK_DRAWS = 2**17
# Beyond, a resampled mean is normal to all digits that anyone reads, and is drawn as such.
_MANY_CLUSTERS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What was measured on D documents, and which of them belong together."""

    values: ArrayLike
    """[D] one number a document."""
    strata: ArrayLike | None = None
    """[D] names or numbers of groups whose sizes were fixed beforehand (buckets); None: one."""
    clusters: ArrayLike | None = None
    """[D] names or numbers of near-duplicate clusters; None: every document is its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stratum:
    """The clusters of one stratum."""

    share: float
    """Of all documents."""
    sum_C: NDArray[np.float64]
    """Of the values in each of C clusters."""
    size_C: NDArray[np.float64]
    """Documents in each."""


def compute_bootstrap_mean(
    sample: Sample, *, generator: np.random.Generator, num_resamples: int = NUM_RESAMPLES
) -> Interval | None:
    """Return the mean over documents with a stratified cluster bootstrap interval.

    None without documents. No interval where a stratum has fewer than two clusters (nothing shows
    how they vary) or where no resample differs from another. Strata that share a cluster are
    resampled as one.

    Args:
        sample: values, strata and clusters.
        generator: where the resamples come from; equal generators give equal intervals.
        num_resamples: how often the clusters are drawn again.
    """
    strata = _gather(sample)
    if not strata:
        return None
    means = _resample(strata, generator, num_resamples)
    return Interval(value=_mean(strata), ci=_cut(means))


def compute_bootstrap_difference(
    first: Sample,
    second: Sample,
    *,
    generator: np.random.Generator,
    num_resamples: int = NUM_RESAMPLES,
) -> Interval | None:
    """Return the mean of the first minus that of the second, other documents in each.

    The two are resampled independently, so no cluster should lie in both. None and no interval as
    for `compute_bootstrap_mean`, if either lacks it. See `compute_paired_difference` for the same
    documents under two settings.
    """
    strata_1, strata_2 = _gather(first), _gather(second)
    if not strata_1 or not strata_2:
        return None
    means_1 = _resample(strata_1, generator, num_resamples)
    means_2 = _resample(strata_2, generator, num_resamples)
    difference = None if means_1 is None or means_2 is None else means_1 - means_2
    return Interval(value=_mean(strata_1) - _mean(strata_2), ci=_cut(difference))


def _gather(sample: Sample) -> list[_Stratum]:
    values_D = np.asarray(sample.values, dtype=np.float64)
    assert not np.isnan(values_D).any(), "a missing value has no mean"
    count = len(values_D)
    cluster_D = _number(sample.clusters, count)
    stratum_D = np.zeros(count, dtype=np.int64)
    if sample.strata is not None:
        stratum_D = _join_strata(_number(sample.strata, count), cluster_D)
    num_clusters = int(cluster_D.max(initial=-1)) + 1
    sum_C = np.bincount(cluster_D, weights=values_D, minlength=num_clusters)
    size_C = np.bincount(cluster_D, minlength=num_clusters).astype(np.float64)
    stratum_C = np.zeros(num_clusters, dtype=np.int64)
    stratum_C[cluster_D] = stratum_D
    chosen = [stratum_C == number for number in range(int(stratum_D.max(initial=-1)) + 1)]
    return [
        _Stratum(share=float(size_C[c].sum()) / count, sum_C=sum_C[c], size_C=size_C[c])
        for c in chosen
    ]


def _number(names: ArrayLike | None, count: int) -> NDArray[np.int64]:
    """Return 0, 1, ... for the names, sorted; each document its own number without names."""
    if names is None:
        return np.arange(count)
    numbers = np.unique(np.asarray(names), return_inverse=True)[1].astype(np.int64)
    assert numbers.shape == (count,), "each document needs one stratum and one cluster"
    return numbers


def _join_strata(stratum_D: NDArray[np.int64], cluster_D: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return strata numbered anew, those that share a cluster as one."""
    num_strata = int(stratum_D.max(initial=-1)) + 1
    num_nodes = num_strata + int(cluster_D.max(initial=-1)) + 1
    ends = (stratum_D, num_strata + cluster_D)
    edges = coo_array((np.ones(len(stratum_D), dtype=np.int8), ends), shape=(num_nodes, num_nodes))
    joined = connected_components(edges, directed=False)[1]
    return _number(joined[stratum_D], len(stratum_D))


def _mean(strata: list[_Stratum]) -> float:
    return sum(s.share * float(s.sum_C.sum() / s.size_C.sum()) for s in strata)


def _resample(
    strata: list[_Stratum], generator: np.random.Generator, num_resamples: int
) -> NDArray[np.float64] | None:
    """Return ``[num_resamples]`` means; None where a stratum has fewer than two clusters."""
    if min(len(stratum.sum_C) for stratum in strata) < 2:
        return None
    means_R = np.zeros(num_resamples)
    for stratum in strata:
        means_R += stratum.share * np.concatenate(
            list(_resample_stratum(stratum, generator, num_resamples))
        )
    return means_R


def _resample_stratum(
    stratum: _Stratum, generator: np.random.Generator, num_resamples: int
) -> Iterator[NDArray[np.float64]]:
    """Yield resampled means, as many at a time as memory is given to."""
    count = len(stratum.sum_C)
    if count > _MANY_CLUSTERS:
        mean, size = stratum.sum_C.sum() / stratum.size_C.sum(), stratum.size_C.sum()
        error = np.sqrt(np.square(stratum.sum_C - mean * stratum.size_C).sum()) / size
        yield mean + error * generator.standard_normal(num_resamples)
        return
    step = max(1, _CHUNK_DRAWS // count)
    for start in range(0, num_resamples, step):
        drawn_RC = generator.integers(count, size=(min(step, num_resamples - start), count))
        yield stratum.sum_C.take(drawn_RC).sum(axis=1) / stratum.size_C.take(drawn_RC).sum(axis=1)


def _cut(means_R: NDArray[np.float64] | None) -> tuple[float, float] | None:
    if means_R is None:
        return None
    low, high = map(float, np.quantile(means_R, (0.025, 0.975)))
    # Equal but for rounding: resampling cannot tell how far documents that all agree may be off.
    return None if high - low <= 1e-12 * max(abs(low), abs(high)) else (low, high)
