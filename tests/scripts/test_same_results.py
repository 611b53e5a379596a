"""scripts/same_results.py: every difference of two sides is found, and what went is named."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from script_calls import load_script

pytestmark = pytest.mark.slow

same_results: Any = load_script("same_results")

ROW = {"probe": "extraction", "metric": "verbatim", "bucket": "x4", "num_matched": 3, "value": 0.25}
REPORT = {"created": "today", "wall_s": 2.0, "verdict": {"level": "memorized", "ci": [0.1, 0.5]}}


def write_side(folder: Path, rows: list[dict[str, Any]], report: Any, weights: bytes) -> Path:
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "results.parquet")
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "step_s": 0.3}\n')
    (folder / "model.safetensors").write_bytes(weights)
    return folder


@pytest.mark.parametrize(
    ("row", "report", "weights", "differences"),
    [
        ({"value": 0.25 + 1e-8}, {"created": "now", "wall_s": 3.0}, b"w", []),
        ({"value": 0.26}, {}, b"w", ["results.parquet"]),
        ({"num_matched": 4}, {}, b"w", ["results.parquet"]),
        ({}, {"verdict": {"level": "none-found", "ci": [0.1, 0.5]}}, b"w", ["report.json"]),
        ({}, {"verdict": {"level": "memorized", "ci": [0.1, 0.6]}}, b"w", ["report.json"]),
        ({}, {}, b"v", ["model.safetensors"]),
    ],
)
def test_a_difference_is_found(
    row: dict[str, Any], report: Any, weights: bytes, differences: list[str], tmp_path: Path
) -> None:
    before = write_side(tmp_path / "before", [ROW], REPORT, b"w")
    after = write_side(tmp_path / "after", [{**ROW, **row}], {**REPORT, **report}, weights)
    comparison = same_results.compare_sides(before, after)
    assert [line.split()[0].rstrip(":") for line in comparison.different] == differences
    assert comparison.num_equal["metrics.jsonl"] == 2, "step and loss, not the time"


def test_rows_and_fields_that_went_are_counted(tmp_path: Path) -> None:
    gone = {**ROW, "metric": "exposure", "variant": "int8"}
    before = write_side(
        tmp_path / "before", [{**ROW, "variant": None}, gone], {**REPORT, "old": 1}, b"w"
    )
    after = write_side(tmp_path / "after", [ROW], REPORT, b"w")
    comparison = same_results.compare_sides(before, after)
    assert not comparison.different
    assert dict(comparison.only["before"]) == {
        "results.parquet: variant=int8 probe=extraction metric=exposure": 1,
        "results.parquet: field variant": 1,
        "report.json: old": 1,
    }
    assert not comparison.only["after"]
