"""Statistical tests: paired tests of two settings, correction for multiple tests, and trends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray
from scipy import special


def compute_mcnemar(num_only_first: int, num_only_second: int) -> float:
    """Return McNemar's exact two-sided p-value.

    Under the null hypothesis, a document on which two settings differ is equally likely to be
    matched by either, so the count is binomial with probability 1/2 (McNemar 1947, exact form). The
    p-value is 1 if the settings do not differ on any document.
    """
    differing = num_only_first + num_only_second
    tail = special.bdtr(min(num_only_first, num_only_second), differing, 0.5)
    return min(1.0, 2.0 * float(tail))


def compute_p_above_control(
    num_matched: int, num_documents: int, num_control_matched: int, num_control: int
) -> float:
    """Return the one-sided p-value that k of n documents match as rarely as c of m control ones.

    If some control document matches, this is Fisher's exact test: of all k + c matches, the number
    among the documents is hypergeometric. If none does, Fisher's test is conservative, and the
    largest probability of what was observed over all common rates g is used instead:

        p = max over g of (1 - g)^m P[Bin(n, g) >= k]

    Both factors are log-concave in g, so there is one maximum. With a further match of a
    document, or one control match less, p does not rise (a test checks this).
    """
    k, n, c, m = num_matched, num_documents, num_control_matched, num_control
    assert 0 <= k <= n, f"{k} of {n} documents"
    assert 0 <= c <= m, f"{c} of {m} control documents"
    assert m > 0, "a comparison needs a control document"
    if k == 0:
        return 1.0
    if c > 0:
        # All splits of k + c matches with k or more among the documents. scipy.stats, which has
        # this distribution, needs torch or a second to be imported.
        i_S = np.arange(k, min(n, k + c) + 1)
        log_S = _log_binomial(n, i_S) + _log_binomial(m, k + c - i_S)
        return min(1.0, float(np.exp(log_S - _log_binomial(n + m, np.array(k + c))).sum()))

    log_beta = float(special.betaln(k, n - k + 1))

    def is_rising(g: float) -> bool:
        """Return whether the logarithm of the product rises at g: density / tail > m / (1 - g)."""
        tail = float(special.betainc(k, n - k + 1, g))  # P[Bin(n, g) >= k]
        if tail == 0:
            return True
        log_density = float(special.xlogy(k - 1, g) + special.xlog1py(n - k, -g)) - log_beta
        return log_density - math.log(tail) + math.log1p(-g) > math.log(m)

    low, high = -50.0, 30.0  # Logits of g.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if is_rising(float(special.expit(middle))) else (low, middle)
    g = float(special.expit(low))
    return min(1.0, float(special.betainc(k, n - k + 1, g)) * (1 - g) ** m)


def _log_binomial(total: int, chosen_S: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the logarithms of binomial coefficients."""
    log_S: NDArray[np.float64] = -special.betaln(chosen_S + 1, total - chosen_S + 1)
    return log_S - math.log1p(total)


def correct_holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's step-down adjusted p-values, in the order given (Holm 1979).

    If there are no differences, the probability that any adjusted p-value is below 0.05 is at most
    5 %, for any dependence between the tests.
    """
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


@dataclass(frozen=True, kw_only=True, slots=True)
class Trend:
    """Trend of the rate of matched documents over the dose."""

    z: float
    """Test statistic in standard deviations; above 0 if the rate rises with the dose."""
    p_value: float
    """Two-sided, by the normal distribution."""


def compute_trend(
    num_matched: Sequence[int], num_documents: Sequence[int], doses: Sequence[float]
) -> Trend | None:
    """Test for a linear trend of rates over the dose (Cochran 1954, Armitage 1955).

    With p the rate of all N documents, x matched of n at dose d:

        z = sum d (x - n p) / sqrt(p (1 - p) (sum n d^2 - (sum n d)^2 / N))

    The variance is that of independent samples (N, not N - 1). The p-value is a normal
    approximation, which is rough if fewer than about five matched documents are expected in total.
    The test depends on the spacing of the doses: pass log(1 + num_repetitions) to give each
    doubling equal weight. Adding a constant to the doses or scaling them has no effect.

    Returns:
        None if the test is undefined: no documents, none or all matched, or a single dose.
    """
    matched_B, documents_B, dose_B = _as_buckets(num_matched, num_documents, doses)
    total, hits = float(documents_B.sum()), float(matched_B.sum())
    if not 0 < hits < total or np.ptp(dose_B[documents_B > 0]) == 0:
        return None
    # Centred first, to avoid cancellation if doses are large compared with their differences.
    centred_B = dose_B - float(documents_B @ dose_B) / total
    rate = hits / total
    variance = rate * (1 - rate) * float(documents_B @ centred_B**2)
    z = float(centred_B @ matched_B) / math.sqrt(variance)
    return Trend(z=z, p_value=min(1.0, 2 * float(special.ndtr(-abs(z)))))


def fit_dose_response(
    num_matched: Sequence[int], num_documents: Sequence[int]
) -> list[float | None]:
    """Return the non-decreasing rates closest to the observed ones, buckets by ascending dose.

    Pool-adjacent-violators algorithm, with buckets weighted by their documents: the maximum-
    likelihood rates under the assumption that more repetitions never make a document harder to
    extract (Ayer et al. 1955). A bucket without documents has None.
    """
    matched_B, documents_B = _as_buckets(num_matched, num_documents)
    known_B = documents_B > 0
    rates: list[float | None] = [None] * len(documents_B)
    if known_B.any():
        observed = matched_B[known_B] / documents_B[known_B]
        fitted = scipy.optimize.isotonic_regression(observed, weights=documents_B[known_B]).x
        for index, rate in zip(np.flatnonzero(known_B), fitted, strict=True):
            rates[index] = float(rate)
    return rates


def _as_buckets(*columns: Sequence[float]) -> list[NDArray[np.float64]]:
    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    matched_B, documents_B = arrays[:2]
    assert len({array.shape for array in arrays}) == 1, "all sequences need one value per bucket"
    assert ((matched_B >= 0) & (matched_B <= documents_B)).all(), (
        "matched documents must be between 0 and the documents of the bucket"
    )
    return arrays
