"""Shares against published examples, SciPy and a plain loop."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from memguard.audit.statistics import clopper_pearson, compute_difference, num_needed_to_see

_COUNTS = st.integers(2, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(
    ("num_matched", "low", "high"),
    [(0, 0, 0.0362), (10, 0.0490, 0.1762), (18, 0.1103, 0.2695), (100, 0.9638, 1)],
)
def test_clopper_pearson_golden(num_matched: int, low: float, high: float) -> None:
    rate = clopper_pearson(num_matched, 100)
    assert rate.rate == num_matched / 100
    assert rate.ci == pytest.approx((low, high), abs=5e-5)  # printed with four digits


@given(_COUNTS)
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
    assert difference.value == pytest.approx(first[0] / first[1] - second[0] / second[1])
    assert difference.ci == pytest.approx((low, high), abs=5e-5)  # printed with four digits
    assert mirrored.ci == pytest.approx((-high, -low), abs=5e-5)


def test_difference_of_few() -> None:
    assert compute_difference(clopper_pearson(1, 2), clopper_pearson(0, 0)) is None
    single = compute_difference(clopper_pearson(1, 2), clopper_pearson(0, 1))
    assert (single.value, single.ci) == (0.5, None)


@given(_COUNTS, _COUNTS)
def test_difference_equals_scipys_score_intervals(
    first: tuple[int, int], second: tuple[int, int]
) -> None:
    (p1, low_1, high_1), (p2, low_2, high_2) = (
        (found.statistic, *found.proportion_ci(0.95, "wilson"))
        for found in (stats.binomtest(*counts) for counts in (first, second))
    )
    expected = (
        p1 - p2 - math.hypot(p1 - low_1, high_2 - p2),
        p1 - p2 + math.hypot(high_1 - p1, p2 - low_2),
    )
    difference = compute_difference(clopper_pearson(*first), clopper_pearson(*second))
    # Both round a handful of operations on numbers near 1.
    assert difference.ci == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("rate", "power", "expected"),
    [
        (0.05, 0.95, 59),  # log(0.05) / log(0.95) = 58.4
        (0.5, 0.75, 2),  # exactly 1 - 1/4: not rounded up
        (0.1, 0.19, 2),  # exactly 1 - 0.81
        (0.1, 0.271, 3),  # exactly 1 - 0.729
        (0.9, 0.5, 1),
        (1.0, 0.999, 1),
        (0.0, 0.95, None),
        (1e-12, 0.95, 2995732273553),  # 1e12 ln 20 - ln 20 / 2, by 30 digits
    ],
)
def test_num_needed_golden(rate: float, power: float, expected: int | None) -> None:
    assert num_needed_to_see(rate, power) == expected


@given(st.integers(1, 99), st.integers(1, 99))
def test_num_needed_is_the_smallest_that_suffices(rate_percent: int, power_percent: int) -> None:
    # 1 - (1 - a/100)^n >= p/100 in integers: (100 - p) 100^n >= 100 (100 - a)^n.
    def suffices(n: int) -> bool:
        return (100 - power_percent) * 100**n >= 100 * (100 - rate_percent) ** n

    found = num_needed_to_see(rate_percent / 100, power_percent / 100)
    assert found is not None
    assert suffices(found)
    assert found == 1 or not suffices(found - 1)
