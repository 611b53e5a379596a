"""The learning rate of each step against tables worked out by hand and transformers' schedules."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import optimization

from memguard.config import OptimConfig
from memguard.optim.schedule import learning_rate

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


def test_a_line_ends_at_the_same_share_as_a_cosine() -> None:
    config = OptimConfig(lr=8.0, warmup_fraction=0.25, min_lr_fraction=0.25, schedule="linear")
    # Warm-up as above, then an eighth of the way from 8 to 2 a step.
    expected = [2.0, 4.0, 6.0, 8.0, 7.25, 6.5, 5.75, 5.0, 4.25, 3.5, 2.75]
    assert [learning_rate(step, 11, config) for step in range(11)] == expected
    for schedule in ("cosine", "linear"):
        config = OptimConfig(lr=8.0, min_lr_fraction=0.25, schedule=schedule)
        # The step after the last one; exact, since cos(pi) is -1.
        assert learning_rate(11, 11, config) == 2.0


def test_a_constant_rate_is_warmed_up_too() -> None:
    config = OptimConfig(lr=8.0, warmup_fraction=0.25, schedule="constant")
    assert [learning_rate(step, 11, config) for step in range(11)] == [2.0, 4.0, 6.0, *[8.0] * 8]


SCHEDULES: dict[str, tuple[Callable[..., Any], dict[str, float]]] = {
    "cosine": (optimization.get_cosine_schedule_with_warmup, {"min_lr_fraction": 0.0}),
    "linear": (optimization.get_linear_schedule_with_warmup, {"min_lr_fraction": 0.0}),
    "constant": (optimization.get_constant_schedule_with_warmup, {}),
}


def list_rates(schedule: str, num_warmup: int, num_steps: int) -> list[float]:
    """Return the rates that transformers' own scheduler gives the steps of an optimizer."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    length = {} if schedule == "constant" else {"num_training_steps": num_steps}
    scheduler = SCHEDULES[schedule][0](optimizer, num_warmup_steps=num_warmup, **length)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_steps", "num_warmup"), [(1, 0), (40, 0), (40, 1), (40, 10), (9, 9)])
def test_schedules_are_those_of_transformers(
    schedule: str, num_steps: int, num_warmup: int
) -> None:
    config = OptimConfig(
        lr=0.3, warmup_fraction=num_warmup / num_steps, schedule=schedule, **SCHEDULES[schedule][1]
    )
    found = [learning_rate(step, num_steps, config) for step in range(num_steps)]
    if num_warmup:
        # The first step of transformers' warm-up has rate 0 and trains nothing. Here it is left
        # out, so that the same rates belong to a warm-up that is one step longer.
        expected = list_rates(schedule, num_warmup + 1, num_steps + 1)[1:]
    else:
        expected = list_rates(schedule, 0, num_steps)
    # The same formula in float64, in another order of the products.
    assert found == pytest.approx(expected, rel=1e-12, abs=0)
