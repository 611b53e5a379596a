"""The learning rate of each step against a table worked out by hand."""

import math

import pytest

from memguard.config import OptimConfig
from memguard.train.optim import learning_rate

HALF_ROOT = math.sqrt(0.5)
"""cos(pi / 4): what tells a cosine from a straight line, which agrees with it at the middle."""


def test_it_rises_in_equal_steps_and_falls_along_a_cosine() -> None:
    config = OptimConfig(lr=8.0, warmup_fraction=0.25, min_lr_fraction=0.25)
    # 3 of 11 steps warm up (2.75 rounded), 8 fall: from 8 to 2, which step 11 would have.
    cosine = [5 + 3 * math.cos(math.pi * part / 8) for part in range(8)]
    expected = [2.0, 4.0, 6.0, *cosine]
    assert expected[5] == pytest.approx(5 + 3 * HALF_ROOT)
    found = [learning_rate(step, 11, config) for step in range(11)]
    # One product and one cosine in float64.
    assert found == pytest.approx(expected, rel=1e-12)


def test_without_warm_up_the_first_step_has_the_whole_rate() -> None:
    config = OptimConfig(lr=1.0, warmup_fraction=0.0, min_lr_fraction=0.0)
    expected = [1.0, (1 + HALF_ROOT) / 2, 0.5, (1 - HALF_ROOT) / 2]
    # As above.
    assert [learning_rate(step, 4, config) for step in range(4)] == pytest.approx(
        expected, rel=1e-12
    )
    level = OptimConfig(lr=1.0, warmup_fraction=0.0, min_lr_fraction=1.0)
    assert {learning_rate(step, 4, level) for step in range(4)} == {1.0}


def test_a_run_that_only_warms_up_never_reaches_the_rate() -> None:
    config = OptimConfig(lr=1.0, warmup_fraction=1.0)
    assert [learning_rate(step, 3, config) for step in range(3)] == [0.25, 0.5, 0.75]
