"""The results table as a file; a single document's value is rounded."""

import json
from pathlib import Path
from typing import Any

import evidence_examples as evidence
import numpy as np
import pytest
from pyarrow import parquet

from memguard.records.results import (
    SCHEMA_NAME,
    ResultRow,
    build_results,
    fill_row,
    load_results,
    read_results,
    save_results,
)

ROW = ResultRow(probe="p", metric="m", statistic="mean", bucket="b", num_documents=4)


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
    rows = list(evidence.make_full_report().tables.results)
    for name in ("one", "two"):
        save_results(rows, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    table = read_results(tmp_path / "one")
    assert parquet.read_schema(tmp_path / "one").metadata[b"schema"] == SCHEMA_NAME.encode()
    assert len(table) == len(rows)
    assert load_results(tmp_path / "one") == rows
    for name in ("value", "low", "num_matched", "minus_control"):
        expected = [getattr(row, name) for row in rows]
        assert np.array_equal(
            table[name].to_numpy(dtype=float), np.array(expected, dtype=float), equal_nan=True
        )
    # Columns have their types without a row too.
    assert build_results([]).schema == build_results(rows).schema
    json.dumps(table["parameters"].tolist())


def test_two_rows_of_one_key_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match="two rows have one key"):
        build_results([ROW, ROW])
