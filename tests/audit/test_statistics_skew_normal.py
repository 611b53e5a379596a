"""The fit against SciPy's moments; the tail against 30-digit arithmetic, SciPy and quadrature."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from memguard.audit.statistics import (
    SkewNormal,
    compute_skew_normal_logcdf,
    fit_skew_normal,
    skew_normal,
)

SHAPES = [-20.0, -3.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.7, 20.0]


def _logcdf(z: object, shape: float) -> np.ndarray:
    fit = SkewNormal(location=0, scale=1, shape=shape)
    return compute_skew_normal_logcdf(np.asarray(z, dtype=float), fit)


@pytest.mark.parametrize(
    ("shape", "z", "expected"),
    [  # mpmath 1.3, 30 digits: log of quad of 2 npdf(t) erfc(-shape t / sqrt 2) / 2 below z
        (-3, -1, -1.1480517337728093),
        (-3, -3.7, -8.442088191312932),
        (-3, -4, -9.666954305967346),
        (-3, -10, -52.53813796995255),
        (-3, -40, -803.9152948332041),
        (-3, -1000, -500007.1335476316),
        (0, -1, -1.8410216450092636),
        (0, -4, -10.360101486527292),
        (0, -40, -804.6084420137641),
        (0, -1000, -500007.8266948122),
        (1, -1, -3.682043290018527),
        (1, -3.7, -18.270470743745754),
        (1, -10, -106.4625703010367),
        (1, -40, -1609.2168840275178),
        (1, -1000, -1000015.6533896244),
        (5, -1, -19.116295626654598),
        (5, -4, -216.79209941193736),
        (5, -40, -20813.390096315237),
        (5, -1000, -13000019.82777501),
    ],
)
def test_logcdf_golden(shape: float, z: float, expected: float) -> None:
    # 64 nodes reach about 1e-13; a wrong node or factor shows at 1e-3.
    assert float(_logcdf(z, shape)) == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("shape", SHAPES)
def test_logcdf_is_scipys_where_that_is_good(shape: float) -> None:
    z = np.linspace(-6, 6, 121)
    expected = stats.skewnorm.cdf(z, shape)
    # Below 1e-4 SciPy loses digits; above, its cdf is good to about 1e-13.
    good = expected > 1e-4
    np.testing.assert_allclose(
        _logcdf(z[good], shape), np.log(expected[good]), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_both_ways_meet(shape: float) -> None:
    """Around the cdf of 1e-4 integral and closed form say the same."""
    z = np.linspace(-5, 0, 2001)
    cdf = special.ndtr(z) - 2 * special.owens_t(z, shape)
    near = z[(cdf > 3e-5) & (cdf < 3e-4)]
    assert near.size
    closed = np.log(special.ndtr(near) - 2 * special.owens_t(near, shape))
    # The closed form has lost 1e-16 / 3e-5 to cancellation.
    np.testing.assert_allclose(skew_normal._tail_logcdf(near, shape), closed, atol=1e-10, rtol=0)


@settings(max_examples=40)
@given(st.floats(-1000, -5), st.floats(-10, 10))
def test_tail_by_adaptive_quadrature(z: float, shape: float) -> None:
    def log_density(t: float) -> float:
        return -t * t / 2 + math.log(2 / math.sqrt(2 * math.pi)) + special.log_ndtr(shape * t)

    # In units of 1/|z|, relative to the density at z, which is what underflows.
    area = integrate.quad(
        lambda s: math.exp(log_density(z - s / abs(z)) - log_density(z)), 0, math.inf, epsabs=0
    )[0]
    expected = log_density(z) + math.log(area / abs(z))
    # quad stops at 1.5e-8; the difference of two log densities of 5e7 is good to 1e-8.
    assert float(_logcdf(z, shape)) == pytest.approx(expected, rel=1e-12, abs=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
def test_logcdf_is_finite_and_rises(shape: float) -> None:
    z = np.concatenate([-np.geomspace(1e3, 1e-3, 4001), np.linspace(0, 50, 501)])
    logcdf = _logcdf(z, shape)
    assert np.isfinite(logcdf).all()
    assert (logcdf <= 0).all()
    # Steps are real until the cdf is 1 but for rounding; there it may sway by that much.
    assert (np.diff(logcdf) > -1e-15).all()
    assert (np.diff(logcdf[z < -1]) > 0).all()


def test_fit_has_the_moments_of_the_values() -> None:
    values = stats.gamma.rvs(20, size=200, random_state=np.random.default_rng(0))
    fit = fit_skew_normal(values)
    mean, variance, skewness = stats.skewnorm.stats(
        fit.shape, loc=fit.location, scale=fit.scale, moments="mvs"
    )
    assert mean == pytest.approx(values.mean())
    assert variance == pytest.approx(values.var())
    assert skewness == pytest.approx(stats.skew(values))
    mirrored = fit_skew_normal(-values)
    assert mirrored.shape == pytest.approx(-fit.shape)
    assert mirrored.location == pytest.approx(-fit.location)


def test_fit_finds_the_parameters_that_were_drawn_from() -> None:
    values = stats.skewnorm.rvs(3, 10, 2, size=100_000, random_state=np.random.default_rng(0))
    fit = fit_skew_normal(values)
    # Ten samples of this size gave shapes of 2.9 to 3.1.
    assert (fit.shape, fit.location, fit.scale) == pytest.approx((3, 10, 2), rel=0.07)


@given(st.lists(st.floats(-100, 100), max_size=20))
def test_fit_of_anything_gives_finite_tails(values: list[float]) -> None:
    fit = fit_skew_normal(values)
    if len(values) < 3 or len(set(values)) == 1:
        assert fit is None
    if fit is None:
        return
    assert fit.scale > 0
    assert math.isfinite(fit.location)
    assert abs(fit.shape) < 7
    spread = np.std(values)
    z = np.array([*values, np.mean(values) - 1e3 * spread, np.mean(values) + 1e3 * spread])
    assert np.isfinite(compute_skew_normal_logcdf(z, fit)).all()


def test_an_outlier_does_not_end_the_tail() -> None:
    # A sample skewness of 3.9 is beyond any skew normal's: cut, not refused.
    fit = fit_skew_normal([*np.linspace(0, 1, 20), 50.0])
    assert stats.skewnorm.stats(fit.shape, moments="s") == pytest.approx(0.9)
