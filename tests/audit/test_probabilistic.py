"""Attack costs against arithmetic of hundreds of digits, and on a model of nine tokens."""

import math
from collections.abc import Sequence
from decimal import Context, Decimal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from memguard.audit.probabilistic import (
    GREEDY,
    NEVER,
    QUERY_BOUNDS,
    attack_cost,
    log10_queries,
    summarise_attack_cost,
)
from memguard.config.settings import SamplingScheme
from memguard.model.lm_head import Head
from memguard.model.token_scores import score_tokens

# 1 - e^-300 has 130 digits, and a relative error of 1e-15 is asked of a sum of such.
_DIGITS = Context(prec=400, Emax=10**6, Emin=-(10**6))


def _chance(log_pz: float) -> Decimal:
    return _DIGITS.exp(Decimal(log_pz))


@given(log_pz=st.floats(-300, -1e-9), probability=st.floats(1e-6, 1 - 1e-6))
def test_queries_equal_long_arithmetic(log_pz: float, probability: float) -> None:
    miss = _DIGITS.ln(_DIGITS.subtract(1, _chance(log_pz)))
    queries = _DIGITS.divide(_DIGITS.ln(_DIGITS.subtract(1, Decimal(probability))), miss)
    expected = max(0.0, float(_DIGITS.log10(queries)))
    # float64: the difference of h(log P) and h(log p) has numbers up to 300.
    assert float(log10_queries(log_pz, probability)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("log_pz", "queries"), [(-2, 4.766733), (-10, 15267.236087), (-50, 3.594e21)]
)
def test_queries_golden(log_pz: float, queries: float) -> None:
    # log1p(-.5) / log1p(-e^l), printed with seven, eleven and four digits.
    assert 10 ** log10_queries(log_pz) == pytest.approx(queries, rel=1e-4)
    assert round(float(10 ** log10_queries(-10)), 6) == 15267.236087


def test_the_ends_of_the_scale() -> None:
    log_pz = np.array([0.0, 1e-6, -1e-300, -5000.0, -np.inf])
    assert log10_queries(log_pz)[[0, 1, 2, 4]].tolist() == [0, 0, 0, np.inf]
    # log(n) = log(log 2) + 5000, by hand.
    assert log10_queries(log_pz)[3] == pytest.approx((5000 + math.log(math.log(2))) / math.log(10))
    assert log10_queries(np.zeros((2, 0))).shape == (2, 0)


def test_the_cheapest_scheme_of_each_document() -> None:
    log_pz_SN = np.array([[-9.0, -0.1, -5.0, -np.inf, -2.0], [-7.0, -8.0, -5.0, -np.inf, -np.inf]])
    cost = attack_cost(log_pz_SN, np.array([False, True, False, False, False]))
    assert cost.scheme_N.tolist() == [1, GREEDY, 0, NEVER, 0]
    expected = [float(log10_queries(-7.0)), 0, float(log10_queries(-5.0)), np.inf, 0.678]
    assert cost.log10_queries_N == pytest.approx(expected, abs=1e-3)  # log10 4.7667 is .6782


def test_without_schemes_only_greedy_is_left() -> None:
    cost = attack_cost(np.empty((0, 2)), np.array([True, False]))
    assert cost.log10_queries_N.tolist() == [0, np.inf]
    assert cost.scheme_N.tolist() == [GREEDY, NEVER]


def _summarised(costs: Sequence[float]) -> list[int | None]:
    summary = summarise_attack_cost(np.array(costs, dtype=np.float64))
    return [summary.quantile_10, summary.median, summary.quantile_90]


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0, math.inf]), min_size=1, max_size=40))
def test_quantiles_are_the_first_that_cover_the_share_rounded_up(costs: list[float]) -> None:
    expected = [
        next(c for c in sorted(costs) if 10 * sum(o <= c for o in costs) >= tenths * len(costs))
        for tenths in (1, 5, 9)
    ]
    # The cost of a single document is not told: rounded up, and nothing below ten documents.
    is_shown = len(costs) >= 10
    assert _summarised(costs) == [
        math.ceil(c) if is_shown and c != math.inf else None for c in expected
    ]


def test_summary_of_ten() -> None:
    costs = np.array([5.9, 0, 0.2, 1, 3, np.inf, 6, 12, np.inf, np.inf])
    summary = summarise_attack_cost(costs)
    assert (summary.num_documents, summary.num_never) == (10, 3)
    assert (summary.quantile_10, summary.median, summary.quantile_90) == (0, 6, None)
    assert {n: rate.num_matched for n, rate in summary.within.items()} == dict(
        zip(QUERY_BOUNDS, (1, 3, 4, 6), strict=True)
    )
    assert summary.within[10].ci == pytest.approx((0.0667, 0.6525), abs=5e-5)  # 3 of 10, SciPy


def test_summary_of_none() -> None:
    assert _summarised([]) == [None] * 3
    assert summarise_attack_cost(np.array([])).within[1].rate is None
    assert _summarised([math.inf] * 12) == [None] * 3


def _toy() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Logits [9, 11] and labels, in closed form."""
    t, v = np.arange(9)[:, None], np.arange(11)[None]
    return 3 * np.sin(1.7 * t + 0.9 * v) + 2 * np.cos(0.3 * t * v), (3 * np.arange(9) + 1) % 11


def test_the_pass_gives_what_the_costs_are_made_of() -> None:
    logits_TV, labels_T = _toy()
    head = Head(weight_VD=None, vocab_size=11, chunk_tokens=4)
    hidden_TV, label_ids = torch.from_numpy(logits_TV), torch.from_numpy(labels_T)

    def score(scheme: SamplingScheme) -> NDArray[np.float64]:
        scores = score_tokens(head, hidden_TV, label_ids, schemes=[scheme])
        found: NDArray[np.float64] = scores.sampled_SN[0].numpy()
        return found

    # Computed apart from this package from the closed form, printed with four and six digits.
    top_4 = score(SamplingScheme(top_k=4))
    assert np.flatnonzero(np.isfinite(top_4)).tolist() == [0, 3, 5]
    assert top_4[[0, 3, 5]] == pytest.approx([-1.7143, -1.4453, -2.629], abs=5e-5)
    whole = score(SamplingScheme())
    assert whole.sum() == pytest.approx(-40.700391, abs=5e-7)

    log_pz_SN = np.array([[top_4.sum()], [whole.sum()]])
    cost = attack_cost(log_pz_SN, np.array([False]))
    assert cost.scheme_N.tolist() == [1]
    # p_z is tiny: n = log 2 / p_z.
    expected = (40.700391 + math.log(math.log(2))) / math.log(10)
    assert cost.log10_queries_N[0] == pytest.approx(expected, abs=5e-7)
