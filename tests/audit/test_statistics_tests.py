"""Tests of differences, against the control and of trends: SciPy, fractions, permutations."""

import itertools
import math
import warnings
from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from sklearn.isotonic import isotonic_regression

from memguard.audit.statistics import (
    compute_mcnemar,
    compute_mean_difference,
    compute_p_above_control,
    compute_paired_difference,
    compute_trend,
    correct_holm,
    fit_dose_response,
)


@pytest.mark.parametrize(
    ("first", "second"), [(0, 0), (0, 1), (1, 4), (5, 0), (3, 3), (2, 9), (37, 58)]
)
def test_mcnemar_by_counting_outcomes(first: int, second: int) -> None:
    """Every way the differing documents could have fallen, by exact fractions."""
    total = first + second
    as_extreme = sum(
        comb(total, k) for k in range(total + 1) if abs(2 * k - total) >= abs(first - second)
    )
    assert compute_mcnemar(first, second) == pytest.approx(
        float(Fraction(as_extreme, 2**total)), rel=1e-14
    )


def test_paired_difference_is_scipys() -> None:
    draw = np.random.default_rng(0)
    hardness = draw.normal(0, 3, 60)
    first, second = hardness + draw.normal(0.5, 1, 60), hardness + draw.normal(0, 1, 60)
    interval = compute_paired_difference(first, second)
    expected = stats.ttest_rel(first, second).confidence_interval()
    assert interval.value == pytest.approx((first - second).mean(), abs=1e-12)
    assert interval.ci == pytest.approx((expected.low, expected.high))
    # Copies of everything are no further evidence.
    copied = compute_paired_difference(
        np.repeat(first, 2), np.repeat(second, 2), clusters=np.repeat(np.arange(60), 2)
    )
    assert copied.ci == pytest.approx(interval.ci)


def test_pairing_cancels_what_makes_a_document_hard() -> None:
    draw = np.random.default_rng(0)
    hardness = draw.normal(0, 3, 60)
    first, second = hardness + draw.normal(0, 1, 60), hardness + draw.normal(0, 1, 60)
    paired = compute_paired_difference(first, second)
    unpaired = compute_mean_difference(first, second)
    assert paired.value == pytest.approx(unpaired.value)
    # Standard errors are sqrt(2 / 60) and sqrt(20 / 60): about three times.
    assert unpaired.ci[1] - unpaired.ci[0] > 2 * (paired.ci[1] - paired.ci[0])


def test_settings_that_nowhere_differ() -> None:
    interval = compute_paired_difference([1, 0, 1], [1, 0, 1])
    assert (interval.value, interval.ci) == (0.0, None)
    between = compute_paired_difference([1, 0, 1], [1, 0, 1], bounds=(0, 1))
    assert between.ci == pytest.approx((0.025 ** (1 / 3) - 1, 1 - 0.025 ** (1 / 3)))
    with pytest.raises(AssertionError, match="two values"):
        compute_paired_difference([1, 0], [1])


P_VALUES = st.lists(st.floats(0, 1), max_size=12)


def test_holm_by_hand() -> None:
    # Smallest times 3, next times 2, last times 1, never falling.
    assert correct_holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert correct_holm([0.5, 0.9]) == [1.0, 1.0]
    assert correct_holm([0.02]) == [0.02]
    assert correct_holm([]) == []


@given(P_VALUES)
def test_holm_rejects_what_step_down_rejects(p_values: list[float]) -> None:
    adjusted = correct_holm(p_values)
    assert all(p <= a <= 1 for p, a in zip(p_values, adjusted, strict=True))
    for level in (0.01, 0.05, 0.3):
        # The procedure itself: from the smallest on, stop at the first that fails its own level.
        rejected = [False] * len(p_values)
        order = sorted(range(len(p_values)), key=lambda index: p_values[index])
        for rank, index in enumerate(order):
            if (len(order) - rank) * p_values[index] > level:
                break
            rejected[index] = True
        assert [a <= level for a in adjusted] == rejected


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


@pytest.mark.long
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


_buckets = st.lists(
    st.integers(0, 30).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
    min_size=1,
    max_size=7,
)


def _list_documents(
    buckets: list[tuple[int, int]], doses: list[float]
) -> tuple[list[int], list[float]]:
    """One outcome and one dose for each document."""
    outcomes = [int(i < matched) for matched, count in buckets for i in range(count)]
    return outcomes, [d for (_, n), d in zip(buckets, doses, strict=True) for _ in range(n)]


@given(_buckets, st.lists(st.integers(0, 64), min_size=7, max_size=7))
def test_trend_is_the_correlation_of_documents(
    buckets: list[tuple[int, int]], seven_doses: list[int]
) -> None:
    doses = [float(dose) for dose in seven_doses[: len(buckets)]]
    trend = compute_trend([x for x, _ in buckets], [n for _, n in buckets], doses)
    outcomes, dose_of = _list_documents(buckets, doses)
    if len(set(outcomes)) < 2 or len(set(dose_of)) < 2:
        assert trend is None
        return
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
    assert trend.z == pytest.approx(score / math.sqrt(variance))
    # Another order of buckets, other units and another zero of the dose change nothing.
    again = compute_trend([9, 1, 4], [30, 10, 20], [1e6 + 8, 1e6, 1e6 + 2])
    assert again.z == pytest.approx(trend.z, rel=1e-9)


def test_trend_against_permutations() -> None:
    buckets, doses = [(3, 40), (5, 40), (9, 40), (10, 40)], [0.0, 1.0, 4.0, 16.0]
    trend = compute_trend([x for x, _ in buckets], [n for _, n in buckets], doses)
    outcomes, dose_of = map(np.array, _list_documents(buckets, doses))
    draw = np.random.default_rng(0)
    observed = abs(outcomes @ (dose_of - dose_of.mean()))
    shuffled = np.array([draw.permutation(outcomes) for _ in range(20_000)])
    share = np.mean(np.abs(shuffled @ (dose_of - dose_of.mean())) >= observed - 1e-9)
    # About 0.06: the share varies by 0.0017, the normal approximation is off by some percent of it.
    assert trend.p_value == pytest.approx(share, abs=0.015)


def test_trend_holds_its_level() -> None:
    draw = np.random.default_rng(0)
    documents, doses = [100, 100, 100, 100], [0, 1, 4, 16]
    p_values = []
    for _ in range(1000):
        trend = compute_trend(draw.binomial(documents, 0.2).tolist(), documents, doses)
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
