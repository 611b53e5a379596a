"""Results of canaries, random secrets: exposure, extraction, and a lower bound of epsilon.

A coin flip decides whether each canary is trained; canaries that were not trained are the
references. Only the secret is scored, given the true prefix before it.

    exposure by rank   log2(num_references) - log2(rank),  rank = 1 + references at or below it

Carlini et al., "The Secret Sharer" (2019). A canary that was not memorized behaves like a
reference: its exposure has a median of about 1 bit and reaches b bits with a probability of at most
2^-b. The exposure by rank is at most log2(num_references) bits: a secret likelier than all
references may be exposed by more. Ties count against exposure, so a model with the same nll for
every string exposes nothing (slightly less than 0 bits).

Only secrets of the same length in tokens are compared with each other, because the sum of nll
depends on the number of tokens: ranks and guesses cover the most frequent length, which all
canaries that `memguard.data` draws have. The selection does not depend on the coins, so the bound
holds.

For the bound, an attacker with access to the model guesses r of m coins, abstains from the others,
and is right for v of them. If training were (epsilon, delta)-differentially private, v would be at
most about binomial with q = 1 / (1 + e^-epsilon):

    beta   = P[Bin(r, q) >= v]
    alpha  = max_i P[v > Bin(r, q) >= v - i] / i
    p      = min(1, beta + 2 m alpha delta)

and every epsilon with p < 0.05 is rejected; the bound is the largest of them. Steinke, Nasr &
Jagielski, "Privacy Auditing with One (1) Training Run" (2023). The method allows abstaining if r is
fixed before any score is seen: `choose_num_guesses` computes r from m. The bound is not a privacy
guarantee: see `ASSUMPTIONS`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from scipy import special

from memguard.audit.cache import ScoreMatrix
from memguard.audit.windows import SECRET, AuditDocument
from memguard.records import CanaryScore, Record

ASSUMPTIONS = (
    "Each canary was trained or left out by its own fair coin, independent of all others.",
    "The unit is one canary with all its repetitions, not a document and not a training example.",
    "The bound applies to the training algorithm with these settings and is estimated from one "
    "training run; another run may give more or less.",
    "The number of guesses is three quarters of the number of coins and was fixed before any score "
    "was computed.",
    "The guesses use the residual of each secret's NLL after a linear fit on the base model's NLL "
    "over all ranked secrets, with a slope between 0 and 1, or without a base model the NLL alone. "
    "The score was chosen by simulation before any run, and does not use the coins.",
    "The bound holds with 95 % confidence: up to one audit in 20 reports a bound above the epsilon "
    "that training satisfies.",
    "It is a lower bound and implies no upper bound: a better attack may show more, "
    "and a bound of 0 is no evidence of privacy.",
)
"""The assumptions of the bound, as sentences for a report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OneRunBound:
    """The lower bound of epsilon from one run."""

    num_guesses: int
    num_right: int
    delta: float
    epsilon: float
    """Lower bound with 95 % confidence; 0 if no epsilon is rejected."""
    ceiling: float
    """The largest `epsilon` possible with these coins: with the most guesses that can be right."""


def compute_one_run_bound(
    scores: ArrayLike, coins: ArrayLike, *, num_guesses: int | None = None, delta: float = 0.0
) -> OneRunBound:
    """Guess from scores, count right guesses and bound epsilon."""
    coin_M = np.asarray(coins, dtype=np.bool_)
    count = choose_num_guesses(len(coin_M)) if num_guesses is None else num_guesses
    guesses_M = guess_members(scores, count)
    num_right, num_trained = count_right(guesses_M, coin_M), int(coin_M.sum())
    # Right guesses of each kind are limited by the number of coins of that kind.
    most_right = min(int((guesses_M == 1).sum()), num_trained)
    most_right += min(int((guesses_M == -1).sum()), len(coin_M) - num_trained)
    return OneRunBound(
        num_guesses=count,
        num_right=num_right,
        delta=delta,
        epsilon=compute_epsilon_bound(len(coin_M), count, num_right, delta=delta),
        ceiling=compute_epsilon_bound(len(coin_M), count, most_right, delta=delta),
    )


def compute_guess_scores(nll: ArrayLike, base_nll: ArrayLike | None = None) -> NDArray[np.float64]:
    """Return ``[m]`` scores to guess from: minus the residual of nll after a fit on the base's.

        score = slope base_nll - nll,   slope = cov(nll, base_nll) / var(base_nll), in [0, 1]

    Secrets differ in nll before training. Where training keeps these differences, subtracting the
    base's nll (slope 1) removes them; where it does not, as for a secret that is recited after a
    base that found it very unlikely, subtracting it would add them. The fit is over all canaries,
    whether they were trained or not: the scores do not depend on the coins, so the bound holds. A
    fit on the references alone would depend on them.

    In `scripts/simulate_canaries.py`, by which this score was chosen before a run was looked at, it
    has 21.7 of 24 right guesses in the mean, and at most .4 fewer than the best score in any of 630
    settings; -nll has 19.6 and up to 10.7 fewer, base_nll - nll 20.2 and up to 10.6 fewer.
    Without a base the score is -nll (nats).
    """
    nll_M = np.asarray(nll, dtype=np.float64)
    if base_nll is None:
        return -nll_M
    base_M = np.asarray(base_nll, dtype=np.float64)
    assert base_M.shape == nll_M.shape, "each secret needs an nll from both models"
    if not base_M.size:
        return nll_M
    deviation_M = base_M - base_M.mean()
    variance = float(deviation_M @ deviation_M)
    slope = float(deviation_M @ nll_M) / variance if variance > 0 else 0.0
    score_M: NDArray[np.float64] = min(max(slope, 0.0), 1.0) * deviation_M - nll_M
    return score_M


def choose_num_guesses(num_canaries: int) -> int:
    """Return r for m coins: the largest even number within three quarters of m.

    More guesses raise the ceiling, but middle scores give poor guesses, and unless exactly half of
    the coins are heads, guessing all m makes at least one wrong guess for any model. From 8 to 256
    coins this share is within 8 % of the best one if trained canaries score 3 standard deviations
    higher or more (AUC .98); at 2 it loses up to 27 % (m = 256), for a higher ceiling. Fewer than 6
    guesses give a bound of 0 even if all are right.
    """
    return 2 * (3 * num_canaries // 8)


def guess_members(scores: ArrayLike, num_guesses: int | None = None) -> NDArray[np.int8]:
    """Return ``[m]`` guesses: 1 for trained, -1 for left out, 0 for no guess.

    Half of the guesses are 'trained', for the highest scores, the other half 'left out', for the
    lowest; with an odd number one more is 'trained'. Equal scores are ranked by position, the first
    as the highest, so positions must not depend on the coins: never list the trained canaries
    first. A higher score means more likely trained. ``num_guesses`` None guesses for all canaries.
    """
    score_M = np.asarray(scores, dtype=np.float64)
    assert not np.isnan(score_M).any(), "a missing score allows no guess"
    count = len(score_M) if num_guesses is None else num_guesses
    assert 0 <= count <= len(score_M), f"{count} guesses for {len(score_M)} canaries"
    falling = np.argsort(-score_M, kind="stable")
    num_out = count // 2
    guesses_M = np.zeros(len(score_M), dtype=np.int8)
    guesses_M[falling[: count - num_out]] = 1
    guesses_M[falling[len(falling) - num_out :]] = -1
    return guesses_M


def count_right(guesses: ArrayLike, coins: ArrayLike) -> int:
    """Return the number of guesses that agree with the coins; a 0 is no guess."""
    guess_M, coin_M = np.asarray(guesses), np.asarray(coins, dtype=np.bool_)
    assert guess_M.shape == coin_M.shape, "each canary needs one guess and one coin"
    return int((guess_M == np.where(coin_M, 1, -1)).sum())


def compute_epsilon_bound(
    num_canaries: int, num_guesses: int, num_right: int, *, delta: float = 0.0
) -> float:
    """Return the largest epsilon that the guesses reject; 0 if they reject none."""
    assert 0 <= num_right <= num_guesses <= num_canaries, (
        f"{num_right} right of {num_guesses} guesses for {num_canaries} canaries"
    )
    assert 0 <= delta <= 1, f"delta is a probability, not {delta}"

    def is_rejected(epsilon: float) -> bool:
        return compute_p_value(epsilon, num_canaries, num_guesses, num_right, delta) < 0.05

    if not is_rejected(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while is_rejected(high):
        low, high = high, 2 * high
    # p rises with epsilon (a test checks this), so the rejected values are an interval from 0.
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if is_rejected(middle) else (low, middle)
    return low


def compute_p_value(
    epsilon: float, num_canaries: int, num_guesses: int, num_right: int, delta: float
) -> float:
    """Return p of the module's formula: the probability of this many right guesses at epsilon."""
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


FEWEST_REFERENCES = 2
"""Fewer references give no exposure to draw."""


def compute_exposures(
    canary_nll: ArrayLike, reference_nll: ArrayLike
) -> NDArray[np.float64] | None:
    """Return the exposure by rank (bits) of each canary; None without references.

    All must have the same form and be scored in the same way: same number of tokens, same prefix.
    The nll are in nats, those of the references in any order.
    """
    canary_C, reference_R = _as_nll(canary_nll), np.sort(_as_nll(reference_nll))
    if not reference_R.size:
        return None
    rank_C = 1 + np.searchsorted(reference_R, canary_C, side="right").astype(np.int64)
    return np.asarray(math.log2(len(reference_R)) - np.log2(rank_C))


def _as_nll(values: ArrayLike) -> NDArray[np.float64]:
    nll = np.asarray(values, dtype=np.float64)
    assert nll.ndim == 1, f"one nll per string is one-dimensional, not {nll.shape}"
    assert np.isfinite(nll).all(), "a missing nll has no rank"
    return nll


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditCanary:
    """One canary and the record of its training."""

    document: AuditDocument
    was_trained: bool
    num_loss_tokens: int | None
    """Tokens of the secret that received loss at least once; None if not recorded."""
    num_losses: int | None
    """Number of times that any token of the secret received loss; None if not recorded."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CanaryResults:
    """The results of C canaries."""

    scores: Sequence[CanaryScore]
    """[C] in the order of the canaries."""
    is_ranked_C: NDArray[np.bool_]
    """Whether the secret has the most frequent length."""
    bound: OneRunBound

    @property
    def exposures(self) -> list[float]:
        """Bits of the ranked trained canaries; none without a ranked reference."""
        return [s.exposure_bits for s in self.scores if s.exposure_bits is not None]

    @property
    def loss_tokens(self) -> Sequence[int] | None:
        """Tokens of each trained secret that received loss; None unless all are recorded."""
        trained = [score.num_loss_tokens for score in self.scores if score.was_trained]
        known = [number for number in trained if number is not None]
        return known if len(known) == len(trained) else None


def score_canaries(
    canaries: Sequence[AuditCanary], model: ScoreMatrix, base: ScoreMatrix | None, *, delta: float
) -> CanaryResults | None:
    """Return the results of the canaries; None unless some were trained and some left out.

    The coins are guessed from the nll of each secret, adjusted for the base model's if there is one
    (`compute_guess_scores`). A quarter of the coins is not guessed (`choose_num_guesses`).
    The order of the canaries does not depend on the coins. ``model`` and ``base`` are the numbers
    of each canary's window, see `probes/canaries.py`.
    """
    coin_C = np.array([canary.was_trained for canary in canaries], dtype=bool)
    if not coin_C.any() or coin_C.all():
        return None
    nll_C = -model["logprob"]
    base_C = None if base is None else -base["logprob"]
    sizes_C = np.array([_count_secret(canary) for canary in canaries])
    lengths, counts = np.unique(sizes_C, return_counts=True)
    ranked_C = sizes_C == lengths[counts.argmax()]
    exposures = compute_exposures(nll_C[coin_C & ranked_C], nll_C[~coin_C & ranked_C])
    guess_scores = compute_guess_scores(
        nll_C[ranked_C], None if base_C is None else base_C[ranked_C]
    )
    bound = compute_one_run_bound(guess_scores, coin_C[ranked_C], delta=delta)
    bits = iter([] if exposures is None else exposures.tolist())
    scores = [
        CanaryScore(
            id=canary.document.id,
            was_trained=canary.was_trained,
            nll=float(nll_C[index]),
            base_nll=None if base_C is None else float(base_C[index]),
            num_secret_tokens=int(sizes_C[index]),
            num_repetitions=canary.document.num_repetitions or 0,
            num_loss_tokens=canary.num_loss_tokens,
            exposure_bits=next(bits, None) if canary.was_trained and ranked_C[index] else None,
            verbatim=bool(model["num_correct"][index] == sizes_C[index]),
        )
        for index, canary in enumerate(canaries)
    ]
    return CanaryResults(scores=scores, is_ranked_C=ranked_C, bound=bound)


class _Exposure(Record):
    """How many trained secrets have at least how much exposure; empty without references."""

    bits: list[float] = Field(default_factory=list)
    """0, 1, 2, ... and the exposure of a secret likelier than all references."""
    reached: list[int] = Field(default_factory=list)
    num_secrets: int = 0


class CanaryDetail(Record):
    """What the page shows of the canaries besides rows of results."""

    num_trained: int
    num_references: int
    num_ranked: int
    """Secrets of the most frequent length, which are ranked and guessed."""
    num_ranked_references: int
    num_repetitions: int | None
    """Of the trained ones; null if it differs between them."""
    num_guesses: int
    num_right: int
    epsilon_lower_bound: float | None
    epsilon_ceiling: float | None
    """The largest bound possible with this random split."""
    delta: float
    assumptions: list[str]
    has_base: bool
    """Whether guesses are adjusted for the base model."""
    exposure: _Exposure


def describe_results(results: CanaryResults, *, has_base: bool) -> CanaryDetail:
    """Return the counts, the bound and how many secrets reach how much exposure."""
    bound, bits = results.bound, results.exposures
    trained_C = np.array([score.was_trained for score in results.scores], dtype=bool)
    num_references = int((~trained_C & results.is_ranked_C).sum())
    repetitions = {score.num_repetitions for score in results.scores if score.was_trained}
    exposure = _Exposure()
    if num_references >= FEWEST_REFERENCES:
        steps = _list_steps(num_references)
        reached = [sum(one >= step - _HAIR for one in bits) for step in steps]
        exposure = _Exposure(bits=steps, reached=reached, num_secrets=len(bits))
    return CanaryDetail(
        num_trained=int(trained_C.sum()),
        num_references=int((~trained_C).sum()),
        num_ranked=int(results.is_ranked_C.sum()),
        num_ranked_references=num_references,
        num_repetitions=repetitions.pop() if len(repetitions) == 1 else None,
        num_guesses=bound.num_guesses,
        num_right=bound.num_right,
        epsilon_lower_bound=bound.epsilon,
        epsilon_ceiling=bound.ceiling,
        delta=bound.delta,
        assumptions=list(ASSUMPTIONS),
        has_base=has_base,
        exposure=exposure,
    )


_MOST_BITS = 16
_HAIR = 1e-9
"""Rounding error of the log2 of a rank: an integer result deviates by less than this."""


def _list_steps(num_references: int) -> list[float]:
    """Return 0, 1, 2, ... bits and last the exposure of a secret likelier than all references."""
    ceiling = math.log2(num_references)
    whole = [float(bits) for bits in range(min(int(ceiling + _HAIR), _MOST_BITS) + 1)]
    return whole if abs(whole[-1] - ceiling) < 0.05 else [*whole, ceiling]


def compute_chance(bits: float, num_references: int) -> float:
    """Return the probability that an untrained secret, whose rank is uniform, reaches ``bits``."""
    ranks = num_references + 1
    return min(int(num_references / 2**bits + _HAIR), ranks) / ranks


def _count_secret(canary: AuditCanary) -> int:
    window = SECRET.window(canary.document)
    assert window is not None, "a canary has a prompt and a secret"
    return window.continuation_tokens
