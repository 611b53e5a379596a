"""The one-run bound against published code's numbers, plain loops and exact coverage."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from memguard.audit.privacy import (
    ASSUMPTIONS,
    compute_epsilon_bound,
    compute_one_run_bound,
    compute_p_value,
    count_right,
    guess_members,
)

_cases = st.integers(1, 200).flatmap(
    lambda m: st.integers(1, m).flatmap(
        lambda r: st.tuples(st.just(m), st.just(r), st.integers(0, r))
    )
)
_deltas = st.sampled_from([0.0, 1e-8, 1e-5, 1e-3, 0.1])


@pytest.mark.parametrize(
    ("num_canaries", "num_guesses", "num_right", "delta", "expected"),
    [  # The formula as ml_privacy_meter has it in audit.py, p = 0.05
        (100, 100, 100, 0, 3.49297),
        (1000, 100, 90, 0, 1.63082),
        (1000, 100, 90, 1e-5, 1.62614),
        (5000, 1000, 800, 1e-5, 1.25258),
        (200, 64, 40, 1e-5, 0.05844),
    ],
)
def test_bound_golden(
    num_canaries: int, num_guesses: int, num_right: int, delta: float, expected: float
) -> None:
    bound = compute_epsilon_bound(num_canaries, num_guesses, num_right, delta=delta)
    assert bound == pytest.approx(expected, abs=5e-6)  # printed with five decimals


def test_bound_of_perfect_guesses_by_hand() -> None:
    # All r right without delta: q^r = 0.05.
    q = 0.05 ** (1 / 100)
    assert compute_epsilon_bound(100, 100, 100) == pytest.approx(math.log(q / (1 - q)), abs=1e-8)


@given(_cases, st.floats(0, 8), _deltas)
def test_p_value_by_a_plain_loop(case: tuple[int, int, int], epsilon: float, delta: float) -> None:
    m, r, v = case
    binomial = stats.binom(r, 1 / (1 + math.exp(-epsilon)))
    beta = binomial.sf(v - 1)
    shares = binomial.pmf(np.arange(r + 1))
    alpha = max((shares[max(0, v - i) : v].sum() / i for i in range(1, m + 1)), default=0.0)
    expected = min(1.0, beta + 2 * m * alpha * delta)
    # Two ways to the same binomial: log-gamma functions of 200 are good to about 1e-13.
    assert compute_p_value(epsilon, m, r, v, delta) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(_cases, _deltas)
def test_p_value_rises_with_epsilon(case: tuple[int, int, int], delta: float) -> None:
    """Else what is refuted would not be one stretch, and bisection might miss its end."""
    p_values = [compute_p_value(float(e), *case, delta) for e in np.linspace(0, 12, 60)]
    assert (np.diff(p_values) >= -1e-12).all()


@settings(max_examples=50)
@given(_cases, _deltas)
def test_bound_is_the_largest_refuted(case: tuple[int, int, int], delta: float) -> None:
    bound = compute_epsilon_bound(*case, delta=delta)
    assert compute_p_value(bound + 1e-8, *case, delta) >= 0.05
    assert bound == 0 or compute_p_value(bound, *case, delta) < 0.05
    # A larger delta and fewer right guesses never show more.
    assert compute_epsilon_bound(*case, delta=min(1.0, 2 * delta + 1e-6)) <= bound
    m, r, v = case
    if v:
        assert compute_epsilon_bound(m, r, v - 1, delta=delta) <= bound + 1e-9


@pytest.mark.parametrize(
    ("epsilon", "num_guesses"), [(0.0, 20), (0.5, 20), (0.0, 200), (0.5, 200), (2.0, 200)]
)
def test_bound_holds_at_95_percent(epsilon: float, num_guesses: int) -> None:
    """Randomised response is exactly epsilon-private: each coin is told with probability q."""
    right = np.arange(num_guesses + 1)
    chance = stats.binom.pmf(right, num_guesses, 1 / (1 + math.exp(-epsilon)))
    too_high = [compute_epsilon_bound(num_guesses, num_guesses, int(v)) > epsilon for v in right]
    failure = chance[np.array(too_high)].sum()
    assert 0.005 < failure <= 0.05, "the bound fails too often, or never comes near"


def test_nothing_shown_is_zero() -> None:
    assert compute_epsilon_bound(0, 0, 0) == 0
    assert compute_epsilon_bound(100, 0, 0) == 0
    assert compute_epsilon_bound(100, 100, 50) == 0
    assert compute_epsilon_bound(100, 100, 0) == 0
    # With a delta this large perfect guesses prove nothing.
    assert compute_epsilon_bound(100, 100, 100, delta=1.0) == 0


def test_many_canaries_stay_exact() -> None:
    bound = compute_epsilon_bound(100_000, 100_000, 75_000, delta=1e-7)
    # ln 3 = 1.0986 less 1.6 standard errors of 0.0073.
    assert bound == pytest.approx(math.log(3) - 1.645 * math.sqrt(16 / 3 / 100_000), abs=2e-3)


def test_guesses_by_hand() -> None:
    scores = [0.2, 0.9, 0.5, -1.0, 0.7]
    assert guess_members(scores).tolist() == [-1, 1, 1, -1, 1]
    assert guess_members(scores, 4).tolist() == [-1, 1, 0, -1, 1]
    assert guess_members(scores, 1).tolist() == [0, 1, 0, 0, 0]
    assert guess_members(scores, 0).tolist() == [0] * 5
    assert guess_members([]).tolist() == []
    # Equal scores: the first as the highest.
    assert guess_members([1, 1, 1, 1]).tolist() == [1, 1, -1, -1]
    assert guess_members([1, 1, 1, 1], 2).tolist() == [1, 0, 0, -1]


def test_right_guesses_by_hand() -> None:
    assert count_right([1, -1, 0, 1, -1], [True, False, True, False, True]) == 2
    assert count_right([], []) == 0


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=40), st.data())
def test_one_run_from_scores(canaries: list[tuple[int, bool]], data: st.DataObject) -> None:
    scores, coins = [float(s) for s, _ in canaries], [coin for _, coin in canaries]
    num_guesses = data.draw(st.none() | st.integers(0, len(canaries)))
    bound = compute_one_run_bound(scores, coins, num_guesses=num_guesses, delta=1e-5)
    assert bound is not None
    assert bound.num_canaries == len(canaries)
    assert bound.num_guesses == (len(canaries) if num_guesses is None else num_guesses)
    guesses = guess_members(scores, num_guesses)
    highest_out = max((s for s, g in zip(scores, guesses, strict=True) if g == -1), default=-4)
    lowest_in = min((s for s, g in zip(scores, guesses, strict=True) if g == 1), default=4)
    assert highest_out <= lowest_in
    assert bound.num_right == sum(
        (g == 1 and coin) or (g == -1 and not coin) for g, coin in zip(guesses, coins, strict=True)
    )
    assert bound.epsilon == compute_epsilon_bound(
        bound.num_canaries, bound.num_guesses, bound.num_right, delta=1e-5
    )


def test_a_leak_is_found_and_none_is_not() -> None:
    draw = np.random.default_rng(0)
    coins = draw.random(400) < 0.5
    assert compute_one_run_bound([], []) is None
    silent = compute_one_run_bound(draw.normal(size=400), coins)
    loud = compute_one_run_bound(draw.normal(size=400) + 3 * coins, coins)
    backwards = compute_one_run_bound(-draw.normal(size=400) - 3 * coins, coins)
    assert silent is not None
    assert loud is not None
    assert backwards is not None
    assert silent.epsilon == 0
    assert loud.epsilon > 1.5
    # Higher must mean trained: the other way round nothing is shown.
    assert backwards.epsilon == 0


def test_what_must_not_be_asked() -> None:
    with pytest.raises(AssertionError, match="5 guesses at 4"):
        guess_members([1.0] * 4, 5)
    with pytest.raises(AssertionError, match="missing score"):
        guess_members([math.nan, 1.0])
    with pytest.raises(AssertionError, match="one guess and one coin"):
        count_right([1, -1], [True])
    with pytest.raises(AssertionError, match="3 right of 2"):
        compute_epsilon_bound(4, 2, 3)
    with pytest.raises(AssertionError, match="delta"):
        compute_epsilon_bound(4, 2, 1, delta=-1e-5)


def test_assumptions_can_be_printed() -> None:
    text = " ".join(ASSUMPTIONS)
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in ASSUMPTIONS)
    for word in ("coin", "repetitions", "One training run", "fixed before", "95 %", "lower bound"):
        assert word in text
