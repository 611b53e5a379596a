"""Means against SciPy, a jackknife written as a loop and a truth that is known."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import special, stats

from memguard.audit.statistics import (
    compute_mean,
    compute_mean_difference,
    compute_paired_difference,
)
from memguard.records import Interval

NUM_TOKENS = 50


@given(st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=2, max_size=30))
def test_mean_without_clusters_is_students(values: list[float]) -> None:
    interval = compute_mean(np.array(values))
    assert interval == compute_mean(values)
    # Values are at most 1: rounding of the sums stays far below this.
    assert interval.value == pytest.approx(np.mean(values), abs=1e-12)
    if interval.ci is None:
        # Differences that rounding could make are none, and those whose squares are 0.
        spread = max(values) - min(values)
        assert spread <= max(1e-10 * max(map(abs, values)), 1e-150)
        return
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    expected = (np.mean(values) - half, np.mean(values) + half)
    # t(1) is 12.7, by which a jackknife's rounding is multiplied.
    assert interval.ci == pytest.approx(expected, abs=1e-10)


def test_mean_by_hand() -> None:
    # Mean 0, standard error 1, t(1) at 97.5 % is tan(0.475 pi).
    two = compute_mean([-1.0, 1.0])
    assert two.ci == pytest.approx((-np.tan(0.475 * np.pi), np.tan(0.475 * np.pi)))
    # Shares .25 and .75: their logits are -log 3 and log 3, the mean's 0, so the error is log 3.
    share = compute_mean([0.25, 0.75], (0, 1))
    reach = float(np.tan(0.475 * np.pi) * np.log(3))
    assert share.ci == pytest.approx((special.expit(-reach), special.expit(reach)))


@pytest.mark.parametrize("bounds", [None, (0.0, 1.0), (-1.0, 3.0)])
def test_jackknife_over_clusters_against_a_plain_loop(bounds: tuple[float, float] | None) -> None:
    draw = np.random.default_rng(0)
    names = np.repeat(list("abcdefghij"), draw.integers(1, 6, size=10))
    values = draw.uniform(0.05, 0.95, size=len(names))

    def scale(mean: float) -> float:
        if bounds is None:
            return mean
        share = (mean - bounds[0]) / (bounds[1] - bounds[0])
        return math.log(share / (1 - share))

    squares, sizes = [], []
    for name in np.unique(names):
        squares.append((scale(values[names != name].mean()) - scale(values.mean())) ** 2)
        sizes.append(float((names == name).sum()))
    variance = 9 / 10 * sum(squares)
    freedom = sum(c**2 for c in sizes) ** 2 / sum(c**4 for c in sizes) - 1
    reach = stats.t.ppf(0.975, freedom) * math.sqrt(variance)
    ends = [scale(values.mean()) - reach, scale(values.mean()) + reach]
    if bounds is not None:
        ends = [bounds[0] + (bounds[1] - bounds[0]) / (1 + math.exp(-end)) for end in ends]
    interval = compute_mean(values, bounds, names)
    assert interval.value == pytest.approx(values.mean())
    assert interval.ci == pytest.approx(tuple(ends))


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=16),
    st.sampled_from([None, (0.0, 1.0)]),
)
def test_an_interval_holds_its_mean_or_is_not_there(
    documents: list[tuple[int, int]], bounds: tuple[float, float] | None
) -> None:
    shares = [right / NUM_TOKENS for right, _ in documents]
    interval = compute_mean(shares, bounds, [cluster for _, cluster in documents])
    if not documents:
        assert interval is None
        return
    assert interval.value == pytest.approx(np.mean(shares), abs=1e-12)
    if len({cluster for _, cluster in documents}) < 2:
        assert interval.ci is None
    if bounds is None and len(set(shares)) == 1:
        assert interval.ci is None
    if interval.ci is not None:
        assert interval.ci[0] < interval.ci[1], "a zero-width interval claims certainty"
        assert interval.ci[0] <= interval.value <= interval.ci[1]
        assert bounds is None or (interval.ci[0] >= 0 and interval.ci[1] <= 1)


def test_what_cannot_be_known_has_no_interval() -> None:
    assert compute_mean([]) is None
    cases: list[tuple[list[float], list[int] | None]] = [
        ([0.5], None),
        ([0.0, 1.0], [7, 7]),
        # One of three outweighs the one beside it: less than two clusters in effect.
        ([0.0, 1.0, 1.0], [1, 1, 2]),
    ]
    for values, clusters in cases:
        for bounds in (None, (0.0, 1.0)):
            interval = compute_mean(values, bounds, clusters)
            assert interval.value == pytest.approx(np.mean(values))
            assert interval.ci is None


def test_equal_clusters_leave_room_for_one_that_differs() -> None:
    cases: list[tuple[list[float], list[int] | None, int]] = [
        ([1.0, 1.0, 1.0], None, 3),
        ([0.1] * 30, None, 30),
        # Clusters that are alike, whatever their documents.
        ([0.0, 1.0, 1.0, 0.0], [1, 1, 2, 2], 2),
    ]
    for values, clusters, number in cases:
        assert compute_mean(values, None, clusters).ci is None
        interval = compute_mean(values, (0.0, 1.0), clusters)
        # P(none of so many differs) is 0.025 at this rate of those that do.
        rate = 1 - 0.025 ** (1 / number)
        value = np.mean(values)
        assert interval.ci == pytest.approx((value * (1 - rate), value + (1 - value) * rate))
    assert compute_mean([0.0] * 40, (0, 1)).ci == pytest.approx(
        stats.binomtest(0, 40).proportion_ci(), abs=1e-9
    )


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 6)), max_size=12),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=8),
)
def test_differences_stay_in_their_range(
    documents: list[tuple[int, int, int]], others: list[tuple[int, int]]
) -> None:
    clusters = [cluster for _, _, cluster in documents]
    first, second = ([row[n] / 5 for row in documents] for n in (0, 1))
    paired = compute_paired_difference(first, second, bounds=(0, 1), clusters=clusters)
    apart = compute_mean_difference(
        first,
        [value / 5 for value, _ in others],
        bounds=(0, 1),
        first_clusters=clusters,
        second_clusters=[cluster for _, cluster in others],
    )
    for interval in (paired, apart):
        if interval is not None and interval.ci is not None:
            low, high = interval.ci
            assert -1 <= low <= interval.value <= high <= 1
            assert low < high, "a zero-width interval claims certainty"


def test_difference_between_bounds_is_from_the_two_intervals() -> None:
    draw = np.random.default_rng(0)
    first, second = draw.beta(3, 1, 30), draw.beta(1, 3, 26)
    one, other = compute_mean(first, (0, 1)), compute_mean(second, (0, 1))
    interval = compute_mean_difference(first, second, bounds=(0, 1))
    value = first.mean() - second.mean()
    assert interval.value == pytest.approx(value)
    assert interval.ci == pytest.approx(
        (
            value - math.hypot(first.mean() - one.ci[0], other.ci[1] - second.mean()),
            value + math.hypot(one.ci[1] - first.mean(), second.mean() - other.ci[0]),
        )
    )
    # All are at the bounds: the difference is at its own, and still has an interval.
    ends = compute_mean_difference([1.0] * 30, [0.0] * 30, bounds=(0, 1))
    rate = 1 - 0.025 ** (1 / 30)
    assert ends.ci == pytest.approx((1 - math.hypot(rate, rate), 1))


def test_change_of_bounded_values_is_the_mean_between_minus_and_plus_their_span() -> None:
    draw = np.random.default_rng(0)
    first, second = draw.uniform(0, 50, 30), draw.uniform(0, 20, 30)
    change = compute_paired_difference(first, second, bounds=(0, 50))
    assert change == compute_mean(first - second, (-50, 50))
    # Near the bound Student's interval leaves it.
    first = np.array([50.0] * 27 + [20.0] * 3)
    nothing = np.zeros(30)
    assert compute_paired_difference(first, nothing).ci[1] > 50
    assert compute_paired_difference(first, nothing, bounds=(0, 50)).ci[1] < 50


def test_a_single_cluster_away_from_the_bound_excludes_nothing_towards_it() -> None:
    rare = compute_mean([0.0] * 39 + [0.4], (0, 1))
    assert rare.ci[0] == 0
    # Of 40 documents in which 1 differs, up to 5.6 times as many may (Poisson, exact).
    assert 5.6 * rare.value < rare.ci[1] < 10 * rare.value
    mirrored = compute_mean([1.0] * 39 + [0.6], (0, 1))
    assert mirrored.ci == pytest.approx((1 - rare.ci[1], 1.0))


def test_one_bound_ends_students_interval() -> None:
    values = [-0.01] * 9 + [-1.0]
    free, ended = compute_mean(values), compute_mean(values, (-math.inf, 0.0))
    assert free.ci[1] > 0
    assert ended == Interval(value=free.value, ci=(free.ci[0], 0.0))
    assert compute_mean([-1.0, -1.0], (-math.inf, 0.0)).ci is None
    # A difference of two such values has no bound.
    zeros = [0.0] * 10
    paired = compute_paired_difference(values, zeros, bounds=(-math.inf, 0.0))
    apart = compute_mean_difference(values, zeros, bounds=(-math.inf, 0.0))
    assert paired == free
    assert apart == compute_mean_difference(values, zeros)


def test_lists_of_other_lengths_and_missing_values_are_refused() -> None:
    with pytest.raises(AssertionError, match="each document needs one cluster"):
        compute_mean([1.0, 2.0], clusters=[0])
    with pytest.raises(AssertionError, match="missing value"):
        compute_mean([1.0, math.nan])
    with pytest.raises(AssertionError, match="outside its bounds"):
        compute_mean([1.0, 2.0], (0, 1))


def test_difference_is_welchs() -> None:
    draw = np.random.default_rng(0)
    first, second = draw.normal(1, 1, 12), draw.normal(0, 3, 7)
    interval = compute_mean_difference(first, second)
    expected = stats.ttest_ind(first, second, equal_var=False).confidence_interval()
    assert interval.value == pytest.approx(first.mean() - second.mean())
    assert interval.ci == pytest.approx((expected.low, expected.high))
    # Copies of everything are no further evidence.
    copied = compute_mean_difference(
        np.repeat(first, 3),
        np.repeat(second, 2),
        first_clusters=np.repeat(np.arange(12), 3),
        second_clusters=np.repeat(np.arange(7), 2),
    )
    assert copied.ci == pytest.approx(interval.ci)


def test_difference_to_values_that_are_all_equal() -> None:
    # All error is the first one's.
    some = [0.1, 0.4, 0.9]
    interval, alone = compute_mean_difference(some, [0.0] * 8), compute_mean(some)
    assert interval.value == alone.value
    assert interval.ci == pytest.approx(alone.ci)
    both = compute_mean_difference([1.0, 1.0], [0.0] * 8)
    assert both == Interval(value=1.0, ci=None)
    assert compute_mean_difference(some, []) is None
    assert compute_mean_difference([3.0], [0.0, 1.0]) == Interval(value=2.5, ci=None)


def _draw_shares(
    draw: np.random.Generator, *, num_documents: int, mean: float, clustered: bool, num_draws: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return ``[num_draws, num_documents]`` shares of right tokens, and the documents' clusters.

    Beta-binomial with a + b = 2: rates of documents have a standard deviation of
    sqrt(mean (1 - mean) / 3), and most lie near 0 or 1 where the mean does. Documents of a cluster
    have one rate: their shares are correlated by .96.
    """
    in_fours = num_documents // 8 if clustered else 0
    sizes = [4] * in_fours + [1] * (num_documents - 4 * in_fours)
    cluster_D = np.repeat(np.arange(len(sizes)), sizes)
    rates = draw.beta(2 * mean, 2 * (1 - mean), size=(num_draws, len(sizes)))
    return draw.binomial(NUM_TOKENS, rates[:, cluster_D]) / NUM_TOKENS, cluster_D


def _compute_coverage(
    *, num_documents: int, mean: float, clustered: bool, num_draws: int
) -> dict[str, float]:
    draw = np.random.default_rng(17)
    shares, cluster_D = _draw_shares(
        draw, num_documents=num_documents, mean=mean, clustered=clustered, num_draws=num_draws
    )
    covered = {"clusters": 0, "documents": 0}
    for share_D in shares:
        for name, clusters in (("clusters", cluster_D), ("documents", None)):
            interval = compute_mean(share_D, (0, 1), clusters)
            # No interval is none that covers.
            covered[name] += interval.ci is not None and (interval.ci[0] <= mean <= interval.ci[1])
    return {name: count / num_draws for name, count in covered.items()}


NOMINAL = {16: 0.92, 40: 0.935}
CASES = [
    (num_documents, clustered, mean)
    for num_documents in NOMINAL
    for clustered in (False, True)
    for mean in (0.1, 0.5, 0.9)
]


@pytest.mark.parametrize(("num_documents", "clustered", "mean"), CASES)
def test_intervals_of_means_cover_in_few_draws(
    num_documents: int, clustered: bool, mean: float
) -> None:
    num_draws = 300
    coverage = _compute_coverage(
        num_documents=num_documents, mean=mean, clustered=clustered, num_draws=num_draws
    )
    # Of an interval that covers as often as the bar says, 1 set of 1,000 draws falls below this:
    # .867 and .887. One that takes copies for documents of their own covers .70 to .80.
    bar = stats.binom.ppf(0.001, num_draws, NOMINAL[num_documents]) / num_draws
    assert coverage["clusters"] >= bar
    if clustered:
        assert coverage["documents"] < bar


def test_intervals_of_differences_cover_in_few_draws() -> None:
    draw, covered, num_draws = np.random.default_rng(5), 0, 300
    ones, cluster_D = _draw_shares(
        draw, num_documents=40, mean=0.3, clustered=True, num_draws=num_draws
    )
    others, _ = _draw_shares(draw, num_documents=40, mean=0.1, clustered=True, num_draws=num_draws)
    for one_D, other_D in zip(ones, others, strict=True):
        interval = compute_mean_difference(
            one_D, other_D, first_clusters=cluster_D, second_clusters=cluster_D
        )
        covered += interval.ci[0] <= 0.2 <= interval.ci[1]
    # .96 in 4,000 draws; 1 set of 1,000 of a method that covers .95 falls below.
    assert covered >= stats.binom.ppf(0.001, num_draws, 0.95)
