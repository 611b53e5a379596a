"""Results of canaries, random secrets: exposure, extraction, and guesses for the bound of epsilon.

A coin flip decides whether each canary is trained; canaries that were not trained are the
references. Only the secret is scored, given the true prefix before it.

    exposure by rank   log2(num_references) - log2(rank),  rank = 1 + references at or below it

Carlini et al., "The Secret Sharer" (2019). A canary that was not memorized behaves like a
reference: its exposure has a median of about 1 bit and reaches b bits with a probability of at most
2^-b. The exposure by rank is at most log2(num_references) bits: a secret likelier than all
references may be exposed by more. Ties count against exposure, so a model with the same nll for
every string exposes nothing (slightly less than 0 bits).

Only secrets of the same length in tokens are compared with each other, because the sum of nll
depends on the number of tokens: ranks and guesses cover the most frequent length. All canaries that
`memguard.data` draws have it; others are counted and listed but not ranked. The selection does not
depend on the coins, so the bound holds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from memguard.audit.cache import ScoreMatrix
from memguard.audit.probes.epsilon_bound import (
    ASSUMPTIONS,
    OneRunBound,
    compute_guess_scores,
    compute_one_run_bound,
)
from memguard.audit.windows import SECRET, AuditDocument
from memguard.records import CanaryScore, Record

FEWEST_REFERENCES = 2
"""Fewer references give no exposure to draw."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposures:
    """C canaries among references of the same form."""

    num_references: int
    rank_C: NDArray[np.int64]
    """1 if below every reference, num_references + 1 if above all."""
    by_rank_bits_C: NDArray[np.float64]
    """At most log2(num_references)."""


def compute_exposures(canary_nll: ArrayLike, reference_nll: ArrayLike) -> Exposures | None:
    """Return the exposure of each canary; None without references.

    All must have the same form and be scored in the same way: same number of tokens, same prefix.
    If canaries have several forms, call this once for each form.

    Args:
        canary_nll: ``[C]`` nats; lower means more memorized.
        reference_nll: ``[num_references]`` nats, any order.
    """
    canary_C, reference_R = _as_nll(canary_nll), np.sort(_as_nll(reference_nll))
    if not reference_R.size:
        return None
    rank_C = 1 + np.searchsorted(reference_R, canary_C, side="right").astype(np.int64)
    return Exposures(
        num_references=len(reference_R),
        rank_C=rank_C,
        by_rank_bits_C=math.log2(len(reference_R)) - np.log2(rank_C),
    )


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
    is_trained_C: NDArray[np.bool_]
    is_ranked_C: NDArray[np.bool_]
    """Whether the secret has the most frequent length."""
    is_verbatim_C: NDArray[np.bool_]
    exposures: Exposures | None
    """Of the trained canaries among the references that are ranked; None without references."""
    bound: OneRunBound

    @property
    def loss_tokens(self) -> Sequence[int] | None:
        """Tokens of each trained secret that received loss; None unless all are recorded."""
        trained = [score.num_loss_tokens for score in self.scores if score.was_trained]
        known = [number for number in trained if number is not None]
        return known if len(known) == len(trained) else None


def score_canaries(
    canaries: Sequence[AuditCanary],
    model: ScoreMatrix,
    base: ScoreMatrix | None,
    *,
    delta: float,
) -> CanaryResults | None:
    """Return the results of the canaries; None unless some were trained and some left out.

    The coins are guessed from the nll of each secret, adjusted for the base model's if there is one
    (`compute_guess_scores`). A quarter of the coins is not guessed (`choose_num_guesses`).

    Args:
        canaries: C canaries, in an order that does not depend on the coins.
        model: numbers of each canary's window, see `probes/canaries.py`.
        base: the same numbers of the model before training.
        delta: of the bound of epsilon.
    """
    coin_C = np.array([canary.was_trained for canary in canaries], dtype=bool)
    if not coin_C.any() or coin_C.all():
        return None
    nll_C = -model["logprob"]
    base_C = None if base is None else -base["logprob"]
    sizes_C = np.array([_count_secret(canary) for canary in canaries])
    verbatim_C = model["num_correct"] == sizes_C
    lengths, counts = np.unique(sizes_C, return_counts=True)
    ranked_C = sizes_C == lengths[counts.argmax()]
    exposures = compute_exposures(nll_C[coin_C & ranked_C], nll_C[~coin_C & ranked_C])
    base_ranked_C = None if base_C is None else base_C[ranked_C]
    guess_scores = compute_guess_scores(nll_C[ranked_C], base_ranked_C)
    bound = compute_one_run_bound(guess_scores, coin_C[ranked_C], delta=delta)
    assert bound is not None, "there are canaries"
    by_rank_C: list[float | None] = [None] * len(canaries)
    if exposures is not None:
        by_rank_C = _spread(coin_C & ranked_C, exposures.by_rank_bits_C)
    scores = [
        CanaryScore(
            id=canary.document.id,
            was_trained=bool(coin_C[index]),
            nll=float(nll_C[index]),
            base_nll=None if base_C is None else float(base_C[index]),
            num_secret_tokens=int(sizes_C[index]),
            num_repetitions=canary.document.num_repetitions or 0,
            num_loss_tokens=canary.num_loss_tokens,
            exposure_bits=by_rank_C[index],
            verbatim=bool(verbatim_C[index]),
        )
        for index, canary in enumerate(canaries)
    ]
    return CanaryResults(
        scores=scores,
        is_trained_C=coin_C,
        is_ranked_C=ranked_C,
        is_verbatim_C=verbatim_C,
        exposures=exposures,
        bound=bound,
    )


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
    trained_C, ranked_C, bound = results.is_trained_C, results.is_ranked_C, results.bound
    num_references = int((~trained_C & ranked_C).sum())
    repetitions = {score.num_repetitions for score in results.scores if score.was_trained}
    exposure = _Exposure()
    if results.exposures is not None and num_references >= FEWEST_REFERENCES:
        bits_C, steps = results.exposures.by_rank_bits_C, _list_steps(num_references)
        exposure = _Exposure(
            bits=steps, reached=_count_reached(bits_C, steps), num_secrets=len(bits_C)
        )
    return CanaryDetail(
        num_trained=int(trained_C.sum()),
        num_references=int((~trained_C).sum()),
        num_ranked=int(ranked_C.sum()),
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


def _count_reached(bits_C: NDArray[np.float64], steps: Sequence[float]) -> list[int]:
    """Return the number of canaries with at least the exposure of each step (bits)."""
    return [int((bits_C >= step - _HAIR).sum()) for step in steps]


def compute_chance(bits: float, num_references: int) -> float:
    """Return the probability that an untrained secret, whose rank is uniform, reaches ``bits``."""
    ranks = num_references + 1
    return min(int(num_references / 2**bits + _HAIR), ranks) / ranks


def _spread(has_bits_C: NDArray[np.bool_], bits: NDArray[np.float64]) -> list[float | None]:
    """Return the bits of each canary in order, None for canaries without bits."""
    values = iter(bits.tolist())
    return [next(values) if has else None for has in has_bits_C.tolist()]


def _count_secret(canary: AuditCanary) -> int:
    window = SECRET.window(canary.document)
    assert window is not None, "a canary has a prompt and a secret"
    return window.continuation_tokens
