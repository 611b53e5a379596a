"""Rows of a metric for any probe: what is counted, and what each is compared with."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from probe_examples import count, make_evidence
from record_examples import make_document, make_outline
from result_examples import KINDS
from scipy import stats

from memguard.audit.metrics import tabulate_metric
from memguard.audit.probes.window_scores import WINDOW_METRICS
from memguard.audit.windows import Window
from memguard.records import NO_DOCUMENTS, ONE_TEXT, ResultRow, Tables

METRICS = {metric.name: metric for metric in WINDOW_METRICS}
NUM_TOKENS = 50
NAN = np.nan
OUTLINES = (make_outline("x0", "control"), make_outline("x4"))


def _tabulate(
    metric: str,
    control: Sequence[float],
    trained: Sequence[float],
    base: Sequence[float] | None = None,
    *,
    clusters: Sequence[int] | None = None,
    buckets: Any = OUTLINES,
) -> Tables:
    """Return the rows of documents of two buckets; ``base`` is of both, the control first."""
    kinds = [("x0", "control")] * len(control) + [("x4", "trained")] * len(trained)
    windows = [
        Window(
            document=make_document(
                np.arange(5),
                name=f"{number}",
                bucket=bucket,
                role=role,
                cluster=None if clusters is None else clusters[number],
            ),
            start=0,
            prefix_tokens=2,
            continuation_tokens=3,
        )
        for number, (bucket, role) in enumerate(kinds)
    ]
    row = ResultRow(
        probe="p", metric=metric, statistic="mean", bucket="", parameters="a=1", num_documents=0
    )
    rows = tabulate_metric(
        make_evidence(windows, {}, buckets=buckets),
        row,
        METRICS[metric],
        np.array([*control, *trained], dtype=np.float64),
        None if base is None else np.array(base, dtype=np.float64),
        continuation_tokens=NUM_TOKENS,
    )
    return Tables(results=tuple(rows))


def _find(tables: Tables, metric: str, bucket: str, **key: Any) -> ResultRow:
    row = tables.find("p", metric, bucket, parameters="a=1", **key)
    assert row is not None
    return row


def test_change_from_base_is_model_minus_base_of_the_same_documents() -> None:
    draw = np.random.default_rng(0)
    trained = 0.6 + 0.4 * draw.random(12)
    base = np.concatenate([np.full(8, 0.25), trained - np.linspace(0.1, 0.6, 12)])
    tables = _tabulate("token_accuracy", [0.25] * 8, trained.tolist(), base.tolist())
    model, before, changed, of_control = (
        _find(tables, "token_accuracy", bucket, **key)
        for bucket, key in (
            ("x4", {}),
            ("x4", {"model": "base"}),
            ("x4", {"against": "base"}),
            ("x0", {"against": "base"}),
        )
    )
    assert changed.value == pytest.approx(0.35) == pytest.approx(model.value - before.value)
    # The jackknife of the logit between -1 and 1, which is log((1 + d) / (1 - d)).
    change = np.linspace(0.1, 0.6, 12)
    without = np.arctanh([np.delete(change, n).mean() for n in range(12)])
    reach = stats.t.ppf(0.975, 11) * np.sqrt(11 / 12 * ((without - np.arctanh(0.35)) ** 2).sum())
    expected = np.tanh(np.arctanh(0.35) + np.array([-reach, reach]))
    assert changed.ci == pytest.approx(expected)
    assert of_control.value == 0
    # Eight documents that all change by 0: what is 0 of 8, in either direction.
    assert of_control.ci == pytest.approx((0.025 ** (1 / 8) - 1, 1 - 0.025 ** (1 / 8)))
    assert _find(tables, "token_accuracy", "x0").minus_control is of_control.minus_control is None
    assert model.minus_control == pytest.approx(trained.mean() - 0.25)
    # The counterfactual: the change, minus the control's.
    assert changed.minus_control == pytest.approx(0.35)
    assert [model.interval, before.interval, changed.interval] == ["jackknife"] * 3


def test_rates_are_counted() -> None:
    tables = _tabulate("verbatim", [0] * 20, [1] * 15 + [0] * 5, [0] * 20 + [1] * 5 + [0] * 15)
    row, change = _find(tables, "verbatim", "x4"), _find(tables, "verbatim", "x4", against="base")
    assert count(row) == (15, 20)
    assert count(_find(tables, "verbatim", "x4", model="base")) == (5, 20)
    assert (row.minus_control, change.value, change.num_matched) == (0.75, 0.5, None)
    assert row.minus_control_ci[0] > 0
    assert _find(tables, "verbatim", "x0").value == 0
    # Ten documents that only the model matches, and none that only the base does.
    low, high = change.ci
    assert 0 < low < stats.binomtest(10, 20).proportion_ci().low
    assert high == pytest.approx(stats.binomtest(10, 20).proportion_ci().high)
    assert (row.interval, change.interval) == ("clopper-pearson", "tango")


def test_missing_numbers_are_counted_and_left_out() -> None:
    tables = _tabulate(
        "extraction_strength",
        [NAN, 0.5, 0.25],
        [0.5, NAN, 1.0, 0.75],
        # Where one of the two is missing there is no difference.
        [NAN, NAN, 0.25, 0.5, 0.5, NAN, 0.25],
    )
    control, row = (_find(tables, "extraction_strength", bucket) for bucket in ("x0", "x4"))
    assert (control.num_documents, control.num_missing) == (2, 1)
    assert (row.num_documents, row.num_missing) == (3, 1)
    assert (row.value, row.minus_control) == (0.75, 0.375)
    assert _find(tables, "extraction_strength", "x4", against="base").value == 0.25


@pytest.mark.parametrize("metric", ["longest_run", "verbatim"])
def test_without_numbers_every_row_has_the_reason(metric: str) -> None:
    tables = _tabulate(metric, [NAN] * 3, [NAN] * 3, [NAN] * 6)
    assert len(tables.results) == 6
    for row in tables.results:
        assert (row.num_documents, row.num_missing) == (0, 3)
        assert row.value is row.ci is row.minus_control is None
        assert row.missing_because == NO_DOCUMENTS


def test_without_base_or_control_there_is_nothing_to_compare_with() -> None:
    (row,) = _tabulate("logprob", [], [-1.0, -2.0], buckets=OUTLINES[1:]).results
    assert (row.value, row.minus_control) == (-1.5, None)
    # A control bucket of which nothing is long enough is no control.
    tables = _tabulate("logprob", [], [-1.0, -2.0])
    assert _find(tables, "logprob", "x4").minus_control is None
    assert not any(row.against or row.model == "base" for row in tables.results)
    # Documents that the base model has no number of.
    tables = _tabulate("token_accuracy", [], [0.5, 1.0], [NAN, NAN])
    before = _find(tables, "token_accuracy", "x4", model="base")
    assert (before.value, before.missing_because) == (None, "not measured with the base model")


def test_a_confidential_value_of_one_text_is_not_shown() -> None:
    one = _tabulate("logprob", [-1.0], [-2.0, -2.5], [-3.0] * 3, clusters=[0, 1, 1])
    for row in one.results:
        assert (row.value, row.minus_control, row.missing_because) == (None, None, ONE_TEXT)
    two = _tabulate("logprob", [-1.0], [-2.0, -2.5], [-3.0] * 3)
    # The difference from a single control document would be its value.
    assert _find(two, "logprob", "x4").value == -2.25
    assert {row.minus_control for row in two.results} == {None}
    assert {row.value for row in two.results if row.bucket == "x0"} == {None}


def test_copies_count_as_one_piece_of_evidence() -> None:
    """The same numbers, once as 40 texts and once as four of ten copies each."""

    def build(num_clusters: int) -> list[ResultRow]:
        tables = _tabulate(
            "token_accuracy",
            [],
            np.repeat([0.2, 0.4, 0.6, 0.8], 10).tolist(),
            [0] * 40,
            clusters=[n * num_clusters // 40 for n in range(40)],
            buckets=OUTLINES[1:],
        )
        return [_find(tables, "token_accuracy", "x4", against=key) for key in (None, "base")]

    for alone, copied in zip(build(40), build(4), strict=True):
        assert alone.value == pytest.approx(0.5) == pytest.approx(copied.value)
        assert copied.high - copied.low > 2 * (alone.high - alone.low)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    metric=st.sampled_from(sorted(METRICS)),
    spread=st.sampled_from([0.02, 0.2, 2.0]),
)
@example(seed=2268, metric="logprob", spread=0.02)  # The control is one text.
def test_numbers_stay_within_their_bounds(seed: int, metric: str, spread: float) -> None:
    draw, kind = np.random.default_rng(seed), METRICS[metric]
    span = NUM_TOKENS if kind.is_length else 1

    def draw_values() -> NDArray[np.float64]:
        if kind.is_rate:
            return draw.integers(0, 2, 30).astype(float)
        values = span * draw.beta(spread, spread, 30)
        return -values if metric == "logprob" else values

    values, base = draw_values(), draw_values()
    clusters = np.sort(draw.integers(0, 12, 30)) + 50 * (np.arange(30) < 10)
    tables = _tabulate(metric, values[:10], values[10:], base, clusters=clusters.tolist())  # type: ignore[arg-type]
    means = {"x0": values[:10].mean(), "x4": values[10:].mean()}
    for row in tables.results:
        if row.value is None:
            assert metric == "logprob", "only this one is not shown of a single text"
            continue
        least, most = (-1, 1) if row.against else (0, 1)
        if row.against is None and row.model == "trained":
            assert row.value == pytest.approx(means[row.bucket])
        if metric == "logprob":
            assert row.against or row.ci is None or row.high <= 0
            continue
        if row.ci is not None:
            assert least * span <= row.low <= row.value <= row.high <= most * span
        if row.minus_control_ci is not None:
            low, high = row.minus_control_ci
            most = 2 if row.against else 1
            assert -most * span <= low <= row.minus_control <= high <= most * span


def test_every_metric_says_what_it_is() -> None:
    for name, metric in KINDS.items():
        assert metric.meaning.endswith("."), name
        assert metric.unit, name
        assert metric.is_rate == (metric.statistic == "rate"), name
