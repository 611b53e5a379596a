"""Canary exposure in bits: by rank among references, and extrapolated.

    by rank         log2(num_references) - log2(rank),  rank = 1 + references at or below the canary
    extrapolated    -log2 P(a reference's nll <= the canary's), skew normal fitted to references

Carlini et al., "The Secret Sharer" (2019). A canary is a random secret that was trained;
references have the same form and were never inserted. A canary that left no trace is a reference
like any other: its exposure has a median of about 1 bit and reaches b bits with a probability of
at most 2^-b. The rank cannot say more than log2(num_references) bits; beyond it only the
extrapolation can, and that is the word of a fitted curve, not of a reference.

Ties count against exposure, so a model that gives every string one nll exposes nothing (slightly
less than 0 bits).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memguard.audit.statistics import compute_skew_normal_logcdf, fit_skew_normal

MIN_REFERENCES_TO_EXTRAPOLATE = 8
"""Below, the fit says nothing of the tail: from 8 references, 20 true bits read as 11 to 39."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposures:
    """C canaries among references of the same form."""

    num_references: int
    rank_C: NDArray[np.int64]
    """1 is below every reference, num_references + 1 above all."""
    by_rank_bits_C: NDArray[np.float64]
    """At most `ceiling_bits`."""
    extrapolated_bits_C: NDArray[np.float64] | None
    """None with fewer than 8 references, or where all have one nll."""

    @property
    def ceiling_bits(self) -> float:
        """What rank 1 is worth."""
        return math.log2(self.num_references)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExposureSummary:
    """What a report says of a group of canaries."""

    median_bits: float
    max_bits: float
    median_extrapolated_bits: float | None
    max_extrapolated_bits: float | None


def compute_exposures(canary_nll: ArrayLike, reference_nll: ArrayLike) -> Exposures | None:
    """Return the exposure of each canary; None without references.

    All must have one form and be scored alike: same number of tokens, same prefix. Where canaries
    come in several forms, call this once for each.

    Args:
        canary_nll: ``[C]`` nats; lower means more memorised.
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


def summarise_exposures(exposures: Exposures) -> ExposureSummary | None:
    """Return median and maximum over canaries; None without any."""
    bits_C, extrapolated_C = exposures.by_rank_bits_C, exposures.extrapolated_bits_C
    if not bits_C.size:
        return None
    median = None if extrapolated_C is None else float(np.median(extrapolated_C))
    highest = None if extrapolated_C is None else float(extrapolated_C.max())
    return ExposureSummary(
        median_bits=float(np.median(bits_C)),
        max_bits=float(bits_C.max()),
        median_extrapolated_bits=median,
        max_extrapolated_bits=highest,
    )


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
    assert nll.ndim == 1, f"one nll a string is one-dimensional, not {nll.shape}"
    assert np.isfinite(nll).all(), "a missing nll has no rank"
    return nll
