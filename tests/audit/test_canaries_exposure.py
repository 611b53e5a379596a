"""Exposure against published examples, counting and SciPy's distribution."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from memguard.audit.canaries import compute_exposures

_nlls = st.lists(st.integers(-3, 3).map(float), max_size=12)


def test_by_rank_golden() -> None:
    # Ranks as TensorFlow Privacy's secret_sharer counts them; the third is log2(16 / 17).
    found = compute_exposures([0, 0.1, 20, 3.5], np.arange(1, 17))
    assert found.rank_C.tolist() == [1, 1, 17, 4]
    assert found.by_rank_bits_C == pytest.approx([4, 4, -0.087463, 2], abs=5e-7)  # six digits


@given(_nlls, _nlls)
def test_rank_by_counting(canaries: list[float], references: list[float]) -> None:
    found = compute_exposures(canaries, references)
    if not references:
        assert found is None
        return
    ranks = [1 + sum(reference <= canary for reference in references) for canary in canaries]
    assert found.rank_C.tolist() == ranks
    expected = [math.log2(len(references) / rank) for rank in ranks]
    assert found.by_rank_bits_C == pytest.approx(expected, abs=1e-12)  # log of quotients


def test_a_canary_never_trained_has_one_bit() -> None:
    draw = np.random.default_rng(0)
    bits = []
    for _ in range(400):
        found = compute_exposures(draw.normal(size=5), draw.normal(size=63))
        bits += found.by_rank_bits_C.tolist()
    # Rank is uniform on 1..64: median of log2(63 / rank) about 1, its error over 2,000 about 0.05.
    assert np.median(bits) == pytest.approx(1, abs=0.2)
    # At least 3 bits: rank 1 to 7 of 64.
    assert np.mean(np.array(bits) >= 3) == pytest.approx(7 / 64, abs=0.03)


def test_extrapolation_goes_on_where_the_rank_ends() -> None:
    # The middles of 500 equally likely slices of a normal: no skewness, nothing drawn.
    references = stats.norm.ppf((np.arange(500) + 0.5) / 500, 40, 3)
    nll = np.array([40.0, 34.0, 25.0, 10.0, 0.0])
    found = compute_exposures(nll, references)
    bits = found.extrapolated_bits_C
    # Inside the references both say the same; ranks there are 251 and 12 of 500.
    assert bits[:2] == pytest.approx(found.by_rank_bits_C[:2], abs=0.1)
    assert (found.rank_C[2:] == 1).all()
    assert (np.diff(bits) > 0).all()
    assert np.isfinite(bits).all()
    truth = -stats.norm.logcdf((nll - 40) / references.std()) / math.log(2)
    # A skewness of 1e-17 instead of 0 becomes a shape of 1e-6, by its cube root.
    assert bits == pytest.approx(truth, abs=1e-3)


def test_extrapolation_is_scipys_distribution() -> None:
    references = stats.skewnorm.rvs(2, 30, 4, size=300, random_state=np.random.default_rng(0))
    nll = np.linspace(27, 45, 40)
    found = compute_exposures(nll, references)
    # The skew normal with the references' own moments, by root finding on SciPy's formula.
    shape = _solve_shape(stats.skew(references))
    mean, deviation = stats.skewnorm.mean(shape), stats.skewnorm.std(shape)
    z = (nll - references.mean()) / references.std() * deviation + mean
    expected = -np.log2(stats.skewnorm.cdf(z, shape))
    # SciPy integrates below a cdf of 1e-6 to about 1e-8 of it.
    np.testing.assert_allclose(found.extrapolated_bits_C, expected, rtol=1e-6, atol=1e-9)


def _solve_shape(skewness: float) -> float:
    low, high = 0.0, 50.0
    for _ in range(100):
        middle = (low + high) / 2
        if stats.skewnorm.stats(middle, moments="s") < skewness:
            low = middle
        else:
            high = middle
    return low


@pytest.mark.parametrize("references", [np.arange(7), np.full(50, 0.1), [3.0]])
def test_no_extrapolation_from_few_or_equal(references: np.ndarray) -> None:
    found = compute_exposures([0.0, 1.0], references)
    assert found.extrapolated_bits_C is None
    fewest = compute_exposures([0.0], np.arange(8))
    assert fewest.extrapolated_bits_C is not None


def test_nothing_among_references_is_no_exposure() -> None:
    none = compute_exposures([], np.arange(1, 17))
    assert none is not None
    assert none.by_rank_bits_C.size == 0
    certain = compute_exposures([20], np.arange(1, 17))
    assert certain.extrapolated_bits_C[0] >= 0


def test_a_missing_nll_is_refused() -> None:
    with pytest.raises(AssertionError, match="missing nll"):
        compute_exposures([math.nan], [1.0])
    with pytest.raises(AssertionError, match="missing nll"):
        compute_exposures([1.0], [math.inf, 1.0])
    with pytest.raises(AssertionError, match="one-dimensional"):
        compute_exposures([[1.0]], [1.0])
