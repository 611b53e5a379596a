"""Rows of the report for any probe: what is counted, and what each is compared with."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from record_examples import make_outline
from scipy import stats

from memguard.audit.extraction import AuditDocument
from memguard.audit.metrics import METRICS
from memguard.audit.tables import ProbeTable, build_measures
from memguard.records import Interval, Measure, Rate

MakeDocument = Callable[..., AuditDocument]
NUM_TOKENS = 50
NAN = np.nan


OUTLINES = (make_outline("x0", "control"), make_outline("x4"))


def _measure(
    make_document: MakeDocument,
    metric: str,
    control: list[float],
    trained: list[float],
    base: list[float] | None = None,
    **fields: Any,
) -> Measure:
    documents = [
        make_document(np.arange(5), name=f"{number}", bucket=bucket, role=role)
        for number, (bucket, role) in enumerate(
            [("x0", "control")] * len(control) + [("x4", "trained")] * len(trained)
        )
    ]
    table = ProbeTable(
        probe="grid",
        version=3,
        parameters={"offset": 1},
        continuation_tokens=NUM_TOKENS,
        model={metric: np.array(control + trained, dtype=np.float64)},
        base=None if base is None else {metric: np.array(base, dtype=np.float64)},
    )
    (measure,) = build_measures(
        [table], fields.get("documents", documents), fields.get("outlines", OUTLINES)
    )
    return measure


def test_change_from_base_is_model_minus_base_of_the_same_documents(
    make_document: MakeDocument,
) -> None:
    draw = np.random.default_rng(0)
    trained = 0.6 + 0.4 * draw.random(12)
    base = np.concatenate([np.full(8, 0.25), trained - np.linspace(0.1, 0.6, 12)])
    measure = _measure(make_document, "token_accuracy", [0.25] * 8, trained.tolist(), base.tolist())
    assert (measure.probe, measure.version, measure.parameters) == ("grid", 3, {"offset": 1})
    assert (measure.unit, measure.higher_is_better) == ("share", False)
    control, row = measure.buckets
    assert (control.bucket, row.bucket) == ("x0", "x4")
    assert isinstance(row.model, Interval)
    assert isinstance(row.base, Interval)
    assert row.change_from_base.value == pytest.approx(0.35)
    assert row.change_from_base.value == pytest.approx(row.model.value - row.base.value)
    assert row.change_from_base.ci is not None
    # The jackknife of the logit between -1 and 1, which is log((1 + d) / (1 - d)).
    change = np.linspace(0.1, 0.6, 12)
    without = np.arctanh([np.delete(change, n).mean() for n in range(12)])
    reach = stats.t.ppf(0.975, 11) * np.sqrt(11 / 12 * ((without - np.arctanh(0.35)) ** 2).sum())
    expected = np.tanh(np.arctanh(0.35) + np.array([-reach, reach]))
    assert row.change_from_base.ci == pytest.approx(expected)
    assert control.change_from_base.value == 0
    # Eight documents that all change by 0: what is 0 of 8, in either direction.
    assert control.change_from_base.ci == pytest.approx(
        (0.025 ** (1 / 8) - 1, 1 - 0.025 ** (1 / 8))
    )
    assert control.minus_control is None
    assert row.minus_control.value == pytest.approx(trained.mean() - 0.25)


def test_rates_are_counted(make_document: MakeDocument) -> None:
    measure = _measure(
        make_document, "verbatim", [0] * 20, [1] * 15 + [0] * 5, [0] * 20 + [1] * 5 + [0] * 15
    )
    control, row = measure.buckets
    assert isinstance(row.model, Rate)
    assert isinstance(row.base, Rate)
    assert (row.model.num_matched, row.model.num_documents) == (15, 20)
    assert (row.base.num_matched, row.base.num_documents) == (5, 20)
    assert row.change_from_base.value == 0.5
    assert row.minus_control.value == 0.75
    assert row.minus_control.ci[0] > 0
    assert isinstance(control.model, Rate)
    assert control.model.rate == 0
    # Ten documents that only the model matches, and none that only the base does.
    low, high = row.change_from_base.ci
    assert 0 < low < stats.binomtest(10, 20).proportion_ci().low
    assert high == pytest.approx(stats.binomtest(10, 20).proportion_ci().high)


def test_missing_numbers_are_counted_and_left_out(make_document: MakeDocument) -> None:
    measure = _measure(
        make_document,
        "extraction_strength",
        [NAN, 0.5, 0.25],
        [0.5, NAN, 1.0, 0.75],
        # Where one of the two is missing there is no difference.
        [NAN, NAN, 0.25, 0.5, 0.5, NAN, 0.25],
    )
    control, row = measure.buckets
    assert (control.num_documents, control.num_missing) == (2, 1)
    assert (row.num_documents, row.num_missing) == (3, 1)
    assert isinstance(row.model, Interval)
    assert row.model.value == 0.75
    assert row.change_from_base.value == 0.25
    assert row.minus_control.value == 0.375


def test_without_numbers_everything_is_null(make_document: MakeDocument) -> None:
    measure = _measure(make_document, "longest_run", [NAN] * 3, [NAN] * 3, [NAN] * 6)
    for row in measure.buckets:
        assert (row.num_documents, row.num_missing) == (0, 3)
        assert row.model is row.base is row.change_from_base is row.minus_control is None
    rate = _measure(make_document, "verbatim", [NAN] * 3, [NAN] * 3).buckets[1].model
    assert isinstance(rate, Rate)
    assert (rate.num_documents, rate.rate) == (0, None)


def test_without_base_or_control_there_is_nothing_to_compare_with(
    make_document: MakeDocument,
) -> None:
    measure = _measure(make_document, "logprob", [], [-1.0, -2.0], outlines=OUTLINES[1:])
    (row,) = measure.buckets
    assert row.model is not None
    assert row.base is row.change_from_base is row.minus_control is None
    # A control bucket of which nothing is long enough is no control.
    empty = _measure(make_document, "logprob", [], [-1.0, -2.0]).buckets[1]
    assert empty.minus_control is None


def test_copies_count_as_one_piece_of_evidence(make_document: MakeDocument) -> None:
    """The same numbers, once as 40 texts and once as four of ten copies each."""
    value_N = np.repeat([0.2, 0.4, 0.6, 0.8], 10)

    def build(num_clusters: int) -> tuple[Interval, Interval]:
        documents = [
            make_document(np.arange(5), name=f"{n}", bucket="x4", cluster=n * num_clusters // 40)
            for n in range(40)
        ]
        measure = _measure(
            make_document,
            "token_accuracy",
            [],
            value_N.tolist(),
            np.zeros(40).tolist(),
            documents=documents,
            outlines=OUTLINES[1:],
        )
        (row,) = measure.buckets
        assert isinstance(row.model, Interval)
        assert row.change_from_base is not None
        return row.model, row.change_from_base

    def width(interval: Interval) -> float:
        return interval.ci[1] - interval.ci[0]

    for alone, copied in zip(build(40), build(4), strict=True):
        assert alone.value == pytest.approx(0.5)
        assert copied.value == pytest.approx(0.5)
        assert width(copied) > 2 * width(alone)


def test_order_and_other_tables_do_not_matter(make_document: MakeDocument) -> None:
    draw = np.random.default_rng(0)
    documents = [
        make_document(np.arange(5), name=f"{n}", bucket="x4" if n < 9 else "x0") for n in range(18)
    ]

    def table(probe: str, value_N: NDArray[np.float64]) -> ProbeTable:
        return ProbeTable(
            probe=probe,
            version=1,
            parameters={},
            continuation_tokens=NUM_TOKENS,
            model={"token_accuracy": value_N},
            base={"token_accuracy": value_N / 2},
        )

    one, other = table("extraction", draw.random(18)), table("grid", draw.random(18))
    alone = build_measures([one], documents, OUTLINES)
    both = build_measures([other, one], documents, OUTLINES)
    assert both[1:] == alone


def test_rates_of_copies_name_their_texts(make_document: MakeDocument) -> None:
    """26 of 39 documents match, eight of them copies of two texts."""
    cluster_N = [0] * 4 + [1] * 4 + list(range(2, 33))
    documents = [
        make_document(np.arange(5), name=f"{n}", bucket="x4", cluster=cluster)
        for n, cluster in enumerate(cluster_N)
    ]
    value_N = [1.0] * 26 + [0.0] * 13
    measure = _measure(
        make_document,
        "verbatim",
        [],
        value_N,
        [0.0] * 39,
        documents=documents,
        outlines=OUTLINES[1:],
    )
    (row,) = measure.buckets
    assert isinstance(row.model, Rate)
    assert (row.model.num_matched, row.model.num_documents) == (26, 39)
    assert row.model.texts is not None
    assert (row.model.texts.num_matched, row.model.texts.num_texts) == (20, 33)
    # 39^2 / (2 * 4^2 + 31), with which SciPy's beta quantiles are asked.
    number = 1521 / 63
    assert row.model.texts.num_effective == number
    k, rest = number * 26 / 39, number * 13 / 39
    expected = (stats.beta.ppf(0.025, k, rest + 1), stats.beta.ppf(0.975, k + 1, rest))
    assert row.model.ci == pytest.approx(expected)
    assert row.change_from_base.ci[1] == pytest.approx(expected[1])


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    metric=st.sampled_from(sorted(METRICS)),
    spread=st.sampled_from([0.02, 0.2, 2.0]),
)
@example(seed=2268, metric="logprob", spread=0.02)  # The control is one text.
def test_numbers_stay_within_their_bounds(
    make_document: MakeDocument, seed: int, metric: str, spread: float
) -> None:
    draw, kind = np.random.default_rng(seed), METRICS[metric]
    span = NUM_TOKENS if kind.is_length else 1

    def draw_values() -> NDArray[np.float64]:
        if kind.is_rate:
            return draw.integers(0, 2, 30).astype(float)
        values = span * draw.beta(spread, spread, 30)
        return -values if metric == "logprob" else values

    values, base = draw_values(), draw_values()
    documents = [
        make_document(np.arange(5), name=f"{n}", bucket="x0" if n < 10 else "x4", cluster=cluster)
        for n, cluster in enumerate(np.sort(draw.integers(0, 12, 30)) + 50 * (np.arange(30) < 10))
    ]
    measure = _measure(
        make_document,
        metric,
        values[:10].tolist(),
        values[10:].tolist(),
        base.tolist(),
        documents=documents,
    )
    for row, part in zip(measure.buckets, (values[:10], values[10:]), strict=True):
        if row.model is None:
            assert metric == "logprob", "only this one is not shown of a single text"
            continue
        value = row.model.rate if isinstance(row.model, Rate) else row.model.value
        assert value == pytest.approx(part.mean())
        if metric == "logprob":
            assert row.model.ci is None or row.model.ci[1] <= 0
            continue
        for least, most, found in (
            (0, 1, row.model),
            (0, 1, row.base),
            (-1, 1, row.change_from_base),
            (-1, 1, row.minus_control),
            (-2, 2, row.change_from_base_minus_control),
        ):
            if found is not None and found.ci is not None:
                middle = found.rate if isinstance(found, Rate) else found.value
                low, high = found.ci
                assert least * span <= low <= middle <= high <= most * span


def test_every_metric_says_what_it_is() -> None:
    for name, metric in METRICS.items():
        assert metric.meaning.endswith("."), name
        assert metric.unit in ("documents", "share", "tokens", "nats"), name
        assert metric.is_rate == (metric.unit == "documents"), name
