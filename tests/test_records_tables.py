"""The tables of a report: stored by column, found by key, refused when they are others."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from result_examples import auc_row, make_tables, rate_row, value_row

from memguard.errors import RecordError
from memguard.records import (
    NO_DOCUMENTS,
    AuditReport,
    BucketRow,
    CanaryScore,
    DetailRow,
    Interval,
    Rate,
    ResultRow,
    Tables,
    TestRow,
    fill_count,
    fill_row,
    load_canaries,
    load_record,
    merge_tables,
    save_canaries,
    save_record,
    write_parameters,
)
from memguard.records.record import format_json
from memguard.records.results import load_results, read_results, save_results

ROWS = [
    rate_row("extraction", "verbatim", "x4", 3),
    rate_row("extraction", "verbatim", "x4", 1, model="base"),
    value_row("extraction", "verbatim", "x4", Interval(value=0.05, ci=None), against="base"),
    rate_row("extraction", "near_verbatim", "x4", None, why_not="no text was generated"),
    rate_row("attacks", "best_any_answer", "x4", 2, 9),
    rate_row("sampling", "within_limit", "x4", 4),
    rate_row("sampling", "within_queries", "x4", 1, settings={"queries": 1000}),
    value_row("sampling", "log10_queries", "x4", 3.0, statistic="median"),
    auc_row("loss", Interval(value=0.75, ci=(0.6, 0.9))),
    rate_row("extraction", "verbatim", "x4", 5, step=10),
]
TABLES = make_tables(
    ROWS,
    [BucketRow(bucket="x0", role="control"), BucketRow(bucket="x4", role="trained")],
    [
        TestRow(
            probe="extraction",
            metric="verbatim",
            bucket="(trained)",
            test="cochran-armitage",
            num_documents=80,
            statistic=1.5,
            doses=(0, 4),
            fitted=(0.0, 0.5),
        )
    ],
    [DetailRow(probe="attacks", schema=1, value={"best": {"x4": "beam_search"}})],
)


def test_tables_are_columns_that_read_back_equal() -> None:
    stored = json.loads(TABLES.model_dump_json())
    assert list(stored) == ["results", "metrics", "buckets", "tests", "details"]
    assert stored["results"]["num_matched"][:3] == [3, 1, None]
    # Columns of results whose values are all the default are left out.
    assert not {"setting", "seed", "num_clusters"} & set(stored["results"])
    names = [field.name for field in fields(ResultRow)]
    assert list(stored["results"]) == [name for name in names if name in stored["results"]]
    assert list(stored["buckets"]) == [field.name for field in fields(BucketRow)]
    assert stored["buckets"]["bucket"] == ["x0", "x4"]
    assert Tables.model_validate(stored) == TABLES
    assert Tables.model_validate_json(Tables().model_dump_json()) == Tables()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t["results"].pop("probe"), "the columns probe are missing or unknown"),
        (lambda t: t["buckets"].update(more=[1, 2]), "the columns more are missing or unknown"),
        (lambda t: t["results"]["value"].pop(), "the columns have different lengths"),
        (lambda t: t["results"]["statistic"].__setitem__(0, "mode"), "Input should be 'rate'"),
        (lambda t: t["results"]["value"].__setitem__(0, float("nan")), "finite number"),
        (lambda t: t["results"]["metric"].__setitem__(0, None), "valid string"),
        (lambda t: t.update(more={}), "Extra inputs"),
    ],
)
def test_other_columns_and_values_are_refused(damage: Any, message: str) -> None:
    stored = json.loads(TABLES.model_dump_json())
    damage(stored)
    with pytest.raises(ValidationError, match=message):
        Tables.model_validate(stored)


@pytest.mark.parametrize(
    ("arguments", "key", "index"),
    [
        (("extraction", "verbatim", "x4"), {}, 0),
        (("extraction", "verbatim", "x4"), {"model": "base"}, 1),
        (("extraction", "verbatim", "x4"), {"against": "base"}, 2),
        (("extraction", "near_verbatim", "x4"), {}, 3),
        (("sampling", "within_queries", "x4"), {"parameters": "queries=1000"}, 6),
        (("sampling", "log10_queries", "x4"), {"statistic": "median"}, 7),
        (("membership", "auc", "(members)"), {"parameters": "score=loss"}, 8),
        (("extraction", "verbatim", "x4"), {"step": 10}, 9),
        (("sampling", "within_queries", "x4"), {}, None),
        (("sampling", "log10_queries", "x4"), {}, None),
        (("extraction", "verbatim", "x8"), {}, None),
        (("extraction", "verbatim", "x4"), {"seed": 1}, None),
    ],
)
def test_rows_are_found_by_key(
    arguments: tuple[str, str, str], key: dict[str, Any], index: int | None
) -> None:
    assert TABLES.find(*arguments, **key) == (None if index is None else ROWS[index])


def test_rows_are_selected_and_risks_are_ranked() -> None:
    assert TABLES.select("extraction", "verbatim", model="base") == [ROWS[1]]
    assert TABLES.select("extraction", "verbatim", bucket="x4", step=None) == ROWS[:3]
    assert TABLES.select("grid", "verbatim") == []
    # Those with a value, the strongest evidence first, whatever the order of the rows.
    assert TABLES.risks("x4") == {"verbatim": ROWS[0], "attack_cost": ROWS[5], "attack": ROWS[4]}
    assert TABLES.risks("x4", model="base") == {"verbatim": ROWS[1]}
    assert TABLES.risks("x0") == {}
    metric = TABLES.find_metric("sampling", "within_limit")
    assert (metric.settings, metric.risk) == ({}, "attack_cost")
    plain = TABLES.find_metric("sampling", "within_queries", "queries=1000")
    assert (plain.settings, plain.risk_rank) == ({"queries": 1000}, None)
    assert replace(metric, probe="mine", metric="first").risk == "mine.first"
    others = {m.metric: replace(m, risk_rank=None) for m in TABLES.metrics}
    assert make_tables(ROWS, metrics=others.values()).risks("x4") != TABLES.risks("x4")
    assert [m.parameters for m in TABLES.list_metrics("sampling")] == ["", "queries=1000", ""]


def test_buckets_and_details_are_found() -> None:
    assert TABLES.control == TABLES.find_bucket("x0") == TABLES.buckets[0]
    assert TABLES.find_bucket("x8") is TABLES.find_bucket(None) is Tables().control is None
    assert TABLES.find_detail("attacks") == {"best": {"x4": "beam_search"}}
    assert TABLES.find_detail("attacks", "base") is TABLES.find_metric("attacks", "x") is None
    merged = merge_tables([TABLES, Tables(results=(ROWS[0],))])
    assert merged.results == (*TABLES.results, ROWS[0])
    assert merged.details == TABLES.details


def test_rows_are_filled_with_a_value_or_a_reason() -> None:
    row = replace(ROWS[0], num_matched=None, value=None, low=None, high=None, interval="")
    rate = Rate(num_documents=40, num_matched=3, rate=0.075, ci=(0.02, 0.2))
    minus = Interval(value=0.05, ci=(-0.1, 0.2))
    filled = fill_row(row, rate, "clopper-pearson", minus_control=minus)
    assert (filled.value, filled.ci, filled.num_matched) == (0.075, (0.02, 0.2), 3)
    assert (filled.minus_control, filled.minus_control_ci) == (0.05, (-0.1, 0.2))
    assert (filled.interval, filled.is_known) == ("clopper-pearson", True)
    without = fill_row(row, Interval(value=2, ci=None), "jackknife")
    assert (without.value, without.ci, without.interval) == (2.0, None, "")
    missing = fill_row(row, None, "jackknife", minus_control=minus, why_not="too few")
    assert (missing.value, missing.minus_control, missing.missing_because) == (
        None,
        None,
        "too few",
    )
    assert fill_count(row, 4).value == 0.1
    nothing = fill_count(replace(row, num_documents=0), 0)
    assert (nothing.value, nothing.num_matched, nothing.missing_because) == (None, 0, NO_DOCUMENTS)
    assert write_parameters({"b": 1, "a": "x"}) == "a=x, b=1"
    # Keys of YAML, of which a policy may have any.
    assert write_parameters({"b": 1, 1: "x"}) == "1=x, b=1"  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("statistic", "documents", "rounded"),
    [("mean", 1, True), ("min", 9, True), ("max", 9, True), ("mean", 2, False)],
)
def test_a_value_of_one_document_has_two_digits(
    statistic: Any, documents: int, rounded: bool
) -> None:
    value = Interval(value=-1234.567, ci=(-2345.678, 0.0123456))
    row = value_row("membership", "auc", "x4", value, documents, statistic=statistic, minus=value)
    numbers = (row.value, row.low, row.high, row.minus_control, row.minus_control_low)
    exact = (-1234.567, -2345.678, 0.0123456, -1234.567, -2345.678)
    short = (-1200.0, -2300.0, 0.012, -1200.0, -2300.0)
    assert numbers == (short if rounded else exact)


def test_the_results_file_reads_back_equal_and_refuses_a_key_twice(tmp_path: Path) -> None:
    path, again = tmp_path / "results.parquet", tmp_path / "again.parquet"
    for each in (path, again):
        save_results(ROWS, each)
    assert path.read_bytes() == again.read_bytes()
    assert load_results(path) == ROWS
    table = read_results(path)
    assert table["value"].isna().tolist() == [row.value is None for row in ROWS]
    assert table["setting"].isna().all()
    assert table["bucket"].tolist() == [row.bucket for row in ROWS]
    save_results([], again)
    assert load_results(again) == []
    with pytest.raises(AssertionError, match="two rows have one key"):
        save_results([ROWS[0], replace(ROWS[0], value=0.5)], again)


def test_a_file_has_a_column_in_a_line_and_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    save_record(TABLES, path)
    assert load_record(Tables, path) == TABLES
    assert '    "bucket": ["x0","x4"],' in path.read_text().splitlines()
    # Lists in a column have a line each.
    assert len(path.read_text().splitlines()) < 120
    values = {"a": [1, None, "ü"], "b": [[1], {"c": []}], "d": {}}
    assert format_json(values) == (
        '{\n  "a": [1,null,"ü"],\n  "b": [\n    [1],\n    {\n      "c": []\n    }\n  ],\n'
        '  "d": {}\n}'
    )
    assert json.loads(format_json(values)) == values


def test_a_report_of_the_former_schema_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"schema": "memguard.report/2", "buckets": []}))
    with pytest.raises(RecordError) as refused:
        load_record(AuditReport, path)
    assert str(refused.value) == (
        f"'{path}' was written by another version of memguard (memguard.report/2), which this one "
        "cannot read"
    )


def test_scores_of_canaries_are_for_their_owner(tmp_path: Path) -> None:
    path = tmp_path / "canaries.parquet"
    scores = [
        CanaryScore(
            id=f"c{number}",
            was_trained=number == 0,
            nll=30.123456,
            base_nll=None,
            num_secret_tokens=10,
            num_repetitions=4,
            num_loss_tokens=None,
            exposure_bits=1.5,
            verbatim=False,
        )
        for number in range(2)
    ]
    save_canaries(scores, path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_canaries(path) == scores
    save_results(ROWS, path)
    with pytest.raises(RecordError, match="holds no scores of canaries"):
        load_canaries(path)
