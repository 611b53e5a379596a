"""Paired tests against hand-computed cases and brute force."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from compare_examples import write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from memguard.compare import FinishedRun, compare_runs
from memguard.records import PairedResult


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
    assert high.token_accuracy_difference.value == 0
    assert high.token_accuracy_difference.ci is None, "equal differences are no certainty"


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
