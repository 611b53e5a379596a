"""Skew normal distribution with a finite log-probability in the far left tail.

    density(z) = 2 phi(z) Phi(shape z),   z = (value - location) / scale        (Azzalini 1985)

SciPy's cdf is 0, and its logcdf -inf, about 38 standard deviations from the mean, and closer to it
if the shape is positive. The losses of memorized canaries are in this range.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

# Limit of the sample skewness. The limit of the distribution is 0.995, where it is a half-normal
# without a left tail: a sample close to it by chance would make lower values impossible.
_MAX_SKEWNESS = 0.9
# Below this, Phi - 2T loses digits by cancellation, and the tail is integrated instead.
_TAIL_CDF = 1e-4
_NODES, _WEIGHTS = special.roots_laguerre(64)
_LOG_WEIGHTS = np.log(_WEIGHTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class SkewNormal:
    """Parameters; location and scale are mean and standard deviation only if the shape is 0."""

    location: float
    scale: float
    shape: float
    """Negative if the left tail is the longer one."""


def fit_skew_normal(values: ArrayLike) -> SkewNormal | None:
    """Return the skew normal with the mean, variance and skewness of the values.

    The method of moments has a closed form; maximum likelihood diverges to an infinite shape for
    many small samples. At 20 bits in the tail of a normal, 80 % of these fits estimate 11 to 39
    bits from 8 values, 11 to 45 from 16, 15 to 26 from 100 and 18 to 22 from 1,000 (40 samples
    each); maximum likelihood with the shape limited to 10 estimates 10 to 460, 11 to 370, 17 to 26
    and 18 to 22.

    Args:
        values: values in any order.

    Returns:
        None for fewer than three values, which have no skewness, and if all are equal.
    """
    values_D = np.sort(np.asarray(values, dtype=np.float64))
    if len(values_D) < 3 or values_D[0] == values_D[-1]:
        return None
    mean, deviation = float(values_D.mean()), float(values_D.std())
    if deviation == 0:  # The squares of the differences underflow.
        return None
    skewness = float((((values_D - mean) / deviation) ** 3).mean())
    skewness = min(max(skewness, -_MAX_SKEWNESS), _MAX_SKEWNESS)
    # Skewness in terms of delta = shape / sqrt(1 + shape^2), solved for delta.
    power = abs(skewness) ** (2 / 3)
    size = math.sqrt(math.pi / 2 * power / (power + ((4 - math.pi) / 2) ** (2 / 3)))
    delta = math.copysign(size, skewness)
    scale = deviation / math.sqrt(1 - 2 * delta**2 / math.pi)
    return SkewNormal(
        location=mean - scale * delta * math.sqrt(2 / math.pi),
        scale=scale,
        shape=delta / math.sqrt(1 - delta**2),
    )


def compute_skew_normal_logcdf(values: ArrayLike, fit: SkewNormal) -> NDArray[np.float64]:
    """Return the natural log of the cdf, finite for values arbitrarily far in the left tail.

    If the cdf exceeds 1e-4, it is Phi(z) - 2T(z, shape) with Owen's T (1956). Otherwise it is

        integral_0^inf exp(g(s)) ds,   g(s) = log 2 phi(z - s) + log Phi(shape (z - s))

    by Gauss-Laguerre (64 nodes) in ``s * rate`` and in log space, rate being -g'(0): the integrand
    is nearly exp(-rate s). Relative error at most 1e-11 against 30-digit arithmetic, for shapes
    from -20 to 200 and z down to -1000.

    Args:
        values: values, any shape.
        fit: parameters, see `fit_skew_normal`.

    Returns:
        The shape of ``values``.
    """
    z = (np.asarray(values, dtype=np.float64) - fit.location) / fit.scale
    cdf = special.ndtr(z) - 2 * special.owens_t(z, fit.shape)
    in_tail = cdf < _TAIL_CDF
    return np.where(
        in_tail,
        _tail_logcdf(np.where(in_tail, z, -10.0), fit.shape),
        np.log(np.where(in_tail, 1.0, np.minimum(cdf, 1.0))),
    )


def _tail_logcdf(z: NDArray[np.float64], shape: float) -> NDArray[np.float64]:
    # phi/Phi by erfcx, which neither underflows in the left tail nor loses digits in the right.
    hazard = math.sqrt(2 / math.pi) / special.erfcx(-shape * z / math.sqrt(2))
    rate = (shape * hazard - z)[..., np.newaxis]
    point = z[..., np.newaxis] - _NODES / rate
    log_density = math.log(2 / math.sqrt(2 * math.pi)) - point**2 / 2
    terms = log_density + special.log_ndtr(shape * point) + _NODES + _LOG_WEIGHTS
    return np.asarray(special.logsumexp(terms - np.log(rate), axis=-1))
