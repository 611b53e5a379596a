"""Paired tests against scipy, hand-computed cases and brute force."""

import itertools
from fractions import Fraction
from math import comb
from pathlib import Path

import numpy as np
import pytest
from compare_examples import write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from memguard.compare import FinishedRun, compare_runs
from memguard.compare.paired import compute_mcnemar, compute_mean_interval, correct_holm
from memguard.records import PairedResult

COUNTS = st.integers(0, 400)
P_VALUES = st.lists(st.floats(0, 1), max_size=12)


@given(COUNTS, COUNTS)
def test_mcnemar_is_scipys_binomial_test(first: int, second: int) -> None:
    ours = compute_mcnemar(first, second)
    assert 0 <= ours <= 1
    assert ours == compute_mcnemar(second, first)
    if first + second:
        # Both sum the same binomial terms, in another order: 400 roundings at most.
        assert ours == pytest.approx(
            stats.binomtest(first, first + second, 0.5).pvalue, rel=1e-11, abs=1e-300
        )


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 1), (1, 4), (5, 0), (3, 3), (2, 9)])
def test_mcnemar_by_counting_outcomes(first: int, second: int) -> None:
    """Every way the differing documents could have fallen, by exact fractions."""
    total = first + second
    as_extreme = sum(
        comb(total, k) for k in range(total + 1) if abs(2 * k - total) >= abs(first - second)
    )
    assert compute_mcnemar(first, second) == pytest.approx(
        float(Fraction(as_extreme, 2**total)), rel=1e-14
    )


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


@given(P_VALUES, st.randoms(use_true_random=False))
def test_holm_does_not_depend_on_the_order(p_values: list[float], random) -> None:
    pairs = list(zip(p_values, correct_holm(p_values), strict=True))
    random.shuffle(pairs)
    assert correct_holm([p for p, _ in pairs]) == [a for _, a in pairs]


@given(st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=2, max_size=30))
def test_the_mean_interval_is_scipys(values: list[float]) -> None:
    array = np.array(values)
    interval = compute_mean_interval(array)
    assert interval is not None
    assert interval.ci is not None
    assert interval.value == pytest.approx(array.mean())
    error = float(array.std(ddof=1) / np.sqrt(len(values)))
    # Values are at most 1: rounding of the sums stays far below this.
    half = stats.t.ppf(0.975, len(values) - 1) * error
    assert interval.ci == pytest.approx((array.mean() - half, array.mean() + half), abs=1e-12)


def test_the_mean_interval_of_few() -> None:
    assert compute_mean_interval(np.array([])) is None
    one = compute_mean_interval(np.array([0.5]))
    assert one is not None
    assert (one.value, one.ci) == (0.5, None)
    # By hand: mean 0, standard error 1, t(1) at 97.5 % is tan(0.475 pi).
    two = compute_mean_interval(np.array([-1.0, 1.0]))
    assert two is not None
    assert two.ci == pytest.approx((-np.tan(0.475 * np.pi), np.tan(0.475 * np.pi)))


def pair(*runs: FinishedRun) -> list[PairedResult]:
    return compare_runs(runs, name="x", command="").paired


def test_settings_on_the_same_documents(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain", correct={0: [1, 1], 4: [50] * 6 + [45, 10], 16: [50] * 8})
    other = write_run(
        tmp_path / "other",
        name="other",
        # Verbatim: five lost, one won. Near-verbatim (45 of 50): three lost, one won.
        correct={0: [1, 1], 4: [50, 46, 46, 20, 20, 20, 45, 50], 16: [50] * 8},
    )
    low, high = pair(plain, other)
    assert (low.setting, low.against, low.seed) == ("other", "plain", 0)
    assert (low.num_repetitions, high.num_repetitions) == (4, 16)
    assert low.num_documents == high.num_documents == 8
    assert (low.verbatim.num_only_against, low.verbatim.num_only_setting) == (5, 1)
    assert low.verbatim.p_value == pytest.approx(2 * 7 / 64)
    assert low.verbatim.p_holm == pytest.approx(4 * 2 * 7 / 64)
    assert (low.near_verbatim.num_only_against, low.near_verbatim.num_only_setting) == (3, 1)
    assert low.near_verbatim.p_value == pytest.approx(2 * 5 / 16)
    assert low.near_verbatim.p_holm == 1.0
    assert (high.verbatim.num_only_against, high.verbatim.num_only_setting) == (0, 0)
    assert high.verbatim.p_value == 1.0
    difference = np.array([0, -4, -4, -30, -30, -30, 0, 40]) / 50
    expected = stats.ttest_1samp(difference, 0).confidence_interval(0.95)
    assert low.token_accuracy_difference is not None
    assert low.token_accuracy_difference.value == pytest.approx(difference.mean())
    assert low.token_accuracy_difference.ci == pytest.approx((expected.low, expected.high))
    assert high.token_accuracy_difference is not None
    assert high.token_accuracy_difference.ci == (0.0, 0.0)


def test_documents_are_matched_by_id_and_not_by_row(tmp_path: Path) -> None:
    correct = {4: [50, 50, 1, 1, 1, 1]}
    plain = write_run(tmp_path / "plain", correct=correct)
    same = write_run(tmp_path / "same", name="same", correct=correct, reverse_rows=True)
    (result,) = pair(plain, same)
    assert (result.verbatim.num_only_against, result.verbatim.num_only_setting) == (0, 0)


def test_seeds_are_not_pooled_and_doses_must_meet(tmp_path: Path) -> None:
    few = {0: [1, 1], 4: [50, 1]}
    runs = [
        write_run(tmp_path / f"{name}{seed}", name=name, seed=seed, correct=few)
        for name, seed in itertools.product(("plain", "other"), (0, 1))
    ]
    # Trained twice as long: the same bucket under another dose, and a seed that plain lacks.
    longer = {"buckets.1.num_repetitions": 8}
    runs.append(write_run(tmp_path / "l", name="long", correct=few, changes=longer))
    runs.append(write_run(tmp_path / "m", name="more", seed=2, correct=few))
    assert [(p.setting, p.seed, p.num_repetitions) for p in pair(*runs)] == [
        ("other", 0, 4),
        ("other", 1, 4),
    ]


@settings(max_examples=25)
@given(flags=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_counts_by_brute_force(
    tmp_path_factory: pytest.TempPathFactory, flags: list[tuple[bool, bool]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    sides = zip(*flags, strict=True)
    runs = [
        write_run(folder / name, name=name, correct={4: [50 if flag else 0 for flag in side]})
        for name, side in zip(("first", "second"), sides, strict=True)
    ]
    (result,) = pair(*runs)
    assert result.num_documents == len(flags)
    assert result.verbatim.num_only_against == sum(a and not b for a, b in flags)
    assert result.verbatim.num_only_setting == sum(b and not a for a, b in flags)
