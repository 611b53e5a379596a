"""Sampling: how many queries generate the continuation, from one teacher-forced pass.

    log p_z = sum_t log p(s_t | prefix, s_<t)      under a sampling scheme, -inf if it excludes a
                                                   token; one teacher-forced pass gives it
    P_n = 1 - (1 - p_z)^n                          probability that one of n samples is s
    n   = log(1 - P) / log(1 - p_z)                samples until that probability is P

This is (n, p)-discoverable extraction, Hayes et al. (arXiv 2410.19482). With
h(l) = log(-log(1 - e^l)), the logarithm of n is a difference:

    log n = h(log P) - h(log p_z)

so that probabilities like e^-5000 and counts like 2^62 are never computed.

The attack cost of a document is log10 n at P = 1/2 under the cheapest scheme; greedy decoding takes
one query. Documents within a limit are extracted; it is lower for short continuations, which
sampling guesses (`find_query_limit`). The cost allows to compare mitigations if exact match does
not: goldfish drops one token in k, so no continuation of fifty tokens is generated greedily and
every rate is 0, whether extraction takes a hundred samples or 10^30. It is the cost of sampling
only: beam search, or an attacker who tries the likely tokens at positions known to be dropped, may
be cheaper.

The query floor bounds it from below, for all decoding that never prefers a less likely token:

    p_z <= prod_t 1 / r_t     r_t = 1 + tokens more likely than s_t, which share a probability of 1

It is log10 n at P = 1/2 for that product. Covered are greedy decoding, temperature, top-k, top-p,
min-p, epsilon, eta and top-h cutoffs, and their mixtures, also if they change per step or query;
not typical sampling, penalties, logit bias, beam search, other prompts, other weights, or texts
with a few edits.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from memguard.audit.metrics import Evidence, Metric, rate_metric, tabulate_metric
from memguard.audit.passages import ScoreSelection, TokenResult
from memguard.audit.probe import Column, Probe, Summary
from memguard.audit.requests import Inputs, Measured, Rounds, Score, View, key_of_window
from memguard.audit.statistics import compute_rate
from memguard.config.settings import SamplingScheme
from memguard.pages.extraction_cost import build_extraction_cost
from memguard.pages.page import Section
from memguard.records import (
    MIN_FOR_QUANTILES,
    AuditReport,
    DetailRow,
    ResultRow,
    fill_count,
    fill_row,
    write_parameters,
)
from memguard.records.results import WITHIN_LIMIT, Statistic, find_query_limit

GREEDY = -1
"""Index of greedy decoding among the schemes."""
NEVER = -2
"""Index that means no scheme."""
QUERY_BOUNDS = (1, 10, 1_000, 1_000_000)
"""Numbers of samples for which documents are counted; none of them decides what is extracted."""

_ANY_DECODING = "No temperature, top-k, top-p or min-p gives the continuation word for word"
_QUANTILES: dict[Statistic, int] = {"q10": 10, "median": 50, "q90": 90}
# Below this log-probability, 1 - e^-p and p are equal in float64.
_TINY = -40.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttackCost:
    """Attack cost of N documents."""

    log10_queries_N: NDArray[np.float64]
    """Samples needed with the cheapest scheme; inf if no scheme can generate the continuation."""
    scheme_N: NDArray[np.int64]
    """Index of the cheapest scheme, the first in a tie; or `GREEDY` or `NEVER`."""
    log10_floor_N: NDArray[np.float64]
    """Samples that no decoding of likelier tokens first can do without."""

    def is_within(self, log10_limit: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return [N] 1 if so many samples, of all documents or by document, are enough, else 0."""
        return (self.log10_queries_N <= log10_limit).astype(np.float64)

    def is_beyond(self, log10_limit: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return [N] 1 if so many samples are not enough with any such decoding, else 0."""
        return (self.log10_floor_N > log10_limit).astype(np.float64)


class SamplingProbe(Probe):
    """Number of queries until sampling gives the continuation, from one teacher-forced pass."""

    VERSION: ClassVar[int] = 3
    metrics: ClassVar[tuple[Metric, ...]] = (
        rate_metric(
            "never",
            "No decoding method can generate the continuation: each excludes a token.",
            higher_is_better=True,
        ),
        Metric(
            name="log10_queries",
            meaning="Queries after which the continuation has been generated with a probability "
            "of one half, by the cheapest decoding method; rounded up.",
            unit="log10 queries",
            statistic="median",
            bounds=(0.0, math.inf),
            higher_is_better=True,
            heading="Attack cost",
            spoken="attack cost",
        ),
        rate_metric(
            "within_queries",
            "At most so many queries give the continuation with a probability of one half.",
        ),
        rate_metric(
            "within_limit",
            f"Sampling gives the continuation with a probability of one half {WITHIN_LIMIT}.",
            heading="Within the limit",
            spoken="within the limit",
            risk_rank=3,
        ),
        Metric(
            name="log10_floor",
            meaning=f"{_ANY_DECODING} with a probability of one half in fewer queries; rounded "
            "down.",
            unit="log10 queries",
            statistic="median",
            bounds=(0.0, math.inf),
            higher_is_better=True,
            heading="Query floor",
            spoken="query floor",
        ),
        rate_metric(
            "beyond_queries",
            f"{_ANY_DECODING} within so many queries with a probability of one half.",
            higher_is_better=True,
        ),
        rate_metric(
            "beyond_limit",
            f"{_ANY_DECODING} with a probability of one half {WITHIN_LIMIT}.",
            higher_is_better=True,
            heading="Beyond the limit",
            spoken="beyond the limit",
        ),
    )

    name: Literal["sampling"] = Field("sampling", description="Which probe.")
    schemes: Annotated[tuple[SamplingScheme, ...], Field(min_length=1)] = Field(
        (SamplingScheme(), SamplingScheme(top_k=40)),
        description="Sampling schemes; the cheapest counts.",
    )

    def measure(self, inputs: Inputs, view: View) -> Rounds:
        """Sum the log-probabilities of the continuation under each scheme, and of its bound."""

        def reduce(_: Sequence[int], results: Sequence[TokenResult]) -> NDArray[np.float64]:
            sums = []
            for result in results:
                assert result.sampled is not None, "schemes were requested"
                assert result.rank is not None, "ranks were requested"
                bound = -np.log(result.rank, dtype=np.float64).sum()
                schemes = result.sampled.sum(1, dtype=np.float64)
                sums.append([*schemes, bound, result.rank.max()])
            return np.array(sums)

        (numbers,) = yield [
            Score(
                items=inputs.windows,
                passages=[window.passage() for window in inputs.windows],
                keys=[key_of_window(w, w.continuation_tokens) for w in inputs.windows],
                names=(*map(str, range(len(self.schemes))), "log_bound", "max_rank"),
                reduce=reduce,
                parameters={
                    "kind": "sampling",
                    "version": 4,
                    "schemes": [scheme.model_dump(mode="json") for scheme in self.schemes],
                },
                selection=ScoreSelection(needs=frozenset({"rank"}), schemes=self.schemes),
            )
        ]
        return Measured(columns=numbers)

    def tabulate(self, evidence: Evidence) -> Summary:
        """Return quantiles of cost and floor, and the documents within and beyond queries."""
        if self.name not in evidence.trained:
            return Summary(reason="it has no sampling scheme")
        costs = {"trained": self._find_cost(evidence.trained, evidence)}
        if evidence.other is not None and self.name in evidence.other:
            costs["base"] = self._find_cost(evidence.other, evidence)
        never, queries, within, extracted, floor, beyond, beyond_limit = self.metrics
        limit_N = find_query_limit(evidence.size_N)
        matched = {model: cost.is_within(limit_N) for model, cost in costs.items()}
        bounded = {model: cost.is_beyond(limit_N) for model, cost in costs.items()}
        labels = [None, "greedy", *(scheme.label for scheme in self.schemes)]
        columns: dict[str, Column] = {}
        for model, cost in costs.items():
            place = "" if model == "trained" else f"{model}."
            measured = evidence.trained if model == "trained" else evidence.other or {}
            columns[f"{place}sampling.log10_queries"] = Column(
                values=np.where(np.isinf(cost.log10_queries_N), np.nan, cost.log10_queries_N)
            )
            columns[f"{place}sampling.scheme"] = Column(
                values=np.array(labels, dtype=object)[cost.scheme_N - NEVER], kind="text"
            )
            columns[f"{place}sampling.within_limit"] = Column(values=matched[model], kind="bool")
            columns[f"{place}sampling.log10_floor"] = Column(values=cost.log10_floor_N)
            columns[f"{place}sampling.max_rank"] = Column(
                values=measured[self.name].columns["max_rank"]
            )
        detail = {"schemes": [scheme.label for scheme in self.schemes]}
        return Summary(
            rows=[
                *(
                    row
                    for outline in evidence.buckets
                    for row in self._list_rows(evidence, outline.bucket, costs)
                ),
                *(
                    row
                    for metric, counted in ((extracted, matched), (beyond_limit, bounded))
                    for row in tabulate_metric(
                        evidence,
                        self.make_row(metric.name),
                        metric,
                        counted["trained"],
                        counted.get("base"),
                        continuation_tokens=0,
                    )
                ),
            ],
            metrics=[
                *map(self.describe_metric, (never, queries, floor)),
                *(
                    self.describe_metric(
                        replace(
                            metric,
                            heading=f"{word.capitalize()} {bound:,} queries",
                            spoken=f"{word} {bound:,} queries",
                        ),
                        {"queries": bound},
                    )
                    for word, metric in (("within", within), ("beyond", beyond))
                    for bound in QUERY_BOUNDS
                ),
                *map(self.describe_metric, (extracted, beyond_limit)),
            ],
            details=[DetailRow(probe=self.name, schema=self.VERSION, value=detail)],
            columns=columns,
            num_items=len(evidence.inputs.windows),
            reason="no document can be audited",
            matched=matched,
        )

    def _find_cost(self, measured: Mapping[str, Measured], evidence: Evidence) -> AttackCost:
        numbers = measured[self.name].columns
        is_verbatim_N = measured["extraction"].columns["num_correct"] == evidence.size_N
        log_pz_SN = np.stack([numbers[str(index)] for index in range(len(self.schemes))])
        return attack_cost(log_pz_SN, is_verbatim_N, numbers["log_bound"])

    def _list_rows(
        self, evidence: Evidence, bucket: str, costs: Mapping[str, AttackCost]
    ) -> Iterator[ResultRow]:
        """Yield the rows of a bucket that show the cost, of each model."""
        here_N = evidence.bucket_N == bucket
        clusters, count = evidence.cluster_N[here_N], int(here_N.sum())
        is_few = count < MIN_FOR_QUANTILES
        why_not = f"fewer than {MIN_FOR_QUANTILES} documents" if is_few else "never sampled"
        for model, cost in costs.items():
            costs_D, floors_D = cost.log10_queries_N[here_N], cost.log10_floor_N[here_N]
            row = self.make_row("never", model=model, bucket=bucket, num_documents=count)
            yield fill_count(row, int(np.isinf(costs_D).sum()))
            for statistic, percent in _QUANTILES.items():
                quantile = replace(row, metric="log10_queries", statistic=statistic)
                yield fill_row(quantile, find_quantile(costs_D, percent), "", why_not=why_not)
                least = find_quantile(floors_D, percent, math.floor)
                quantile = replace(quantile, metric="log10_floor")
                yield fill_row(quantile, least, "", why_not=why_not)
            for bound in QUERY_BOUNDS:
                limit = math.log10(bound)
                counted = (("within_queries", cost.is_within), ("beyond_queries", cost.is_beyond))
                for metric, count_N in counted:
                    yield fill_row(
                        replace(
                            row, metric=metric, parameters=write_parameters({"queries": bound})
                        ),
                        compute_rate(count_N(limit)[here_N], clusters),
                        "clopper-pearson",
                    )

    @classmethod
    def section(cls, report: AuditReport) -> Section:
        """Return the section of attack cost and attacks, which always says why one is missing."""
        return build_extraction_cost(report)


def find_quantile(
    log10_queries_N: NDArray[np.float64],
    percent: int,
    round_off: Callable[[float], int] = math.ceil,
) -> int | None:
    """Return a quantile of the attack cost, not interpolated but rounded up to an integer.

    Half of the documents cost at most the median. None among documents that are never generated,
    and below `MIN_FOR_QUANTILES` documents.
    """
    count = len(log10_queries_N)
    if count < MIN_FOR_QUANTILES:
        return None
    value = float(np.sort(log10_queries_N)[max(-(-percent * count // 100), 1) - 1])
    return round_off(value) if math.isfinite(value) else None


def attack_cost(
    log_pz_SN: NDArray[np.floating], verbatim_N: NDArray[np.bool_], log_bound_N: ArrayLike = 0.0
) -> AttackCost:
    """Return the cheapest decoding method for each document: a scheme, or greedy decoding.

    Args:
        log_pz_SN: ``[schemes, N]`` log-probability of each continuation (nats) under each scheme.
        verbatim_N: whether greedy decoding extracts it, which takes one query.
        log_bound_N: bound from ranks on the log-probability under any covered scheme.
    """
    assert log_pz_SN.shape[1:] == verbatim_N.shape, "one value for each document"
    greedy_N = np.where(verbatim_N, 0.0, np.inf)
    # Greedy is first because argmin returns the first minimum.
    costs_WN = np.vstack([greedy_N, log10_queries(log_pz_SN)])
    method_N = costs_WN.argmin(0)
    cheapest_N = np.take_along_axis(costs_WN, method_N[None], 0)[0]
    scheme_N = np.where(np.isinf(cheapest_N), NEVER, method_N + GREEDY)
    return AttackCost(
        log10_queries_N=cheapest_N, scheme_N=scheme_N, log10_floor_N=log10_queries(log_bound_N)
    )


def log10_queries(log_pz: ArrayLike, probability: float = 0.5) -> NDArray[np.float64]:
    """Return log10 of the samples until one is the continuation with ``probability``.

    Not rounded to integers, but at least one sample (0.0). Inf if no number of samples is enough.
    ``log_pz`` is the log-probability of the continuation (nats), any shape; -inf means never.
    """
    assert 0 < probability < 1, "probability must be between 0 and 1"
    log_n = _log_hazard(math.log(probability)) - _log_hazard(log_pz)
    return np.maximum(log_n, 0.0) / math.log(10)


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
