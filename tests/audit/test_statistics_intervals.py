"""Shares against published examples, SciPy and a plain loop."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, special, stats

from memguard.audit.statistics import (
    clopper_pearson,
    compute_difference,
    compute_exact_interval,
    compute_paired_interval,
    compute_paired_rates,
    compute_rate,
    num_needed_to_see,
)
from memguard.records import Texts

_COUNTS = st.integers(2, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


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


def test_rate_of_copies_keeps_its_counts_and_names_its_texts() -> None:
    # Two texts of four copies each, and 31 others; 18 of these match.
    clusters = [0] * 4 + [1] * 4 + list(range(2, 33))
    matched = [1] * 26 + [0] * 13
    rate = compute_rate(matched, clusters)
    assert (rate.num_matched, rate.num_documents, rate.rate) == (26, 39, 26 / 39)
    number = 39**2 / (2 * 4**2 + 31)
    assert rate.texts == Texts(num_texts=33, num_matched=20, num_effective=number)
    # As SciPy's beta quantiles have it, of real counts.
    k, rest = number * 26 / 39, number * 13 / 39
    expected = (stats.beta.ppf(0.025, k, rest + 1), stats.beta.ppf(0.975, k + 1, rest))
    assert rate.ci == pytest.approx(expected)
    assert rate.ci == pytest.approx((0.4475, 0.8432), abs=5e-5)
    assert compute_rate(matched, list(range(39))) == clopper_pearson(26, 39)
    assert compute_rate(matched) == clopper_pearson(26, 39)
    # Everything four times is what it is once.
    once, copied = clopper_pearson(3, 10), compute_rate(([1] * 3 + [0] * 7) * 4, [*range(10)] * 4)
    assert copied.ci == pytest.approx(once.ci)
    other = clopper_pearson(1, 12)
    assert compute_difference(copied, other).ci == pytest.approx(compute_difference(once, other).ci)
    single = compute_rate([1, 1, 0], [5, 5, 5])
    assert (single.rate, single.ci) == (2 / 3, None)
    with pytest.raises(AssertionError, match="none is missing"):
        compute_rate([1.0, math.nan])


_MATCHES = st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 9)), max_size=24)


@given(_MATCHES, _MATCHES)
def test_every_interval_holds_its_estimate_and_stays_in_its_range(
    documents: list[tuple[bool, bool, int]], others: list[tuple[bool, bool, int]]
) -> None:
    first, second, clusters = ([row[n] for row in documents] for n in range(3))
    ones = compute_rate(first, clusters)
    control = compute_rate([row[0] for row in others], [row[2] for row in others])
    found = [
        (ones.rate, ones.ci, 0.0),
        *(
            (interval.value, interval.ci, -1.0)
            for interval in (
                compute_difference(ones, control),
                compute_paired_rates(first, second, clusters=clusters),
            )
            if interval is not None
        ),
    ]
    for value, ci, lowest in found:
        assert (ci is None) or lowest <= ci[0] <= value <= ci[1] <= 1
        assert (ci is None) or ci[0] < ci[1], "a zero-width interval claims certainty"
    if len(set(clusters)) > 1:
        assert ones.ci is not None


def _invert_score_test(b: int, c: int, n: int) -> tuple[float, float]:
    """Return the ends of Tango's interval, with the likelihood maximised by a search.

    The statistic is (b - c - n d) / sqrt(n (p + q - d^2)), with p - q = d.
    """

    def is_rejected(d: float) -> bool:
        def lose(q: float) -> float:
            return -float(
                special.xlogy(b, q + d)
                + special.xlogy(c, q)
                + special.xlogy(n - b - c, 1 - 2 * q - d)
            )

        found = optimize.minimize_scalar(
            lose, bounds=(max(0.0, -d), (1 - d) / 2), method="bounded", options={"xatol": 1e-12}
        )
        q = float(found.x)
        return abs(b - c - n * d) > stats.norm.ppf(0.975) * math.sqrt(n * (2 * q + d - d * d))

    ends = []
    for inside, outside in (((b - c) / n, -1.0), ((b - c) / n, 1.0)):
        for _ in range(30):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if is_rejected(middle) else (middle, outside)
        ends.append(inside)
    return ends[0], ends[1]


@pytest.mark.parametrize(("b", "c", "n"), [(12, 9, 50), (1, 7, 12), (20, 1, 25), (3, 3, 40)])
def test_paired_rates_invert_tangos_test(b: int, c: int, n: int) -> None:
    # The search finds a maximum to the square root of a float's precision.
    expected = pytest.approx(_invert_score_test(b, c, n), abs=1e-5)
    assert compute_paired_interval(b, c, n, n) == expected
    first = [1] * b + [0] * c + [1] * (n - b - c)
    second = [0] * b + [1] * c + [1] * (n - b - c)
    found = compute_paired_rates(first, second)
    assert (found.value, found.ci) == ((b - c) / n, compute_paired_interval(b, c, n, n))
    mirrored = compute_paired_rates(second, first)
    assert mirrored.ci == pytest.approx((-found.ci[1], -found.ci[0]))
    # Everything three times is what it is once.
    copied = compute_paired_rates(first * 3, second * 3, clusters=[*range(n)] * 3)
    assert copied.ci == pytest.approx(found.ci)


def test_paired_rates_are_joined_with_the_exact_interval_at_an_edge() -> None:
    # 24 of 25 match under the first only, and none under the second only: the exact interval is
    # .796 to .999. Tango's alone begins at .699 and ends at .993.
    assert compute_paired_interval(24, 0, 25, 25) == pytest.approx((0.6989, 0.9990), abs=5e-5)
    assert compute_paired_interval(0, 24, 25, 25) == pytest.approx((-0.9990, -0.6989), abs=5e-5)
    # All of 25: Tango's is (n - z^2) / (n + z^2) to 1.
    assert compute_paired_interval(25, 0, 25, 25) == pytest.approx((0.7336, 1.0), abs=5e-5)
    # None differs: 0 of 25, in either direction.
    assert compute_paired_interval(0, 0, 25, 25) == pytest.approx((-0.1372, 0.1372), abs=5e-5)
    # Every document differs, 24 of 25 in one direction: 2 b / n - 1.
    low, high = stats.binomtest(24, 25).proportion_ci()
    assert compute_paired_interval(24, 1, 25, 25) == pytest.approx((2 * low - 1, 2 * high - 1))
    assert compute_paired_rates([], []) is None
    assert compute_paired_rates([1, 1], [0, 0], clusters=[3, 3]).ci is None
    with pytest.raises(AssertionError, match="two values"):
        compute_paired_rates([1, 0], [1])


def test_paired_rates_cover() -> None:
    """Exact sums over all counts of 12 documents."""
    n, found = 12, {}
    for b in range(n + 1):
        for c in range(n + 1 - b):
            found[b, c] = compute_paired_interval(b, c, n, n)
    counts = np.array(list(found))
    ends = np.array(list(found.values()))
    rates = np.array([0, 0.1, 0.2, 0.4, 1, 2, 4, 6, 8, 10, 11, 11.6, 11.8, 11.9, 12]) / n
    covered = []
    for p, q in itertools.product(rates, rates):
        if q > p or p + q > 1 + 1e-12:
            continue
        weight = stats.multinomial.pmf(
            np.column_stack([counts, n - counts.sum(1)]), n, [p, q, max(0.0, 1 - p - q)]
        )
        inside = (ends[:, 0] <= p - q + 1e-12) & (p - q <= ends[:, 1] + 1e-12)
        covered.append(weight[inside].sum())
    # .94 and .97; Tango's alone covers .84 near rates of 1.
    assert min(covered) >= 0.93
    assert np.mean(covered) >= 0.95


def test_rates_of_copies_cover() -> None:
    """Exact sums, 40 documents in clusters of four, and as many as there are clusters."""
    number = compute_rate([0] * 40, [*range(10)] * 4).num_effective
    for k in range(11):
        copied = compute_exact_interval(4 * k, 40, number)
        assert copied == pytest.approx(compute_exact_interval(k, 10, 10))
    # Two of them take half of the documents: 20 of 40, the others 1 each.
    sizes = [10, 10, *[1] * 20]
    number = compute_rate([0] * 40, np.repeat(range(22), sizes)).num_effective
    ends = np.array([compute_exact_interval(k, 40, number) for k in range(41)])
    for rate in (0.0025, 0.05, 0.3, 0.5, 0.9, 0.9975):
        few = stats.binom.pmf(np.arange(3), 2, rate)
        weight = np.convolve(
            stats.binom.pmf(np.arange(21), 20, rate), [few[0], *[0] * 9, few[1], *[0] * 9, few[2]]
        )
        inside = (ends[:, 0] <= rate) & (rate <= ends[:, 1])
        assert weight[inside].sum() >= 0.93


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
