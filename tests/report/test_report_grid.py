"""Other windows: a row a window, a column a bucket, or the reason why there is no number."""

from dataclasses import replace

import evidence_examples as evidence
import report_examples as examples
from result_examples import change_rows, change_tables, rate_row

from memguard import records as r
from memguard.audit.probes.grid import GridProbe
from memguard.pages.page import Row


def texts(row: Row) -> list[str]:
    return [cell.text.replace("\u00a0", " ") for cell in row.cells]


def test_the_grid_has_a_row_a_window_and_a_column_a_bucket() -> None:
    verbatim, accuracy = GridProbe.section(evidence.make_full_report()).tables
    assert [c.text for c in verbatim.columns] == ["Window", "control", "r4", "r16", "r64"]
    assert verbatim.columns[-1].detail == "trained 64 times"
    heads = [(row.head.text, row.head.detail) for row in verbatim.rows]
    assert heads[:2] == [
        ("10 → 25 tokens", "from the first token"),
        ("10 → 50 tokens", "from the first token"),
    ]
    assert heads[-1] == ("50 → 50 tokens", "from token 64")
    assert texts(verbatim.rows[-1]) == ["0 of 40", "0 of 40", "2 of 40", "10 of 40"]
    assert "below: base model" in verbatim.caption
    # 0.6 + 50 / 250, and the base model's below.
    cell = accuracy.rows[-1].cells[-1]
    assert (cell.text, cell.note) == ("80.0\u00a0%", "base: 13.1\u00a0%")
    assert GridProbe.section(examples.make_report()) is None


def test_without_a_base_model_nothing_stands_below() -> None:
    report = change_rows(
        evidence.make_full_report(), lambda row: None if row.model == "base" else row
    )
    table = GridProbe.section(report).tables[0]
    assert {cell.note for row in table.rows for cell in row.cells} == {""}
    assert "base model" not in table.caption


def test_many_windows_are_folded_and_many_buckets_counted() -> None:
    report = evidence.make_full_report()
    wide = [replace(report.tables.buckets[1], bucket=f"b{n}") for n in range(20)]
    rows = [
        rate_row("grid", "verbatim", "r4", 1, settings={"offset": n, "prefix_tokens": "?"})
        for n in range(30)
    ]
    report = change_tables(report, buckets=wide, results=rows, metrics=())
    (table,) = GridProbe.section(report).tables
    assert (len(table.rows), len(table.more_rows), table.more_label) == (12, 18, "Show 18 more")
    assert len(table.columns) == 13
    assert table.notes == ("8 more buckets are in the JSON.",)
    assert table.rows[0].head.text == "? → ? tokens"
    assert {cell.text for cell in table.rows[0].cells} == {"n/a"}


def test_documents_too_short_for_a_window_are_no_zero() -> None:
    def change(row: r.ResultRow) -> r.ResultRow:
        missing = {"num_documents": 0, "num_missing": 40, "missing_because": r.NO_DOCUMENTS}
        is_short = row.probe == "grid" and row.bucket == "r64"
        return replace(row, value=None, **missing) if is_short else row

    section = GridProbe.section(change_rows(evidence.make_full_report(), change))
    cell = section.tables[0].rows[0].cells[-1]
    assert (cell.text, cell.detail) == ("n/a", "40 too short, or not in the sample")
