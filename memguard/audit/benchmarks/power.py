"""The smallest difference that a paired test of N items shows with power 0.8 (two-sided, 0.05).

Of two models of which the share s of the items is answered rightly by exactly one, the number M of
these is binomial (N, s). With a difference d of the rates, each of them is answered by the better
model with probability (s + d) / 2 s. McNemar's exact test rejects for M items if at most c(M) of
them are of one model:

    power(d) = sum over M of P[M] (P[Bin(M, q) <= c(M)] + P[Bin(M, 1 - q) <= c(M)])

A difference d needs a share s of at least d, so s is raised to d where fewer items differ.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import special

POWER: Final = 0.8
LEVEL: Final = 0.05
_NEGLIGIBLE = 1e-12
_HALVINGS = 40


def find_smallest_rate_difference(num_items: int, share_differing: float) -> float | None:
    """Return the smallest difference of two rates that McNemar's exact test shows.

    Args:
        num_items: items that both models answer.
        share_differing: share of them that exactly one of the models answers rightly.

    Returns:
        None if not even models that differ on every item are told apart with this power.
    """
    assert 0 <= share_differing <= 1, f"{share_differing} is not a share"
    if _compute_power(num_items, share_differing, 1.0) < POWER:
        return None
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _compute_power(num_items, share_differing, middle) < POWER:
            low = middle
        else:
            high = middle
    return high


def find_smallest_mean_difference(num_items: int, deviation: float) -> float | None:
    """Return the smallest difference of two means that a paired t test shows, about.

    Args:
        num_items: items that both models answer.
        deviation: standard deviation of the difference of an item.

    Returns:
        None below two items, or if the deviation is 0 and so not known.
    """
    if num_items < 2 or deviation <= 0:
        return None
    reach = float(special.stdtrit(num_items - 1, 1 - LEVEL / 2)) + float(special.ndtri(POWER))
    return reach * deviation / math.sqrt(num_items)


def find_smallest_score_difference(error: float) -> float | None:
    """Return the smallest difference of two scores with this standard error; None for 0."""
    if error <= 0 or not math.isfinite(error):
        return None
    return (float(special.ndtri(1 - LEVEL / 2)) + float(special.ndtri(POWER))) * error


def _compute_power(num_items: int, share_differing: float, difference: float) -> float:
    share = max(share_differing, difference)
    if share <= 0:
        return 0.0
    count_M = np.arange(num_items + 1, dtype=np.float64)
    log_M = (
        special.gammaln(num_items + 1)
        - special.gammaln(count_M + 1)
        - special.gammaln(num_items - count_M + 1)
        + special.xlogy(count_M, share)
        + special.xlog1py(num_items - count_M, -share)
    )
    is_likely = log_M > math.log(_NEGLIGIBLE)
    count_M, probability_M = count_M[is_likely], np.exp(log_M[is_likely])
    most_M = _find_critical(count_M)
    better = min(1.0, (share + difference) / (2 * share))
    # SciPy wants the number of trials as an integer.
    trials_M = count_M.astype(np.int64)
    rejects_M = special.bdtr(np.maximum(most_M, 0), trials_M, better)
    rejects_M = rejects_M + special.bdtr(np.maximum(most_M, 0), trials_M, 1 - better)
    return float((probability_M * np.where(most_M < 0, 0.0, rejects_M)).sum())


def _find_critical(count_M: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the largest number of items of one model at which the test rejects; -1 for none."""
    most_M = np.floor(count_M / 2 - np.sqrt(count_M)) - 2
    most_M = np.maximum(most_M, -1.0)
    trials_M = count_M.astype(np.int64)
    while True:
        next_M = most_M + 1
        is_rejected = (next_M < count_M / 2) & (special.bdtr(next_M, trials_M, 0.5) <= LEVEL / 2)
        if not is_rejected.any():
            return np.asarray(most_M)
        most_M = np.where(is_rejected, next_M, most_M)
