"""The comparison with the control against SciPy, a dense grid, and every table of small sizes."""

import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from memguard.audit.statistics import compute_p_above_control


@given(st.data())
def test_with_a_control_match_it_is_fishers_test(data: st.DataObject) -> None:
    n, m = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 40))
    k, c = data.draw(st.integers(1, n)), data.draw(st.integers(1, m))
    exact = stats.fisher_exact([[k, n - k], [c, m - c]], alternative="greater").pvalue
    # Both sum the same hypergeometric terms, SciPy's by logarithms of factorials of up to 190.
    assert compute_p_above_control(k, n, c, m) == pytest.approx(exact, rel=1e-9)


@given(st.integers(1, 150), st.integers(1, 60), st.data())
def test_without_one_it_is_the_largest_probability_of_any_common_rate(
    n: int, m: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, n))
    found = compute_p_above_control(k, n, 0, m)
    grid_G = _spread(np.linspace(0, 1, 4001))
    on_grid = float((stats.binom.sf(k - 1, n, grid_G) * (1 - grid_G) ** m).max())
    # No rate of the grid gives more, but for rounding; the best one is at most 1/4000 from the
    # largest, where the logarithm is flat: its curvature is below (n + m) / (g (1 - g)).
    assert found >= on_grid * (1 - 1e-9)
    assert found == pytest.approx(on_grid, rel=1e-3)


def _spread(share_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return rates that are closer to one another near 0 and 1."""
    return np.asarray(np.sin(share_G * np.pi / 2) ** 2)


def test_the_issues_number() -> None:
    # Given as .0272: half of its last digit.
    assert compute_p_above_control(26, 135, 0, 14) == pytest.approx(0.0272, abs=5e-5)
    assert compute_p_above_control(22, 135, 0, 14) <= 0.05 < compute_p_above_control(21, 135, 0, 14)
    assert compute_p_above_control(10, 120, 0, 29) <= 0.05 < compute_p_above_control(9, 120, 0, 29)


@pytest.mark.parametrize(("k", "m"), [(2, 2), (2, 3), (8, 2), (4, 4), (40, 10), (1, 200)])
def test_all_of_k_against_none_of_m_in_closed_form(k: int, m: int) -> None:
    """The largest g^k (1 - g)^m, at g = k / (k + m)."""
    wanted = (k / (k + m)) ** k * (m / (k + m)) ** m
    # The maximum is flat: 60 halvings of the logit leave roundings alone.
    assert compute_p_above_control(k, k, 0, m) == pytest.approx(wanted, rel=1e-9)


def test_nothing_matched_shows_nothing() -> None:
    assert compute_p_above_control(0, 30, 0, 10) == 1
    assert compute_p_above_control(0, 30, 10, 10) == 1


def test_one_more_match_and_one_control_match_less_never_raise_p() -> None:
    _check_monotone([1, 2, 5, 30], [1, 4, 14])


@pytest.mark.slow
def test_one_more_match_never_raises_p_for_many_sizes() -> None:
    """80 pairs, all k and c: three seconds."""
    _check_monotone([1, 2, 3, 5, 10, 20, 40, 60, 100, 135], [1, 2, 3, 5, 10, 14, 20, 30])


def _check_monotone(sizes: list[int], controls: list[int]) -> None:
    """Turn or add one document, turn or leave out one control document, from every table."""
    for n, m in itertools.product(sizes, controls):
        p_KC = np.array(
            [[compute_p_above_control(k, n, c, m) for c in range(m + 1)] for k in range(n + 1)]
        )
        assert ((p_KC >= 0) & (p_KC <= 1)).all()
        # Roundings of equal sums.
        assert (np.diff(p_KC, axis=0) <= 1e-9).all(), f"k of {n}, c of {m}: a match more"
        assert (np.diff(p_KC, axis=1) >= -1e-9).all(), f"k of {n}, c of {m}: a control match less"
        for k in {0, n // 2, n}:
            for c in {0, 1, m}:
                added = compute_p_above_control(k + 1, n + 1, c, m)
                assert added <= p_KC[k, c] + 1e-9, f"{k} of {n}, {c} of {m}: one added"
                if c and m > 1:
                    left = compute_p_above_control(k, n, c - 1, m - 1)
                    assert left <= p_KC[k, c] + 1e-9, f"{k} of {n}, {c} of {m}: one left out"


@pytest.mark.parametrize("n", [1, 10**3, 10**6])
@pytest.mark.parametrize("m", [1, 30, 10**6])
def test_extremes_give_probabilities_without_warnings(n: int, m: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in {1, n // 2 + 1, n}:
            for c in {0, 1, m}:
                p = compute_p_above_control(k, n, c, m)
                assert 0 <= p <= 1
                if c == m and k == n:
                    assert p == pytest.approx(1, abs=1e-9)
    assert compute_p_above_control(10**6, 10**6, 0, 30) == pytest.approx(
        # (m / (k + m))^m (k / (k + m))^k, by logarithms.
        np.exp(30 * np.log(30 / (10**6 + 30)) + 10**6 * np.log1p(-30 / (10**6 + 30))),
        rel=1e-6,
    )
