"""The trend test against correlation and permutations, the fit against scikit-learn."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.isotonic import isotonic_regression

from memguard.audit.statistics import compute_trend, fit_dose_response

_buckets = st.lists(
    st.integers(0, 30).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
    min_size=1,
    max_size=7,
)


def _spread(buckets: list[tuple[int, int]], doses: list[float]) -> tuple[list[int], list[float]]:
    """One outcome and one dose for each document."""
    outcomes = [int(i < matched) for matched, count in buckets for i in range(count)]
    return outcomes, [d for (_, n), d in zip(buckets, doses, strict=True) for _ in range(n)]


@given(_buckets, st.lists(st.integers(0, 64), min_size=7, max_size=7))
def test_trend_is_the_correlation_of_documents(
    buckets: list[tuple[int, int]], seven_doses: list[int]
) -> None:
    doses = [float(dose) for dose in seven_doses[: len(buckets)]]
    trend = compute_trend([x for x, _ in buckets], [n for _, n in buckets], doses)
    outcomes, dose_of = _spread(buckets, doses)
    if len(set(outcomes)) < 2 or len(set(dose_of)) < 2:
        assert trend is None
        return
    assert trend is not None
    # z = r sqrt(N), r Pearson's correlation of a document's outcome with its dose. Rounding of r
    # where it is 0: at most 210 terms of 1e-16, times sqrt(N).
    expected = stats.pearsonr(outcomes, dose_of).statistic * math.sqrt(len(outcomes))
    assert trend.z == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert trend.p_value == pytest.approx(2 * stats.norm.sf(abs(expected)), rel=1e-7, abs=1e-300)


def test_trend_by_the_textbook_formula() -> None:
    matched, documents, doses = [1, 4, 9], [10, 20, 30], [0, 1, 4]
    # N = 60, p = 14/60; sum d x = 40, p sum n d = 14/60 * 140; sum n d^2 = 500.
    score = 40 - 14 / 60 * 140
    variance = 14 / 60 * 46 / 60 * (500 - 140**2 / 60)
    trend = compute_trend(matched, documents, doses)
    assert trend is not None
    assert trend.z == pytest.approx(score / math.sqrt(variance))
    # Another order of buckets, other units and another zero of the dose change nothing.
    again = compute_trend([9, 1, 4], [30, 10, 20], [1e6 + 8, 1e6, 1e6 + 2])
    assert again is not None
    assert again.z == pytest.approx(trend.z, rel=1e-9)


def test_trend_against_permutations() -> None:
    buckets, doses = [(3, 40), (5, 40), (9, 40), (10, 40)], [0.0, 1.0, 4.0, 16.0]
    trend = compute_trend([x for x, _ in buckets], [n for _, n in buckets], doses)
    outcomes, dose_of = map(np.array, _spread(buckets, doses))
    draw = np.random.default_rng(0)
    observed = abs(outcomes @ (dose_of - dose_of.mean()))
    shuffled = np.array([draw.permutation(outcomes) for _ in range(20_000)])
    share = np.mean(np.abs(shuffled @ (dose_of - dose_of.mean())) >= observed - 1e-9)
    assert trend is not None
    # About 0.06: the share varies by 0.0017, the normal approximation is off by some percent of it.
    assert trend.p_value == pytest.approx(share, abs=0.015)


def test_trend_holds_its_level() -> None:
    draw = np.random.default_rng(0)
    documents, doses = [100, 100, 100, 100], [0, 1, 4, 16]
    p_values = []
    for _ in range(1000):
        trend = compute_trend(draw.binomial(documents, 0.2).tolist(), documents, doses)
        assert trend is not None
        p_values.append(trend.p_value)
    # 50 expected below 0.05, standard deviation 7.
    assert 29 <= np.sum(np.array(p_values) < 0.05) <= 71


@pytest.mark.parametrize(
    ("matched", "documents", "doses"),
    [
        ([], [], []),
        ([0, 0], [0, 0], [0, 1]),
        ([0, 0], [5, 5], [0, 1]),
        ([5, 5], [5, 5], [0, 1]),
        ([1, 2], [5, 5], [3, 3]),
        ([1, 0], [5, 0], [0, 1]),
    ],
)
def test_trend_that_cannot_be_asked(
    matched: list[int], documents: list[int], doses: list[float]
) -> None:
    assert compute_trend(matched, documents, doses) is None


@given(_buckets)
def test_fit_is_scikit_learns(buckets: list[tuple[int, int]]) -> None:
    fitted = fit_dose_response([x for x, _ in buckets], [n for _, n in buckets])
    known = [(x / n, n) for x, n in buckets if n]
    assert [rate is None for rate in fitted] == [n == 0 for _, n in buckets]
    rates = [rate for rate in fitted if rate is not None]
    if known:
        shares, weights = zip(*known, strict=True)
        expected = isotonic_regression(np.array(shares), sample_weight=np.array(weights))
        # Both average at most 7 rates.
        assert rates == pytest.approx(expected.tolist(), abs=1e-12)
    assert rates == sorted(rates)


def test_fit_by_hand() -> None:
    # 3/10 and 1/10 pool to 4/20; the empty bucket is stepped over.
    assert fit_dose_response([0, 3, 0, 1, 5], [10, 10, 0, 10, 10]) == [0, 0.2, None, 0.2, 0.5]
    # Weighted: (30 + 0) / (100 + 1), not the mean of 0.3 and 0.
    assert fit_dose_response([30, 0], [100, 1]) == pytest.approx([30 / 101, 30 / 101])
    assert fit_dose_response([], []) == []


def test_counts_that_are_no_shares_are_refused() -> None:
    with pytest.raises(AssertionError, match="between 0 and the documents"):
        compute_trend([6], [5], [0])
    with pytest.raises(AssertionError, match="one value per bucket"):
        fit_dose_response([1, 2], [5])
