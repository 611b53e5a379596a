"""scripts/simulate_canaries.py on a few cells: its tables, its draws, and a missed bar."""

from typing import Any

import numpy as np
import pytest
from ranks import RankPool
from script_calls import load_script, run_script

from memguard.seeds import derive_generator

pytestmark = pytest.mark.slow


def _shrink(script: Any) -> None:
    """Leave the cells whose base noise remains or is gone, with a drop of 2 nats."""
    kept = [
        cell
        for cell in script.list_cells()
        if (cell.deviation, cell.noise, cell.drop) == (11, 0.5, 2) and cell.kept in (0, 1)
    ]
    script.list_cells = lambda: kept
    script.NUM_NULLS = 100


def _lose_power(script: Any) -> None:
    """Let the product subtract all of the base's nll, as it once did."""
    _shrink(script)
    script.compute_guess_scores = lambda nll, base: base - nll


@pytest.mark.parametrize(("change", "code"), [(_shrink, 0), (_lose_power, 1)])
def test_a_score_that_adds_the_noise_of_the_base_misses_its_bar(
    ranks: RankPool, change: Any, code: int
) -> None:
    done = run_script(ranks, "simulate_canaries", "--draws", "40", "--cells", change=change)
    lines = [line.strip("| ").split(" | ") for line in done.out.splitlines()]
    rows = {row[0]: row for row in lines if len(row) >= 4}
    # Of 24: with the noise kept only the difference works, with the noise gone only the loss.
    assert float(rows["loss"][2]) > 8
    assert float(rows["difference"][2]) > 8
    assert (float(rows["residual"][2]) <= 0.5) == (code == 0)
    assert ("residual behind the best" in done.out.splitlines()[-1]) == (code == 1)
    assert "linear, base sd 11, kept 1, drop 2, noise 0.5" in rows
    # 100 draws may miss a share by more than 0.01, which says nothing about the score.
    assert done.code == code or "difference: " in done.out.splitlines()[-1]


@pytest.mark.parametrize("kind", ["linear", "floored", "trained"])
def test_secrets_are_drawn_as_described(kind: str) -> None:
    script = load_script("simulate_canaries")
    cell = script.Cell(kind=kind, deviation=6.0, noise=0.5, kept=0.25, drop=10.0)
    generator = derive_generator(0, "test")
    coins = generator.random((500, 32)) < 0.5
    nll, base = script.draw_nll(cell, coins, generator)
    # Standard errors of 8,000 secrets are at most 0.07.
    assert base.mean() == pytest.approx(18, abs=0.2)
    assert nll[~coins].mean() == pytest.approx(18, abs=0.2)
    assert nll[coins].mean() == pytest.approx(8, abs=0.2)
    # A quarter of 6 and half a nat: 1.58; all of 6 and half a nat: 6.02.
    references = 6.02 if kind == "trained" else 1.58
    assert np.std(nll[coins]) == pytest.approx(1.58, abs=0.05)
    assert np.std(nll[~coins]) == pytest.approx(references, abs=0.15)


def test_how_many_right_guesses_are_enough() -> None:
    script = load_script("simulate_canaries")
    # 17 of 24 have a probability of .032, 16 one of .076; of 4 guesses none is enough.
    assert script.count_enough(32) == 17
    assert script.count_enough(6) == 5
