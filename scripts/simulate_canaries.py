"""Simulate the guesses of canaries with scores that were proposed for them, and compare the scores.

    python scripts/simulate_canaries.py                  a minute
    python scripts/simulate_canaries.py --draws 100 --cells

A draw is 32 coins, of which 24 are guessed, and the nll (nats) of their secrets in the base model
and after training. The base's nll is normal, with a mean of three standard deviations. Training
lowers the nll of trained secrets by the drop, adds its own noise to every secret, and keeps a share
of what distinguishes a secret in the base model:

    linear     the share applies to trained secrets and references
    floored    the same, and no nll is below 0
    trained    the share applies to trained secrets only; references keep all of it

Scores, from which `guess_members` guesses:

    loss         -nll
    difference   base_nll - nll
    residual     nll after a linear fit on base_nll, slope between 0 and 1: `compute_guess_scores`
    ranks        mean rank of loss and difference

The first table has the mean right guesses of each score, averaged over cells and in the cell where
it falls farthest behind the best of the four. The second shows that the bound holds where nothing
was learned: the exact probability of enough right guesses for a bound above 0, and its simulated
share. The last line is a verdict. No run of a model is read: the score was chosen by this
simulation alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from bench.harness import Verdict, build_parser
from numpy.typing import NDArray
from scipy import special, stats

from memguard.audit.probes.canary_results import (
    choose_num_guesses,
    compute_guess_scores,
    compute_p_value,
    count_right,
    guess_members,
)
from memguard.seeds import derive_generator

SEED = 0
NUM_CANARIES = 32
DELTA, P_VALUE = 1e-5, 0.05
NUM_NULLS = 4000
MOST_BEHIND = 0.5
SCORES = ("loss", "difference", "residual", "ranks")

Kind = Literal["linear", "floored", "trained"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One setting of the simulation."""

    kind: Kind
    deviation: float
    """Standard deviation of the base's nll over secrets (nats)."""
    noise: float
    """Standard deviation of what training adds to a secret's nll (nats)."""
    kept: float
    """Share of the base's deviation that remains after training, 0 to 1."""
    drop: float
    """Mean fall of a trained secret's nll (nats)."""

    @property
    def name(self) -> str:
        """The setting in words."""
        return (
            f"{self.kind}, base sd {self.deviation:g}, kept {self.kept:g}, drop {self.drop:g}, "
            f"noise {self.noise:g}"
        )


def list_cells() -> list[Cell]:
    """Return every cell of the grid."""
    grid = product(
        ("linear", "floored", "trained"),
        (2.0, 6.0, 11.0),
        (0.5, 2.0),
        (0.0, 0.25, 0.5, 0.75, 1.0),
        (1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0),
    )
    return [
        Cell(kind=kind, deviation=deviation, noise=noise, kept=kept, drop=drop)
        for kind, deviation, noise, kept, drop in grid
    ]


def draw_nll(
    cell: Cell, coins: NDArray[np.bool_], generator: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the nll after training and in the base model, each in the shape of ``coins``."""
    mean = 3 * cell.deviation
    base = np.maximum(generator.normal(mean, cell.deviation, coins.shape), 0)
    kept = np.where(coins, cell.kept, 1.0) if cell.kind == "trained" else cell.kept
    nll = mean + kept * (base - mean) - cell.drop * coins
    nll += generator.normal(0, cell.noise, coins.shape)
    return (np.maximum(nll, 0) if cell.kind == "floored" else nll), base


def score(name: str, nll: NDArray[np.float64], base: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the scores of one draw's secrets, higher for trained."""
    if name == "residual":
        return compute_guess_scores(nll, base)
    if name == "ranks":
        return stats.rankdata(-nll) + stats.rankdata(base - nll)
    return -nll if name == "loss" else base - nll


def simulate(cell: Cell, num_draws: int, index: int) -> dict[str, float]:
    """Return the mean number of right guesses with each score."""
    generator = derive_generator(SEED, "simulated canaries", index)
    coins = generator.random((num_draws, NUM_CANARIES)) < 0.5
    nll, base = draw_nll(cell, coins, generator)
    num_guesses = choose_num_guesses(NUM_CANARIES)
    return {
        name: float(
            np.mean(
                [
                    count_right(guess_members(score(name, nll[row], base[row]), num_guesses), coin)
                    for row, coin in enumerate(coins)
                ]
            )
        )
        for name in SCORES
    }


def count_enough(num_canaries: int) -> int:
    """Return how many right guesses give a bound above 0; one more than possible if none do."""
    num_guesses = choose_num_guesses(num_canaries)
    counts = range(num_guesses // 2, num_guesses + 1)
    enough = (
        count
        for count in counts
        if compute_p_value(0.0, num_canaries, num_guesses, count, DELTA) < P_VALUE
    )
    return next(enough, num_guesses + 1)


def simulate_null(num_canaries: int) -> float:
    """Return the share of draws without a drop in which the guesses by residual are enough."""
    generator = derive_generator(SEED, "simulated references", num_canaries)
    coins = generator.random((NUM_NULLS, num_canaries)) < 0.5
    cell = Cell(kind="linear", deviation=6.0, noise=2.0, kept=0.5, drop=0.0)
    nll, base = draw_nll(cell, coins, generator)
    num_guesses, enough = choose_num_guesses(num_canaries), count_enough(num_canaries)
    right = [
        count_right(guess_members(compute_guess_scores(nll[row], base[row]), num_guesses), coin)
        for row, coin in enumerate(coins)
    ]
    return float(np.mean(np.array(right) >= enough))


def main() -> int:
    """Print both tables; return 1 if a bar is missed."""
    parser = build_parser(__doc__)
    parser.add_argument("--draws", type=int, default=400, metavar="N", help="draws of a cell")
    parser.add_argument("--cells", action="store_true", help="print every cell")
    options = parser.parse_args()
    cells = list_cells()
    means = {cell: simulate(cell, options.draws, index) for index, cell in enumerate(cells)}
    limits = Verdict()
    print_scores(means, options.draws, limits)
    if options.cells:
        print_cells(means)
    print_nulls([8, 12, 16, 24, 32, 64, 128, 256], limits)
    return limits.end()


def print_scores(means: Mapping[Cell, Mapping[str, float]], draws: int, limits: Verdict) -> None:
    """Print each score's right guesses, and its worst cell."""
    num_guesses = choose_num_guesses(NUM_CANARIES)
    print(f"{len(means)} cells, {draws} draws each: right guesses of {num_guesses}\n")
    print("| score | mean | farthest behind the best | in the cell | |")
    print("|---|---|---|---|---|")
    for name in SCORES:
        behind = {cell: max(each.values()) - each[name] for cell, each in means.items()}
        worst = max(behind, key=behind.__getitem__)
        mean = np.mean([each[name] for each in means.values()])
        words = ""
        if name == "residual":
            words = limits.check(
                "residual behind the best", behind[worst], at_most=MOST_BEHIND, unit=""
            )
        print(f"| {name} | {mean:.1f} | {behind[worst]:.2f} | {worst.name} | {words} |")


def print_cells(means: Mapping[Cell, Mapping[str, float]]) -> None:
    """Print the mean right guesses in every cell."""
    print(f"\n| cell | {' | '.join(SCORES)} |\n|---|{'---|' * len(SCORES)}")
    for cell, of_cell in means.items():
        print(f"| {cell.name} | {' | '.join(f'{of_cell[name]:.1f}' for name in SCORES)} |")


def print_nulls(sizes: Sequence[int], limits: Verdict) -> None:
    """Print how often nothing learned gives a bound above 0, exactly and in draws."""
    exact = {
        size: float(special.bdtrc(count_enough(size) - 1, choose_num_guesses(size), 0.5))
        for size in range(8, 257)
    }
    worst = max(exact, key=exact.__getitem__)
    words = limits.check("bound above 0 by chance", exact[worst], at_most=0.05, unit="")
    print(f"\nNothing learned: a bound above 0 with a probability of at most {exact[worst]:.4f}")
    print(f"(8 to 256 coins; highest at {worst}) {words}\n")
    print(f"| coins | exact | {NUM_NULLS:,} draws | |\n|---|---|---|---|")
    for size in sizes:
        share = simulate_null(size)
        words = limits.check(
            f"{size} coins, difference", abs(share - exact[size]), at_most=0.01, unit=""
        )
        print(f"| {size} | {exact[size]:.4f} | {share:.4f} | {words} |")


if __name__ == "__main__":
    raise SystemExit(main())
