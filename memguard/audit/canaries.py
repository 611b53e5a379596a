"""Results of canaries, random secrets: exposure, extraction, and guesses for the bound of epsilon.

A coin flip decides whether each canary is trained; canaries that were not trained are the
references. Only the secret is scored, given the true prefix before it.

    exposure by rank   log2(num_references) - log2(rank),  rank = 1 + references at or below it
    extrapolated       -log2 P(a reference's nll <= the canary's), skew normal fitted to references

Carlini et al., "The Secret Sharer" (2019). A canary that was not memorized behaves like a
reference: its exposure has a median of about 1 bit and reaches b bits with a probability of at most
2^-b. The exposure by rank is at most log2(num_references) bits; larger values are only
extrapolated. Ties count against exposure, so a model with the same nll for every string exposes
nothing (slightly less than 0 bits).

Only secrets of the same length in tokens are compared with each other, because the sum of nll
depends on the number of tokens: ranks and guesses cover the most frequent length. All canaries that
`memguard.data` draws have it; others are counted and listed but not ranked. The selection does not
depend on the coins, so the bound holds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memguard.audit.cache import ScoreMatrix
from memguard.audit.epsilon_bound import (
    ASSUMPTIONS,
    compute_guess_scores,
    compute_one_run_bound,
)
from memguard.audit.extraction import SECRET, AuditDocument
from memguard.audit.statistics import clopper_pearson, compute_skew_normal_logcdf, fit_skew_normal
from memguard.records import CanaryScore, CanaryScores

MIN_REFERENCES_TO_EXTRAPOLATE = 8
"""With fewer, the fit does not describe the tail: with 8 references, 20 true bits are estimated as
11 to 39."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposures:
    """C canaries among references of the same form."""

    num_references: int
    rank_C: NDArray[np.int64]
    """1 if below every reference, num_references + 1 if above all."""
    by_rank_bits_C: NDArray[np.float64]
    """At most log2(num_references)."""
    extrapolated_bits_C: NDArray[np.float64] | None
    """None with fewer than 8 references, or if all have the same nll."""


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
        extrapolated_bits_C=_extrapolate(canary_C, reference_R),
    )


def summarise_exposures(exposures: Exposures | None) -> dict[str, Any]:
    """Return median and maximum over canaries, by field of `CanaryScores`; None where unknown."""
    bits = {
        "": None if exposures is None else exposures.by_rank_bits_C,
        "extrapolated_": None if exposures is None else exposures.extrapolated_bits_C,
    }
    known = {name: bits_C for name, bits_C in bits.items() if bits_C is not None and bits_C.size}
    return {
        f"{which}_exposure_{name}bits": float(compute(known[name])) if name in known else None
        for name in bits
        for which, compute in (("median", np.median), ("max", np.max))
    }


def _extrapolate(
    canary_C: NDArray[np.float64], reference_R: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    if len(reference_R) < MIN_REFERENCES_TO_EXTRAPOLATE:
        return None
    fit = fit_skew_normal(reference_R)
    if fit is None:
        return None
    # Adding 0 turns the -0.0 of a certain event into 0.
    return -compute_skew_normal_logcdf(canary_C, fit) / math.log(2) + 0.0


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


def score_canaries(
    canaries: Sequence[AuditCanary],
    model: ScoreMatrix,
    base: ScoreMatrix | None,
    *,
    delta: float,
) -> CanaryScores | None:
    """Return the results of the canaries; None unless some were trained and some left out.

    The coins are guessed from the nll of each secret, adjusted for the base model's if there is one
    (`compute_guess_scores`). A quarter of the coins is not guessed (`choose_num_guesses`).

    Args:
        canaries: C canaries, in an order that does not depend on the coins.
        model: numbers of each canary's window, see `probes.canaries`.
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
    ranked_scores = compute_guess_scores(
        nll_C[ranked_C], None if base_C is None else base_C[ranked_C]
    )
    bound = compute_one_run_bound(ranked_scores, coin_C[ranked_C], delta=delta)
    assert bound is not None, "there are canaries"
    by_rank_C: list[float | None] = [None] * len(canaries)
    extrapolated_C = by_rank_C
    if exposures is not None:
        by_rank_C = _spread(coin_C & ranked_C, exposures.by_rank_bits_C)
        if exposures.extrapolated_bits_C is not None:
            extrapolated_C = _spread(coin_C & ranked_C, exposures.extrapolated_bits_C)

    def describe(index: int) -> CanaryScore:
        canary = canaries[index]
        return CanaryScore(
            id=canary.document.id,
            was_trained=bool(coin_C[index]),
            nll=float(nll_C[index]),
            base_nll=None if base_C is None else float(base_C[index]),
            num_secret_tokens=int(sizes_C[index]),
            num_repetitions=canary.document.num_repetitions or 0,
            num_loss_tokens=canary.num_loss_tokens,
            exposure_bits=by_rank_C[index],
            exposure_extrapolated_bits=extrapolated_C[index],
            verbatim=bool(verbatim_C[index]),
        )

    trained = [canary for canary in canaries if canary.was_trained]
    recorded = [c.num_loss_tokens for c in trained if c.num_loss_tokens is not None]
    counted = len(recorded) == len(trained)
    repetitions = {canary.document.num_repetitions for canary in trained}
    return CanaryScores(
        num_trained=len(trained),
        num_references=int((~coin_C).sum()),
        num_ranked=int(ranked_C.sum()),
        num_ranked_references=int((~coin_C & ranked_C).sum()),
        num_repetitions=repetitions.pop() if len(repetitions) == 1 else None,
        verbatim=clopper_pearson(int(verbatim_C[coin_C].sum()), int(coin_C.sum())),
        reference_verbatim=clopper_pearson(int(verbatim_C[~coin_C].sum()), int((~coin_C).sum())),
        loss_coverage=float(sum(recorded) / sizes_C[coin_C].sum()) if counted else None,
        num_without_loss=sum(count == 0 for count in recorded) if counted else None,
        **summarise_exposures(exposures),
        num_guesses=bound.num_guesses,
        num_right=bound.num_right,
        epsilon_lower_bound=bound.epsilon,
        epsilon_ceiling=bound.ceiling,
        delta=delta,
        assumptions=list(ASSUMPTIONS),
        canaries=[describe(index) for index in range(len(canaries))],
    )


def _spread(has_bits_C: NDArray[np.bool_], bits: NDArray[np.float64]) -> list[float | None]:
    """Return the bits of each canary in order, None for canaries without bits."""
    values = iter(bits.tolist())
    return [next(values) if has else None for has in has_bits_C.tolist()]


def _count_secret(canary: AuditCanary) -> int:
    window = SECRET.window(canary.document)
    assert window is not None, "a canary has a prompt and a secret"
    return window.continuation_tokens
