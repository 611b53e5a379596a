"""The comparison of variants, against formulas, on made-up scores."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import plain_statistics as plain
import pytest
from audit_examples import build_suite
from made_examples import build_evidence, make_bucket
from probe_examples import count, make_measured
from record_examples import make_outline

from memguard.audit.near_verbatim import NotGenerated
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.sampling import SamplingProbe
from memguard.audit.requests import Measured
from memguard.audit.statistics import compute_mean, compute_paired_rates
from memguard.audit.variants import (
    ComparedVariants,
    HeldoutPiece,
    HeldoutTexts,
    VariantResults,
    compare_variants,
)
from memguard.config.settings import SamplingScheme
from memguard.records import VariantName, write_parameters

NUM = 12
SUITE = build_suite(ExtractionProbe(), SamplingProbe(schemes=(SamplingScheme(),)))
PIECES = [
    HeldoutPiece(
        document=document,
        input_ids=np.arange(size + 1, dtype=np.int32),
        supervised=np.ones(size + 1, dtype=bool),
    )
    # Two documents, the second of which has two pieces.
    for document, size in ((7, 4), (9, 2), (9, 6))
]
COST = write_parameters({"queries": 1_000_000})


def _measure(
    name: VariantName, verbatim: Sequence[int], nll: Sequence[float], log10_queries: float
) -> VariantResults:
    """Return a variant whose other documents cost so many queries; inf: they are never sampled."""
    made = make_bucket("x4", [50 * each for each in verbatim])
    # One half is reached after log(1/2) / log(1 - p) queries.
    with np.errstate(divide="ignore"):
        log_p = float(np.log(-np.expm1(-np.log(2) / 10**log10_queries)))
    measured = {
        **build_evidence(made).trained,
        "sampling": make_measured({"0": [log_p] * NUM}),
        "heldout": make_measured({"nll": nll, "num_tokens": [4, 2, 6]}),
    }
    return VariantResults(name=name, description=name, measured=measured)


def _compare(*results: VariantResults, pieces: Sequence[HeldoutPiece] = PIECES) -> ComparedVariants:
    inputs = build_evidence(make_bucket("x4", [0] * NUM)).inputs
    # Pairs of near-duplicates.
    windows = [
        replace(w, document=replace(w.document, cluster=n // 2))
        for n, w in enumerate(inputs.windows)
    ]
    return compare_variants(
        results,
        replace(inputs, windows=windows),
        [make_outline("x4", num_repetitions=4)],
        HeldoutTexts(bucket="heldout", pieces=pieces),
        suite=SUITE,
    )


def test_differences_are_paired_by_document_over_clusters() -> None:
    before, after = [1] * 8 + [0] * 4, [1] * 3 + [0] * 9
    first = _measure("merged", before, [8.0, 4.0, 12.0], 5.0)
    second = _measure("nf4", after, [12.0, 6.0, 30.0], 7.0)
    compared = _compare(first, second)
    tables = compared.tables
    assert [variant.name for variant in compared.variants] == ["merged", "nf4"]

    def find(probe: str, metric: str, bucket: str = "x4", **key: Any) -> Any:
        parameters = COST if probe == "sampling" else ""
        return tables.find(probe, metric, bucket, parameters=parameters, **key)

    one, other = {"variant": "merged"}, {"variant": "nf4"}
    paired = {**other, "against": "variant:merged"}
    # 24 and 48 nats over 12 tokens; the pieces of a document are one unit of the interval.
    losses = [find("heldout", "nll", "heldout", **key) for key in (one, other)]
    assert [row.value for row in losses] == [pytest.approx(2), pytest.approx(4)]
    assert {row.num_documents for row in losses} == {2}
    assert tables.find_detail("heldout") == {"num_tokens": 12}
    expected = compute_mean(np.array([12.0 - 8, 36.0 - 16]) * 2 / 12)
    changed = find("heldout", "nll", "heldout", **paired)
    assert (changed.value, changed.ci) == (pytest.approx(2), pytest.approx(expected.ci))
    assert count(find("extraction", "verbatim", **one)) == (8, NUM)
    # 10^5 queries are within 10^6, 10^7 are not.
    assert count(find("sampling", "within_queries", **one)) == (NUM, NUM)
    assert count(find("sampling", "within_queries", **other)) == (3, NUM)
    difference = compute_paired_rates(after, before, clusters=np.arange(NUM) // 2)
    row = find("extraction", "verbatim", **paired)
    assert (row.value, row.ci) == (pytest.approx(difference.value), pytest.approx(difference.ci))
    assert row.value == pytest.approx(-5 / 12)
    assert find("sampling", "within_queries", **paired).value == -0.75
    # Of the first variant there are no differences, and no rows of a base model.
    assert not [row for row in tables.results if row.variant == "merged" and row.against]
    assert {row.model for row in tables.results} == {"trained"}
    assert len({row.key for row in tables.results}) == len(tables.results)


def test_the_rows_of_a_variant_follow_from_its_columns() -> None:
    """Rates and differences by other code, from the values that are stored beside the records."""
    first = _measure("merged", [1] * 8 + [0] * 4, [1.0] * 3, 5.0)
    second = _measure("nf4", [0, 1, 1] + [0] * 8 + [1], [1.0] * 3, 7.0)
    compared = _compare(first, second)
    clusters = [n // 2 for n in range(NUM)]

    def read(variant: str, metric: str) -> list[float]:
        if metric == "within_queries":
            cost = compared.columns[f"variant:{variant}.sampling.log10_queries"].values
            return (cost <= 6).astype(float).tolist()
        column = compared.columns[f"variant:{variant}.extraction.{metric}"]
        return column.values.astype(float).tolist()

    num_rates = 0
    for row in compared.tables.results:
        if row.metric not in ("verbatim", "near_verbatim") and row.parameters != COST:
            continue
        ours = read(row.variant or "", row.metric)
        if row.against:
            expected = plain.estimate_paired_rates(ours, read("merged", row.metric), clusters)
        else:
            expected = plain.estimate_rate(ours, clusters)
        # Two ways to find a root differ by less.
        assert (row.value, row.low, row.high) == pytest.approx(expected, abs=1e-9)
        num_rates += 1
    assert num_rates == 9
    assert not [name for name in compared.columns if "base." in name]


def test_what_a_variant_lacks_has_no_difference() -> None:
    some = [1] * 4 + [0] * 8
    first, second = (_measure(name, some, [1.0] * 3, np.inf) for name in ("adapter", "int8"))
    near = NotGenerated(reason="there was an obstacle")
    extraction = Measured(columns=second.measured["extraction"].columns, detail=near)
    measured = {**second.measured, "extraction": extraction}
    del measured["sampling"]
    compared = _compare(first, replace(second, measured=measured))
    tables = compared.tables
    reasons = [each.reason_not_generated for each in compared.variants]
    assert reasons == [None, "there was an obstacle"]
    assert "variant:adapter.sampling.log10_queries" in compared.columns
    assert not [name for name in compared.columns if name.startswith("variant:int8.sampling")]
    own = [row for row in tables.results if row.variant == "int8" and row.bucket == "x4"]
    assert {row.probe for row in own} == {"extraction"}
    near_rows = [row for row in own if row.metric == "near_verbatim"]
    assert {row.value for row in near_rows} <= {None}
    # No document differs, of twelve in pairs of copies: 0 of 6, in either direction.
    row = tables.find("extraction", "verbatim", "x4", variant="int8", against="variant:adapter")
    assert row.value == 0
    assert -row.low == pytest.approx(row.high) == pytest.approx(1 - 0.025 ** (1 / 6))


@pytest.mark.parametrize("pieces", [[], PIECES[:1]])
def test_the_loss_of_less_than_two_documents_is_not_shown(pieces: list[HeldoutPiece]) -> None:
    results = [_measure(name, [0] * NUM, [1.0] * 3, 5.0) for name in ("merged", "nf4")]
    rows = _compare(*results, pieces=pieces).tables.select("heldout", "nll")
    assert len(rows) == (3 if pieces else 0)
    assert {row.value for row in rows} <= {None}
