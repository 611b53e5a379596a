"""The results table of an audit: every number of its report, at its place."""

import json
from pathlib import Path
from typing import Any

import evidence_examples as evidence
import numpy as np
import pytest
import report_examples as examples
from pyarrow import parquet

from memguard import records as r
from memguard.records.report_rows import list_report_rows
from memguard.records.results import (
    SCHEMA_NAME,
    ResultRow,
    build_table,
    fill_row,
    read_results,
    save_results,
    write_parameters,
)

ROW = ResultRow(probe="p", metric="m", statistic="mean", bucket="b", num_documents=4)


def find(rows: list[ResultRow], **key: Any) -> ResultRow:
    """Return the only row with these values; other parts of the key have their defaults."""
    key = {"model": "trained", "against": None, "variant": None, "step": None} | key
    (row,) = [
        row for row in rows if all(getattr(row, name) == value for name, value in key.items())
    ]
    return row


def list_numbers(record: Any) -> set[float]:
    """Return every number in a record, rounded as rows of a single document may be."""
    if isinstance(record, dict):
        return set().union(*map(list_numbers, record.values()))
    if isinstance(record, list):
        return set().union(*map(list_numbers, record))
    is_number = isinstance(record, int | float) and not isinstance(record, bool)
    return {float(record)} if is_number else set()


def test_every_number_of_the_statistical_parts_is_in_the_table() -> None:
    """By value; the tests below look at places."""
    report = evidence.make_full_report()
    rows = list_report_rows(report)
    ours = {
        float(value)
        for row in rows
        for value in (
            *(row.num_documents, row.num_matched, row.num_missing, row.num_other),
            *(row.value, row.low, row.high),
            *(row.minus_control, row.minus_control_low, row.minus_control_high),
        )
        if value is not None
    }
    parts = {
        "measures": {"version", "parameters"},
        "attack_cost": set(),
        "attacks": {"num_queries"},
        "extracted_copies": {"k"},
        "mask_changes": set(),
    }
    values = report.model_dump(mode="json", include=set(parts))
    for part, left_out in parts.items():
        numbers = list_numbers(
            [
                {key: value for key, value in row.items() if key not in left_out}
                for row in values[part]
            ]
        )
        assert numbers - ours == set(), part


def test_a_measure_is_a_row_for_each_model_and_one_for_their_difference() -> None:
    report = evidence.make_full_report()
    rows = list_report_rows(report)
    for measure in report.measures:
        if measure.probe != "grid":
            continue
        parameters = write_parameters(measure.parameters)
        for bucket in measure.buckets:
            key = {"probe": "grid", "parameters": parameters, "metric": measure.metric}
            key |= {"bucket": bucket.bucket}
            ours = find(rows, **key)
            base = find(rows, model="base", **key)
            change = find(rows, against="base", **key)
            value = bucket.model.rate if isinstance(bucket.model, r.Rate) else bucket.model.value
            assert (ours.value, (ours.low, ours.high)) == (value, bucket.model.ci)
            assert ours.num_missing == bucket.num_missing
            assert base.interval == ours.interval
            assert change.value == bucket.change_from_base.value
            excess = bucket.change_from_base_minus_control
            assert change.minus_control == (None if excess is None else excess.value)


def test_risks_and_their_distance_from_the_control_are_rows() -> None:
    report = evidence.make_full_report()
    buckets = [
        bucket.model_copy(
            update={
                "risks": {"attack": examples.make_rate(number, 40)},
                "minus_control": {"attack_cost": examples.make_interval(number / 8, 0.1)},
            }
        )
        for number, bucket in enumerate(report.buckets)
    ]
    report = report.model_copy(update={"buckets": buckets})
    rows = list_report_rows(report)
    for bucket in report.buckets:
        best = find(rows, metric="best_any_answer", bucket=bucket.bucket)
        assert best.num_matched == bucket.risks["attack"].num_matched
        within = find(
            rows, metric="within_queries", parameters="queries=1000000", bucket=bucket.bucket
        )
        assert within.value == report.find_cost(bucket.bucket).model.within[1_000_000].rate
        assert within.minus_control == bucket.minus_control["attack_cost"].value


def test_membership_canaries_and_masks_have_groups_of_their_own() -> None:
    report = evidence.make_full_report()
    rows = list_report_rows(report)
    auc = find(rows, metric="auc", parameters="score=recall")
    assert (auc.bucket, auc.num_documents, auc.num_other, auc.num_missing) == (
        *("(members)", 116, 40, 4),
    )
    assert (auc.value, auc.interval) == (0.791, "delong")
    tpr = find(rows, metric="tpr", parameters="fpr=0.01, score=loss")
    assert (tpr.value, tpr.missing_because) == (None, "fewer than 1 / 0.01 control documents")
    unknown = find(rows, metric="auc", parameters="score=reference")
    assert unknown.value is None
    assert "fewer than two trained" in unknown.missing_because
    secrets = find(rows, probe="canaries", metric="verbatim", bucket="(secrets)")
    references = find(rows, probe="canaries", metric="verbatim", bucket="(reference secrets)")
    assert (secrets.num_matched, secrets.num_documents) == (3, 17)
    assert (references.num_matched, references.num_documents) == (0, 15)
    highest = find(rows, metric="exposure_bits", statistic="max")
    # One canary's: two digits.
    assert highest.value == 3.9
    assert find(rows, metric="exposure_bits", statistic="median").num_other == 15
    change = report.mask_changes[0]
    key = {"bucket": "(trained)", "parameters": f"rewriting={change.rewriting}"}
    assert find(rows, metric="mask_changed", **key).num_matched == change.num_changed
    assert find(rows, metric="leaked_share", **key).value == change.mean_leaked_share


def test_what_could_not_be_had_has_its_reason() -> None:
    report = examples.make_report()
    bucket = report.buckets[-1]
    bare = bucket.model_copy(
        update={"model": bucket.model.model_copy(update={"near_verbatim": None})}
    )
    generated = report.generated.model_copy(update={"reason_not_generated": "no greedy text"})
    update = {"buckets": [*report.buckets[:-1], bare], "generated": generated, "measures": []}
    rows = list_report_rows(report.model_copy(update=update))
    near = find(rows, metric="near_verbatim", bucket=bucket.bucket)
    assert (near.value, near.missing_because) == (None, "no greedy text")
    assert all((row.value is None) == (row.missing_because is not None) for row in rows)


@pytest.mark.parametrize(
    ("count", "statistic", "value", "written"),
    [(1, "mean", -12.3456, -12.0), (2, "mean", -12.3456, -12.3456), (9, "max", 3.9069, 3.9)],
)
def test_a_single_document_is_not_shown_exactly(
    count: int, statistic: Any, value: float, written: float
) -> None:
    row = ResultRow(probe="p", metric="m", statistic=statistic, bucket="b", num_documents=count)
    assert fill_row(row, value, "").value == written


def test_the_file_is_the_same_for_equal_rows_and_keeps_missing_values(tmp_path: Path) -> None:
    rows = list_report_rows(evidence.make_full_report())
    for name in ("one", "two"):
        save_results(rows, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    table = read_results(tmp_path / "one")
    assert parquet.read_schema(tmp_path / "one").metadata[b"schema"] == SCHEMA_NAME.encode()
    assert len(table) == len(rows)
    for name in ("value", "low", "num_matched", "minus_control"):
        expected = [getattr(row, name) for row in rows]
        assert np.array_equal(
            table[name].to_numpy(dtype=float), np.array(expected, dtype=float), equal_nan=True
        )
    # Columns have their types without a row too.
    assert build_table([]).schema == build_table(rows).schema
    json.dumps(table["parameters"].tolist())


def test_two_rows_of_one_key_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match="two rows have one key"):
        build_table([ROW, ROW])
