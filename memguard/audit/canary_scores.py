"""What random secrets show: exposure, recitation, and a lower bound of the privacy loss.

Each canary was trained or not by the toss of a coin; those that were not are the references. What
is measured is the secret alone, given the true prefix before it.

Only secrets of one length in tokens are compared with each other, because a sum of nll over more
tokens is another number: ranks and guesses are of the length that most secrets have. Of the
canaries that `memguard.data` draws that is all of them; older runs may hold others, which are
counted and listed but not ranked. Which ones does not depend on the coins, so the bound holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memguard.audit.exposure import compute_exposures, summarise_exposures
from memguard.audit.extraction import AuditDocument, ExtractionProbe
from memguard.audit.numbers import Numbers
from memguard.audit.privacy import ASSUMPTIONS, compute_one_run_bound
from memguard.audit.probes import CanaryProbe
from memguard.audit.statistics import clopper_pearson
from memguard.records import CanaryScore, CanaryScores

SECRET = ExtractionProbe(min_prefix_tokens=1)
"""Cuts the window of a canary: its completion, given its prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditCanary:
    """One canary and what its training is known to have done."""

    document: AuditDocument
    was_trained: bool
    num_loss_tokens: int | None
    """Tokens of the secret that received loss at least once; None where nobody counted."""
    num_losses: int | None
    """How often any of them did."""


def score_canaries(
    canaries: Sequence[AuditCanary], probe: CanaryProbe, model: Numbers, base: Numbers | None
) -> CanaryScores | None:
    """Return what the canaries show; None without one of either kind.

    Guesses of the coins go by the log-probability of the secret, minus the base model's where there
    is one: how likely a secret is by its digits alone is then taken out. They abstain from a
    quarter of the coins, see `choose_num_guesses`.

    Args:
        canaries: C of them, in an order that does not depend on the coins.
        probe: settings.
        model: of each canary's window, see `OnePass`.
        base: the same of the model before training.
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
    summary = None if exposures is None else summarise_exposures(exposures)
    scores_C = -nll_C if base_C is None else base_C - nll_C
    bound = compute_one_run_bound(scores_C[ranked_C], coin_C[ranked_C], delta=probe.delta)
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
    known = [c.num_loss_tokens for c in trained if c.num_loss_tokens is not None]
    counted = len(known) == len(trained)
    repetitions = {canary.document.num_repetitions for canary in trained}
    return CanaryScores(
        num_trained=len(trained),
        num_references=int((~coin_C).sum()),
        num_ranked=int(ranked_C.sum()),
        num_ranked_references=int((~coin_C & ranked_C).sum()),
        num_repetitions=repetitions.pop() if len(repetitions) == 1 else None,
        verbatim=clopper_pearson(int(verbatim_C[coin_C].sum()), int(coin_C.sum())),
        reference_verbatim=clopper_pearson(int(verbatim_C[~coin_C].sum()), int((~coin_C).sum())),
        loss_coverage=float(sum(known) / sizes_C[coin_C].sum()) if counted else None,
        num_without_loss=sum(count == 0 for count in known) if counted else None,
        median_exposure_bits=None if summary is None else summary.median_bits,
        max_exposure_bits=None if summary is None else summary.max_bits,
        median_exposure_extrapolated_bits=None
        if summary is None
        else summary.median_extrapolated_bits,
        max_exposure_extrapolated_bits=None if summary is None else summary.max_extrapolated_bits,
        num_guesses=bound.num_guesses,
        num_right=bound.num_right,
        epsilon_lower_bound=bound.epsilon,
        epsilon_ceiling=bound.ceiling,
        delta=probe.delta,
        assumptions=list(ASSUMPTIONS),
        canaries=[describe(index) for index in range(len(canaries))],
    )


def _spread(has_bits_C: NDArray[np.bool_], bits: NDArray[np.float64]) -> list[float | None]:
    """Return the bits of each canary in order, None for those that have none."""
    known = iter(bits.tolist())
    return [next(known) if has else None for has in has_bits_C.tolist()]


def _count_secret(canary: AuditCanary) -> int:
    window = SECRET.window(canary.document)
    assert window is not None, "a canary has a prompt and a secret"
    return window.continuation_tokens
