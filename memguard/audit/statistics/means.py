"""Means over documents by the t distribution."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special

from memguard.records import Interval

_TAIL = 0.025


def compute_mean(
    values: Sequence[float] | NDArray[np.float64],
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Interval | None:
    """Return the mean over documents with Student's t interval, cut to the possible ``bounds``.

    None without values; no interval below two, nor where all are equal, which the t distribution
    would call certain.

    Args:
        values: one for each document, taken as independent (see `compute_bootstrap_mean` for
            documents in clusters).
        bounds: what a mean can be at all.
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
