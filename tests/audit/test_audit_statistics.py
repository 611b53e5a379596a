"""Intervals against published examples, SciPy and plain loops."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from memguard.audit.statistics import clopper_pearson, compute_auc, compute_difference, compute_mean


@pytest.mark.parametrize(
    ("num_matched", "low", "high"),
    [(0, 0, 0.0362), (10, 0.0490, 0.1762), (18, 0.1103, 0.2695), (100, 0.9638, 1)],
)
def test_clopper_pearson_golden(num_matched: int, low: float, high: float) -> None:
    rate = clopper_pearson(num_matched, 100)
    assert rate.rate == num_matched / 100
    assert rate.ci == pytest.approx((low, high), abs=5e-5)  # printed with four digits


@given(st.integers(2, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_clopper_pearson_equals_scipy(counts: tuple[int, int]) -> None:
    expected = stats.binomtest(*counts).proportion_ci(0.95, "exact")
    # SciPy inverts the distribution function by root finding, to about 1e-12.
    assert clopper_pearson(*counts).ci == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_clopper_pearson_of_few() -> None:
    nothing, one = clopper_pearson(0, 0), clopper_pearson(1, 1)
    assert (nothing.rate, nothing.ci) == (None, None)
    assert (one.rate, one.ci) == (1.0, None)


@pytest.mark.parametrize(
    ("first", "second", "low", "high"),
    [  # Newcombe 1998, table II, method 10
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((6, 7), (2, 7), 0.0582, 0.8062),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((0, 10), (0, 20), -0.1611, 0.2775),
        ((10, 10), (0, 20), 0.6791, 1),
        ((10, 10), (0, 10), 0.6075, 1),
    ],
)
def test_difference_published(
    first: tuple[int, int], second: tuple[int, int], low: float, high: float
) -> None:
    ones, others = clopper_pearson(*first), clopper_pearson(*second)
    difference, mirrored = compute_difference(ones, others), compute_difference(others, ones)
    assert difference is not None
    assert mirrored is not None
    assert difference.value == pytest.approx(first[0] / first[1] - second[0] / second[1])
    assert difference.ci == pytest.approx((low, high), abs=5e-5)  # printed with four digits
    assert mirrored.ci == pytest.approx((-high, -low), abs=5e-5)


def test_difference_of_few() -> None:
    assert compute_difference(clopper_pearson(1, 2), clopper_pearson(0, 0)) is None
    single = compute_difference(clopper_pearson(1, 2), clopper_pearson(0, 1))
    assert single is not None
    assert (single.value, single.ci) == (0.5, None)


def test_mean_equals_scipy() -> None:
    values = np.random.default_rng(0).normal(size=17).tolist()
    interval = compute_mean(values)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert interval is not None
    assert interval.value == pytest.approx(np.mean(values))
    assert interval.ci == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_mean_claims_no_certainty() -> None:
    assert compute_mean([]) is None
    for values in ([0.5], [1.0, 1.0, 1.0]):
        interval = compute_mean(values)
        assert interval is not None
        assert (interval.value, interval.ci) == (values[0], None)
    bounded = compute_mean([0.2, 1.0, 1.0], bounds=(0, 1))
    assert bounded is not None
    assert bounded.ci == (0, 1)


_scores = st.lists(st.integers(-4, 4).map(float), min_size=2, max_size=12)


@given(_scores, _scores)
def test_auc_equals_pair_counting(members: list[float], nonmembers: list[float]) -> None:
    pairs = [(x > y) + 0.5 * (x == y) for x, y in itertools.product(members, nonmembers)]
    interval = compute_auc(members, nonmembers)
    mirrored = compute_auc(nonmembers, members)
    # Sums of halves are exact; only the two divisions round.
    assert interval.value == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert interval.value + mirrored.value == pytest.approx(1, abs=1e-12)
    assert interval.ci is not None
    assert mirrored.ci is not None
    assert 0 <= interval.ci[0] <= interval.value <= interval.ci[1] <= 1
    assert interval.ci[0] < interval.ci[1], "a zero-width interval claims certainty"
    # The fallback's roots are found to about 1e-12.
    assert interval.ci == pytest.approx((1 - mirrored.ci[1], 1 - mirrored.ci[0]), abs=1e-9)


def test_auc_delong_by_hand() -> None:
    members, nonmembers = [3.0, 5.0, 2.0], [1.0, 4.0]
    # Wins of each member over the nonmembers: 1/2, 1, 1/2; of each nonmember the losses: 1, 1/3.
    variance = np.var([0.5, 1, 0.5], ddof=1) / 3 + np.var([1, 1 / 3], ddof=1) / 2
    auc = 4 / 6
    reach = stats.norm.ppf(0.975) * math.sqrt(variance) / (auc * (1 - auc))
    centre = math.log(auc / (1 - auc))
    expected = tuple(1 / (1 + math.exp(-(centre + sign * reach))) for sign in (-1, 1))
    interval = compute_auc(members, nonmembers)
    assert interval.value == pytest.approx(auc)
    assert interval.ci == pytest.approx(expected)


@pytest.mark.parametrize(("size", "low"), [(2, 0.386), (5, 0.643), (40, 0.950)])
def test_auc_perfect_separation_is_no_certainty(size: int, low: float) -> None:
    above, below = np.arange(size) + 100.0, np.arange(size)
    interval = compute_auc(above, below)
    assert interval.value == 1
    assert interval.ci is not None
    assert interval.ci[1] == 1
    # The lower bound is the AUC at which a perfect result lies 1.96 deviations away.
    assert interval.ci[0] == pytest.approx(low, abs=1e-3)
    theta, mean = interval.ci[0], size
    shape = (1 - theta) / (2 - theta) + theta / (1 + theta)
    deviation = math.sqrt(theta * (1 - theta) / size**2 * (1 + (mean - 1) * shape))
    assert (1 - theta) / deviation == pytest.approx(1.959964, abs=1e-4)


def test_auc_interval_covers() -> None:
    draw, truth = np.random.default_rng(0), stats.norm.cdf(2.5 / math.sqrt(2))
    covered = 0
    for _ in range(400):
        ci = compute_auc(draw.normal(2.5, 1, 30), draw.normal(0, 1, 30)).ci
        assert ci is not None
        covered += ci[0] <= truth <= ci[1]
    # 95 % of 400 is 380 with a standard deviation of 4.4; an asymptotic interval may lack 2 points.
    assert covered >= 360
