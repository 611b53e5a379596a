"""A lower bound of epsilon from one training run with coin-flipped canaries.

Each of m canaries is trained or not by a fair coin. An attacker who sees the model guesses r of the
coins, abstains from the others, and gets v right. Were training (epsilon, delta)-differentially
private, v would be at most about binomial with q = 1 / (1 + e^-epsilon):

    beta   = P[Bin(r, q) >= v]
    alpha  = max_i P[v > Bin(r, q) >= v - i] / i
    p      = min(1, beta + 2 m alpha delta)

and every epsilon with p < 0.05 is refuted; the bound is the largest of them. Steinke, Nasr &
Jagielski, "Privacy Auditing with One (1) Training Run" (2023), which allows to abstain as long as
r is fixed before any score is seen: `choose_num_guesses` takes it from m. It is no privacy
guarantee: see `ASSUMPTIONS`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

ASSUMPTIONS = (
    "Each canary was trained or left out by its own fair coin, independent of all others.",
    "The unit is one canary with all its repetitions, not a document and not a training example.",
    "The bound is about the training algorithm with these settings, shown by one training run; "
    "another run may show more or less.",
    "The number of guesses follows from the number of coins (three quarters of them) and was fixed "
    "before any score was looked at.",
    "The guesses use the model's scores alone, not the coins.",
    "The bound holds with 95 % confidence: where training is as private as it says, "
    "one audit in 20 claims more leakage than there is.",
    "It is a lower bound and says nothing of an upper one: a better attack may show more, "
    "and a bound of 0 is no evidence of privacy.",
)
"""What the bound rests on, in sentences a report can print."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OneRunBound:
    """What one run shows of epsilon."""

    num_canaries: int
    """Whose coin was flipped, guessed or not."""
    num_guesses: int
    num_right: int
    delta: float
    epsilon: float
    """At least this, with 95 % confidence; 0 where nothing is shown."""
    ceiling: float
    """The largest `epsilon` these coins could have shown: with as many guesses right as can be."""


def compute_one_run_bound(
    scores: ArrayLike, coins: ArrayLike, *, num_guesses: int | None = None, delta: float = 0.0
) -> OneRunBound | None:
    """Guess from scores, count what is right and bound epsilon; None without canaries.

    Args:
        scores: ``[m]`` membership scores of the canaries, higher means more likely trained.
        coins: ``[m]`` true where the canary was trained.
        num_guesses: fixed before scores and coins are looked at; None takes `choose_num_guesses`.
        delta: of (epsilon, delta)-differential privacy.
    """
    coin_M = np.asarray(coins, dtype=np.bool_)
    if not coin_M.size:
        return None
    count = choose_num_guesses(len(coin_M)) if num_guesses is None else num_guesses
    guesses_M = guess_members(scores, count)
    num_right, num_trained = count_right(guesses_M, coin_M), int(coin_M.sum())
    # More guesses of one kind than coins of that kind cannot all be right.
    most_right = min(int((guesses_M == 1).sum()), num_trained)
    most_right += min(int((guesses_M == -1).sum()), len(coin_M) - num_trained)
    return OneRunBound(
        num_canaries=len(coin_M),
        num_guesses=count,
        num_right=num_right,
        delta=delta,
        epsilon=compute_epsilon_bound(len(coin_M), count, num_right, delta=delta),
        ceiling=compute_epsilon_bound(len(coin_M), count, most_right, delta=delta),
    )


def choose_num_guesses(num_canaries: int) -> int:
    """Return r for m coins: the largest even number within three quarters of m.

    More guesses raise the ceiling, but the middle scores are guessed badly, and where the coins do
    not fall half and half some guess of all m is wrong whatever the model shows. Mean bound over
    draws of m = 32 coins at delta 1e-5, where scores are normal and those of trained canaries lie
    d standard deviations higher (d = 2: AUC .92, 3: .98, 4: .998, inf: 1):

         r    all right    d = 1       2       3       4     inf
        12         1.26      .33    1.03    1.24    1.26    1.26
        16         1.58      .34    1.18    1.53    1.58    1.58
        20         1.82      .32    1.19    1.69    1.80    1.81
        24         2.02      .29    1.10    1.71    1.90    1.93
        28         2.18      .25     .96    1.56    1.81    1.87
        32         2.32      .20     .79    1.26    1.47    1.52

    Fewer than 6 guesses, all right, show nothing. From 8 to 256 coins this share is within 8 % of
    the best one at d = 3 and more; at d = 2 it loses up to 27 % (m = 256), for a higher ceiling.

    Args:
        num_canaries: m, whose coin was flipped.
    """
    return 2 * (3 * num_canaries // 8)


def guess_members(scores: ArrayLike, num_guesses: int | None = None) -> NDArray[np.int8]:
    """Return ``[m]`` guesses: 1 for trained, -1 for left out, 0 for none.

    The top half of the guesses goes to the highest scores, the other half to the lowest; of an odd
    number the odd one is a guess that the canary was trained. Equal scores are ranked by position,
    the first as the highest, so positions must not depend on the coins: never list the trained
    canaries first.

    Args:
        scores: ``[m]`` higher means more likely trained.
        num_guesses: how many canaries to guess at; None guesses at all.
    """
    score_M = np.asarray(scores, dtype=np.float64)
    assert not np.isnan(score_M).any(), "a missing score allows no guess"
    count = len(score_M) if num_guesses is None else num_guesses
    assert 0 <= count <= len(score_M), f"{count} guesses at {len(score_M)} canaries"
    falling = np.argsort(-score_M, kind="stable")
    num_out = count // 2
    guesses_M = np.zeros(len(score_M), dtype=np.int8)
    guesses_M[falling[: count - num_out]] = 1
    guesses_M[falling[len(falling) - num_out :]] = -1
    return guesses_M


def count_right(guesses: ArrayLike, coins: ArrayLike) -> int:
    """Return how many guesses agree with the coins; a 0 is no guess.

    Args:
        guesses: ``[m]`` of `guess_members`.
        coins: ``[m]`` true where the canary was trained.
    """
    guess_M, coin_M = np.asarray(guesses), np.asarray(coins, dtype=np.bool_)
    assert guess_M.shape == coin_M.shape, "each canary needs one guess and one coin"
    return int((guess_M == np.where(coin_M, 1, -1)).sum())


def compute_epsilon_bound(
    num_canaries: int,
    num_guesses: int,
    num_right: int,
    *,
    delta: float = 0.0,
    p_value: float = 0.05,
) -> float:
    """Return the largest epsilon that the guesses refute; 0 where they refute none.

    Args:
        num_canaries: m, whose coin was flipped.
        num_guesses: r, at most m.
        num_right: v, at most r.
        delta: 0 tests pure differential privacy.
        p_value: 1 minus the confidence.
    """
    assert 0 <= num_right <= num_guesses <= num_canaries, (
        f"{num_right} right of {num_guesses} guesses at {num_canaries} canaries"
    )
    assert 0 <= delta <= 1, f"delta is a probability, not {delta}"
    assert 0 < p_value < 1, f"no bound holds at p = {p_value}"

    def is_refuted(epsilon: float) -> bool:
        return compute_p_value(epsilon, num_canaries, num_guesses, num_right, delta) < p_value

    if not is_refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while is_refuted(high):
        low, high = high, 2 * high
    # p rises with epsilon (a test walks it), so what is refuted is one stretch that starts at 0.
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


def compute_p_value(
    epsilon: float, num_canaries: int, num_guesses: int, num_right: int, delta: float
) -> float:
    """Return p of the module's formula: how likely so many right guesses are at this epsilon."""
    if num_right == 0:
        return 1.0
    q = special.expit(epsilon)
    beta = float(special.betainc(num_right, num_guesses - num_right + 1, q))
    if delta == 0:
        return beta
    # From v - 1 downwards, so that a running sum is P[v > Bin >= v - i].
    count_I = np.arange(num_right - 1, -1, -1)
    log_share_I = (
        special.xlogy(count_I, q)
        + special.xlog1py(num_guesses - count_I, -q)
        - special.betaln(count_I + 1, num_guesses - count_I + 1)
        - np.log(num_guesses + 1)
    )
    alpha = float((np.cumsum(np.exp(log_share_I)) / np.arange(1, num_right + 1)).max())
    return min(1.0, beta + 2 * num_canaries * alpha * delta)
