"""Means over documents in clusters, and differences of means, each with its interval.

Near-duplicates are memorised together: a hundred copies of one licence are one observation.
Therefore whole clusters are left out, one at a time, and the change of the mean g (D documents in C
clusters of size c) gives its error:

    variance = (C - 1) / C  sum_C (g without the cluster - g)^2         (delete-one jackknife)
    degrees of freedom = (sum c^2)^2 / sum c^4 - 1                      (Satterthwaite 1946)
    interval = g +- t(0.975, degrees of freedom) sqrt(variance)

The variance is a weighted sum of squares with weights proportional to c^2, so few large clusters
have few degrees of freedom; without clusters they are D - 1, and the interval of g = mean is
Student's. For a mean with bounds, g is the logit of its position between them: the ends,
transformed back, cannot leave the bounds, and the end towards the middle is farther away.

Coverage of nominal 95 % by `scripts/check_intervals.py`: shares of 50 tokens of n documents, beta
distributed about their mean with a + b = 2, 2,000 samples each. "Change" is from a base model with
shares of 0, so that the differences are between -1 and 1; "in clusters": half the documents in
clusters of four with one rate.

    mean                     .02   .05   .1    .3    .5    .9    .95   1
    of 25                    .91   .93   .95   .95   .95   .95   .94  1.00
    of 100                   .94   .95   .96   .96   .95   .94   .96  1.00
    of 40, in clusters       .91   .96   .97   .97   .97   .96   .95  1.00
    change, of 12            .78   .77   .84   .94   .96   .94   .90  1.00
    change, of 25            .75   .84   .90   .94   .95   .95   .94  1.00
    change, of 100           .88   .92   .93   .96   .95   .94   .96  1.00

From 25 documents and a mean of .1 on it is .88 or more, also with a + b = .5. Taken for documents
of their own, copies would be covered .70 to .80 of the time (a test checks it).
`compute_mean_difference` of bounded values covers .92 or more of the time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from memguard.audit.statistics.rates import TAIL, count_effective, find_clusters, subtract
from memguard.records import Interval

# Relative to the size of the values; smaller differences are rounding errors.
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class _Jackknife:
    """A mean, and the means without each of C clusters."""

    mean: float
    without_C: NDArray[np.float64]
    num_effective: float
    freedom: float
    """Degrees of freedom, at least 1."""

    def compute_variance(self) -> float:
        """Return the squared standard error of the mean; 0 if no cluster changes it."""
        return _compute_variance(self.without_C - self.mean)


def compute_mean(
    values: ArrayLike | Sequence[float],
    bounds: tuple[float, float] | None = None,
    clusters: ArrayLike | None = None,
) -> Interval | None:
    """Return the mean over documents with its jackknife interval over clusters.

    None without values. There is no interval if the variation of clusters cannot be estimated: with
    fewer than two clusters, or if the largest dominates (degrees of freedom below 1).

    If leaving out any cluster does not change the mean, the jackknife shows no error. Without
    bounds there is no interval then. Between bounds, one cluster in C may still differ by as much
    as they allow: with n the effective number of documents, each end is (1 - 0.025^(1/n)) of the
    way from the mean to its bound, which at a bound is Clopper and Pearson's interval of 0 of n.

    If all clusters except one are at a bound, the interval extends to this bound, because a single
    cluster does not show how rare its kind is. Its contribution to the error is then computed with
    the tangent of the logit.

    Args:
        values: ``[num_documents]`` one value per document.
        bounds: smallest and largest possible value. If both are finite, the error is computed on
            the logit scale; else on the scale of the values, and the interval ends at a bound that
            it would cross. None: there are none.
        clusters: ``[num_documents]``, see `find_clusters`.
    """
    values_D = _as_values(values)
    if not len(values_D):
        return None
    mean = math.fsum(values_D) / len(values_D)
    least, most = (-math.inf, math.inf) if bounds is None else bounds
    is_bounded = math.isfinite(least) and math.isfinite(most)
    # Rounding must not leave the bounds.
    slack = _ROUNDING * (most - least) if is_bounded else math.inf
    is_inside = values_D.min() >= least - slack and values_D.max() <= most + slack
    assert is_inside, f"a value is outside its bounds {bounds}"
    mean = min(max(mean, least), most)
    left_out = _leave_clusters_out(values_D, clusters)
    is_equal = left_out is not None and left_out.compute_variance() <= 0
    if left_out is None or (is_equal and not is_bounded):
        return Interval(value=mean, ci=None)
    if is_bounded:
        low, high = (_bound_equal if is_equal else _compute_bounded)(left_out, (least, most))
    else:
        reach = _find_quantile(left_out.freedom) * math.sqrt(left_out.compute_variance())
        low, high = mean - reach, mean + reach
    return Interval(value=mean, ci=(max(low, least), min(high, most)))


def compute_paired_difference(
    first: ArrayLike,
    second: ArrayLike,
    *,
    bounds: tuple[float, float] | None = None,
    clusters: ArrayLike | None = None,
) -> Interval | None:
    """Return the mean of first minus second over the same documents, with its interval.

    Effects of a document that are common to both cancel. This is `compute_mean` of the differences;
    see `compute_paired_rates` for values that are 0 or 1.
    """
    values_D, others_D = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    assert values_D.shape == others_D.shape, "pairs need two values per document"
    return compute_mean(values_D - others_D, find_difference_bounds(bounds), clusters)


def find_difference_bounds(bounds: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return the smallest and largest difference of two values between bounds."""
    return None if bounds is None else (bounds[0] - bounds[1], bounds[1] - bounds[0])


def compute_mean_difference(
    first: ArrayLike,
    second: ArrayLike,
    *,
    bounds: tuple[float, float] | None = None,
    first_clusters: ArrayLike | None = None,
    second_clusters: ArrayLike | None = None,
) -> Interval | None:
    """Return the mean of the first minus that of the second, for different documents.

    Between finite bounds, the intervals of the two means are combined by `subtract`. Without, both
    errors are computed by the jackknife over clusters and combined as in Welch (1947):

        degrees of freedom = (v1 + v2)^2 / (v1^2 / f1 + v2^2 / f2)

    The two are treated as independent, so no cluster should be in both. None without documents of
    either kind. There is no interval if one kind has none by `compute_mean`, except, without
    bounds, if the only reason is that leaving out a cluster does not change its mean: then the
    whole error is that of the other kind. See `compute_paired_difference` for the same documents
    under two settings. ``bounds`` are the smallest and largest possible value of either; None if
    there are none. The clusters are those of each, as for `compute_mean`.
    """
    values_D, others_E = _as_values(first), _as_values(second)
    if not len(values_D) or not len(others_E):
        return None
    limits = find_difference_bounds(bounds)
    if limits is not None and math.isfinite(limits[1]):
        one = compute_mean(values_D, bounds, first_clusters)
        other = compute_mean(others_E, bounds, second_clusters)
        assert one is not None, "it has documents"
        assert other is not None, "it has documents"
        return subtract(one, other, limits)
    return _compute_welch(
        _leave_clusters_out(values_D, first_clusters),
        _leave_clusters_out(others_E, second_clusters),
        math.fsum(values_D) / len(values_D) - math.fsum(others_E) / len(others_E),
    )


def _compute_welch(one: _Jackknife | None, other: _Jackknife | None, difference: float) -> Interval:
    if one is None or other is None:
        return Interval(value=difference, ci=None)
    variances = np.array([one.compute_variance(), other.compute_variance()])
    if variances.sum() <= 0:
        return Interval(value=difference, ci=None)
    # Divided by their sum, so that the squares neither underflow nor overflow.
    shares = variances / variances.sum()
    freedom = 1 / float((shares**2 / [one.freedom, other.freedom]).sum())
    reach = _find_quantile(freedom) * math.sqrt(variances.sum())
    return Interval(value=difference, ci=(difference - reach, difference + reach))


def _as_values(values: ArrayLike | Sequence[float]) -> NDArray[np.float64]:
    values_D = np.asarray(values, dtype=np.float64)
    assert not np.isnan(values_D).any(), "a missing value has no mean"
    return values_D


def _leave_clusters_out(
    values_D: NDArray[np.float64], clusters: ArrayLike | None
) -> _Jackknife | None:
    """Return the jackknife; None with effectively fewer than two clusters."""
    count = len(values_D)
    cluster_D, size_C = find_clusters(count, clusters)
    if len(size_C) < 2:
        return None
    sizes_C = size_C.astype(np.float64)
    freedom = float(np.square(np.square(sizes_C).sum()) / (sizes_C**4).sum()) - 1
    if freedom < 1:
        return None
    sum_C = np.bincount(cluster_D, weights=values_D).astype(np.float64)
    mean = math.fsum(values_D) / count
    without_C = (mean * count - sum_C) / (count - sizes_C)
    scale = float(np.abs(values_D).max())
    is_same = np.abs(without_C - mean) <= _ROUNDING * scale
    return _Jackknife(
        mean=mean,
        without_C=np.where(is_same, mean, without_C),
        num_effective=count_effective(size_C),
        freedom=freedom,
    )


def _compute_variance(deviation_C: NDArray[np.float64]) -> float:
    count = len(deviation_C)
    return float(np.square(deviation_C).sum()) * (count - 1) / count


def _find_quantile(freedom: float) -> float:
    return float(special.stdtrit(freedom, 1 - TAIL))


def _bound_equal(left_out: _Jackknife, bounds: tuple[float, float]) -> tuple[float, float]:
    """Return the ends for clusters whose means are all equal."""
    mean, way = left_out.mean, 1 - TAIL ** (1 / left_out.num_effective)
    return mean - (mean - bounds[0]) * way, mean + (bounds[1] - mean) * way


def _compute_bounded(left_out: _Jackknife, bounds: tuple[float, float]) -> tuple[float, float]:
    """Return the ends by the jackknife of the logit."""
    low, span = bounds[0], bounds[1] - bounds[0]
    share, share_C = (left_out.mean - low) / span, (left_out.without_C - low) / span
    is_low_C, is_high_C = share_C <= _ROUNDING, share_C >= 1 - _ROUNDING
    is_inside_C = ~(is_low_C | is_high_C)
    centre = float(special.logit(share))
    deviation_C = (share_C - share) / (share * (1 - share))
    deviation_C[is_inside_C] = special.logit(share_C[is_inside_C]) - centre
    reach = _find_quantile(left_out.freedom) * math.sqrt(_compute_variance(deviation_C))
    ends = (
        0.0 if is_low_C.any() else float(special.expit(centre - reach)),
        1.0 if is_high_C.any() else float(special.expit(centre + reach)),
    )
    return low + span * ends[0], low + span * ends[1]
