"""Attack costs against arithmetic of hundreds of digits, and on a model of nine tokens."""

import math
from decimal import Context, Decimal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from probe_examples import count, make_evidence, make_measured, to_tables
from record_examples import make_document, make_outline

from memguard.audit.probe import Summary
from memguard.audit.probes.sampling import (
    GREEDY,
    NEVER,
    QUERY_BOUNDS,
    SamplingProbe,
    attack_cost,
    find_quantile,
    log10_queries,
)
from memguard.audit.windows import Window
from memguard.config.settings import SamplingScheme
from memguard.model.lm_head import Head
from memguard.model.token_scores import score_tokens
from memguard.records.results import find_query_limit

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


def test_the_limit_of_queries_by_the_tokens_of_the_answer() -> None:
    # .12 decades a token up to 50 tokens: 3.02 queries for four, a million from fifty on.
    limits = 10 ** find_query_limit(np.array([2, 4, 25, 50, 400]))
    assert limits == pytest.approx([1.738, 3.020, 1000, 1e6, 1e6], abs=1e-3)


def test_without_schemes_only_greedy_is_left() -> None:
    cost = attack_cost(np.empty((0, 2)), np.array([True, False]))
    assert cost.log10_queries_N.tolist() == [0, np.inf]
    assert cost.scheme_N.tolist() == [GREEDY, NEVER]


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0, math.inf]), max_size=40))
def test_quantiles_are_the_first_that_cover_the_share_rounded_up(costs: list[float]) -> None:
    for tenths in (1, 5, 9):
        found = find_quantile(np.array(costs), 10 * tenths)
        # The cost of a single document is not told: rounded up, and nothing below ten documents.
        if len(costs) < 10:
            assert found is None
            continue
        covered = (
            c for c in sorted(costs) if 10 * sum(o <= c for o in costs) >= tenths * len(costs)
        )
        first = next(covered)
        assert found == (None if first == math.inf else math.ceil(first))


LOG_PZ = np.array([-9.0, -4, -30, -np.inf, -2, -7, -13, -14, -25, -np.inf])
"""Ten documents under one scheme; greedy decoding extracts the last."""


def tabulate(log_pz_N: NDArray[np.float64], other: bool = False) -> Summary:
    """Return the rows of a trained bucket, a control of three that costs more, and an empty one."""
    size, control = len(log_pz_N), np.array([-20.0, -20, -20])
    windows = [
        Window(
            document=make_document(
                np.arange(38), bucket=bucket, role="control" if bucket == "control" else "trained"
            ),
            start=0,
            prefix_tokens=4,
            continuation_tokens=34,
        )
        for bucket in [*["x"] * size, *["control"] * 3]
    ]
    num_correct = np.where(np.arange(size + 3) == size - 1, 34, 0)

    def measure(log_pz: NDArray[np.float64]) -> dict[str, object]:
        every = np.append(log_pz, control)
        # Ranks bound what is drawn from above; of what greedy decoding extracts all are 1.
        bound = np.where(num_correct > 0, 0, np.where(np.isinf(every), -50, every / 2))
        numbers = {"0": every, "log_bound": bound, "max_rank": np.exp(-bound / 34)}
        return {
            "sampling": make_measured(numbers),
            "extraction": make_measured({"num_correct": num_correct}),
        }

    evidence = make_evidence(
        windows,
        measure(log_pz_N),
        measure(log_pz_N - 3) if other else None,
        buckets=[make_outline("control", "control"), make_outline("x"), make_outline("empty")],
    )
    return SamplingProbe(schemes=(SamplingScheme(),)).tabulate(evidence)


def test_rows_of_a_bucket() -> None:
    tables = to_tables(tabulate(LOG_PZ))

    def within(queries: int, bucket: str = "x", **key: str) -> object:
        return tables.find(
            "sampling", "within_queries", bucket, parameters=f"queries={queries}", **key
        )

    assert count(tables.find("sampling", "never", "x")) == (1, 10)
    # log10 of e^9 log 2 is 3.75; e^13 and e^14 are within a million, e^25 is not.
    assert [count(within(queries)) for queries in QUERY_BOUNDS] == [
        (1, 10),
        (2, 10),
        (4, 10),
        (7, 10),
    ]
    # 2 of 10, SciPy.
    assert within(10).ci == pytest.approx((0.0252, 0.5561), abs=5e-5)
    costs = {
        name: tables.find("sampling", "log10_queries", "x", statistic=name)
        for name in ("q10", "median", "q90")
    }
    assert [row.value for row in costs.values()] == [0, 4, 13]
    # Of 34 tokens, 10^4.08 queries are within the limit: e^9 is, e^13 is not.
    risk = tables.risks("x")["attack_cost"]
    assert (risk.metric, risk.parameters, count(risk)) == ("within_limit", "", (5, 10))
    assert risk.minus_control == pytest.approx(0.5)
    assert risk.minus_control_ci is not None
    assert [within(n).minus_control for n in QUERY_BOUNDS] == [None] * 4
    assert tables.find("sampling", "within_limit", "control").minus_control is None
    assert list(tables.risks("x")) == ["attack_cost"]
    assert count(tables.find("sampling", "within_limit", "empty")) == (0, 0)
    few = tables.find("sampling", "log10_queries", "control", statistic="median")
    assert (few.value, few.missing_because) == (None, "fewer than 10 documents")
    assert count(within(1, "empty")) == (0, 0)
    assert not any(row.model == "base" or row.against for row in tables.results)
    assert tables.find_detail("sampling") == {"schemes": ["T=1"]}


def test_columns_of_each_document() -> None:
    summary = tabulate(LOG_PZ, other=True)
    assert summary.num_items == 13
    scheme = summary.columns["sampling.scheme"].values.tolist()
    assert scheme == ["T=1" if cost > -np.inf else None for cost in LOG_PZ[:9]] + [
        "greedy",
        *["T=1"] * 3,
    ]
    shown = summary.columns["sampling.log10_queries"].values
    # Never is missing; greedy decoding takes one query.
    assert np.flatnonzero(np.isnan(shown)).tolist() == [3]
    assert shown[9] == 0
    assert summary.matched["trained"].tolist() == (np.nan_to_num(shown, nan=99) <= 4.08).tolist()
    assert summary.matched["base"].sum() == 3
    within = summary.columns["sampling.within_limit"].values
    assert within.tolist() == summary.matched["trained"].tolist()
    assert "base.sampling.scheme" in summary.columns
    assert set(tabulate(LOG_PZ).matched) == {"trained"}


def test_rows_of_the_floor() -> None:
    summary = tabulate(LOG_PZ, other=True)
    tables = to_tables(summary)
    floors = {
        name: tables.find("sampling", "log10_floor", "x", statistic=name).value
        for name in ("q10", "median", "q90")
    }
    # Draws for P = 1/2 at e^-7/2 and e^-15: log10 of 22.6 and of 2,265,890; rounded down.
    assert floors == {"q10": 0, "median": 1, "q90": 6}
    beyond = {
        bound: count(tables.find("sampling", "beyond_queries", "x", parameters=f"queries={bound}"))
        for bound in QUERY_BOUNDS
    }
    # e^-1 takes 1.51 draws, e^-2 4.77 and e^-3.5 22.6; the greedy one is not beyond one query.
    assert beyond == {1: (9, 10), 10: (7, 10), 1000: (3, 10), 1_000_000: (2, 10)}
    row = tables.find("sampling", "beyond_limit", "x")
    assert (count(row), row.interval) == ((3, 10), "clopper-pearson")
    # All three of the control: e^-10 takes 10^4.18 draws, the limit of 34 tokens is 10^4.08.
    assert row.minus_control == pytest.approx(-0.7)
    assert count(tables.find("sampling", "beyond_limit", "x", model="base")) == (3, 10)
    assert tables.find("sampling", "beyond_limit", "x", against="base").interval == "tango"
    assert tables.find_metric("sampling", "beyond_limit").risk_rank is None
    assert "beyond_limit" not in tables.risks("x")
    for place in ("", "base."):
        floor, cost = (
            summary.columns[f"{place}sampling.{name}"].values
            for name in ("log10_floor", "log10_queries")
        )
        assert (floor <= np.where(np.isnan(cost), np.inf, cost)).all()
        assert f"{place}sampling.max_rank" in summary.columns
    assert summary.columns["sampling.log10_floor"].values[9] == 0


def test_a_floor_says_nothing_of_a_text_with_one_edit() -> None:
    """Nine tokens: the first true one is the least likely, all others follow whatever it was."""
    logits_TV = np.full((20, 9), -9.0)
    labels_T = np.arange(20) % 9
    logits_TV[np.arange(20), labels_T] = 9.0
    logits_TV[0] = -np.arange(9.0)
    labels_T[0] = 8
    head = Head(weight_VD=None, vocab_size=9)
    scores = score_tokens(
        head, torch.from_numpy(logits_TV), torch.from_numpy(labels_T), needs=frozenset({"rank"})
    )
    assert scores.rank_N.tolist() == [9, *[1] * 19]
    # Greedy text has one edit, and a probability near 1 at a low temperature.
    assert (scores.argmax_N.numpy() != labels_T).sum() == 1
    floor = log10_queries(-np.log(scores.rank_N.numpy()).sum())
    assert 10**floor == pytest.approx(math.log(2) / -math.log(8 / 9))


def test_rows_of_the_base_model_and_the_paired_difference() -> None:
    tables = to_tables(tabulate(LOG_PZ, other=True))
    million = {"parameters": "queries=1000000"}
    # e^16 and e^17 are no longer within a million; the greedy one still costs one query.
    assert count(tables.find("sampling", "within_queries", "x", model="base", **million)) == (5, 10)
    assert tables.find("sampling", "within_queries", "x", against="base", **million) is None
    base = tables.find("sampling", "within_limit", "x", model="base")
    assert (count(base), base.minus_control) == ((3, 10), None)
    change = tables.find("sampling", "within_limit", "x", against="base")
    assert (change.value, change.interval) == (pytest.approx(0.2), "tango")


def test_a_cost_that_is_infinite_has_no_quantile() -> None:
    tables = to_tables(tabulate(np.append(np.full(11, -np.inf), -1.0)))
    median = tables.find("sampling", "log10_queries", "x", statistic="median")
    assert (median.value, median.missing_because) == (None, "never sampled")


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
