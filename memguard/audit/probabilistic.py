"""Number of samples that an attacker needs to extract a continuation.

    log p_z = sum_t log p(s_t | prefix, s_<t)      under a sampling scheme, -inf if it excludes a
                                                   token; one teacher-forced pass gives it
    P_n = 1 - (1 - p_z)^n                          probability that one of n samples is s
    n   = log(1 - P) / log(1 - p_z)                samples until that probability is P

This is (n, p)-discoverable extraction, Hayes et al. (arXiv 2410.19482). With
h(l) = log(-log(1 - e^l)), the logarithm of n is a difference:

    log n = h(log P) - h(log p_z)

so that probabilities like e^-5000 and counts like 2^62 are never computed.

The attack cost of a document is log10 n at P = 1/2 under the cheapest scheme. It allows to compare
mitigations if exact match does not: goldfish drops one token in k, so no continuation of fifty
tokens is generated greedily and every rate is 0, whether extraction takes a hundred samples or
10^30. It is the cost of sampling only: beam search, or an attacker who tries the likely tokens at
positions known to be dropped, may be cheaper.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memguard.audit.statistics import compute_rate
from memguard.records import MIN_FOR_QUANTILES, AttackCostScores

GREEDY = -1
"""Index of greedy decoding among the schemes."""
NEVER = -2
"""Index that means no scheme."""
QUERY_BOUNDS = (1, 10, 1_000, 1_000_000)
"""Numbers of samples for which `summarise_attack_cost` counts the extracted documents."""

# Below this log-probability, 1 - e^-p and p are equal in float64.
_TINY = -40.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttackCost:
    """Attack cost of N documents."""

    log10_queries_N: NDArray[np.float64]
    """Samples needed with the cheapest scheme; inf if no scheme can generate the continuation."""
    scheme_N: NDArray[np.int64]
    """Index of the cheapest scheme, the first in a tie; or `GREEDY` or `NEVER`."""


def log10_queries(log_pz: ArrayLike, probability: float = 0.5) -> NDArray[np.float64]:
    """Return log10 of the samples until one is the continuation with ``probability``.

    Not rounded to integers, but at least one sample (0.0). Inf if no number of samples is enough.

    Args:
        log_pz: log-probability of the continuation (nats), any shape; -inf means never.
        probability: between 0 and 1, both excluded.
    """
    assert 0 < probability < 1, "probability must be between 0 and 1"
    log_n = _log_hazard(math.log(probability)) - _log_hazard(log_pz)
    return np.maximum(log_n, 0.0) / math.log(10)


def attack_cost(
    log_pz_SN: NDArray[np.floating], verbatim_N: NDArray[np.bool_], probability: float = 0.5
) -> AttackCost:
    """Return the cheapest decoding method for each document: a scheme, or greedy decoding.

    Args:
        log_pz_SN: ``[schemes, N]`` log-probability of each continuation (nats) under each scheme.
        verbatim_N: whether greedy decoding extracts it, which takes one query.
        probability: probability that one of the samples is the continuation.
    """
    assert log_pz_SN.shape[1:] == verbatim_N.shape, "one value for each document"
    greedy_N = np.where(verbatim_N, 0.0, np.inf)
    # Greedy is first because argmin returns the first minimum.
    costs_WN = np.vstack([greedy_N, log10_queries(log_pz_SN, probability)])
    method_N = costs_WN.argmin(0)
    cheapest_N = np.take_along_axis(costs_WN, method_N[None], 0)[0]
    scheme_N = np.where(np.isinf(cheapest_N), NEVER, method_N + GREEDY)
    return AttackCost(log10_queries_N=cheapest_N, scheme_N=scheme_N)


def summarise_attack_cost(
    log10_queries_N: NDArray[np.float64], cluster_N: NDArray[np.int64] | None = None
) -> AttackCostScores:
    """Return quantiles, and the shares of documents within given numbers of samples.

    Quantiles are not interpolated but rounded up to integers of log10: half of the documents cost
    at most the median. A quantile among documents that are never generated is None, and so are all
    below `MIN_FOR_QUANTILES` documents.

    Args:
        log10_queries_N: costs as returned by `attack_cost`, inf for never.
        cluster_N: near-duplicate clusters; None: every document is its own.
    """
    num_documents = len(log10_queries_N)
    ordered_N = np.sort(log10_queries_N)

    def find_quantile(percent: int) -> int | None:
        if num_documents < MIN_FOR_QUANTILES:
            return None
        value = float(ordered_N[max(-(-percent * num_documents // 100), 1) - 1])
        return math.ceil(value) if math.isfinite(value) else None

    return AttackCostScores(
        num_documents=num_documents,
        num_never=int(np.isinf(ordered_N).sum()),
        quantile_10=find_quantile(10),
        median=find_quantile(50),
        quantile_90=find_quantile(90),
        within={
            bound: compute_rate(log10_queries_N <= math.log10(bound), cluster_N)
            for bound in QUERY_BOUNDS
        },
    )


def _log_hazard(log_p: ArrayLike) -> NDArray[np.float64]:
    """Return h(l) = log(-log(1 - e^l)), from -inf at l = -inf to inf at l = 0."""
    values = np.asarray(log_p, dtype=np.float64)
    # A sum of log-probabilities may exceed 0 by rounding.
    values = np.minimum(values, 0.0)
    assert not np.isnan(values).any(), "the scorer rejects scores that are not finite"
    tiny = values < _TINY
    safe = np.where(tiny, -1.0, values)
    with np.errstate(divide="ignore"):
        return np.where(tiny, values, np.log(-_log_one_minus_exp(safe)))


def _log_one_minus_exp(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log(1 - e^v) for v <= 0, exact at both ends (Mächler 2012)."""
    near_zero = values > -math.log(2)
    with np.errstate(divide="ignore"):
        return np.where(
            near_zero,
            np.log(-np.expm1(np.where(near_zero, values, -1.0))),
            np.log1p(-np.exp(np.where(near_zero, -1.0, values))),
        )
