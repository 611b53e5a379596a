"""Tables from columns: what a column's function may return, rows of the base model, folded rows."""

import report_examples as examples

from memguard import records as r
from memguard.report import formatting as fmt
from memguard.report.page import Cell
from memguard.report.tables import (
    Column,
    bucket_table,
    count_columns,
    drop_zero_columns,
    make_cell,
    make_table,
    scores_column,
    show_known,
    show_missing,
)


def test_what_a_column_returns_becomes_a_cell() -> None:
    cell = Cell("x", detail="y", kind="code")
    assert make_cell(cell) is cell
    assert make_cell(fmt.Estimate(value="0.5", interval="0.4–0.6")) == Cell("0.5", detail="0.4–0.6")
    assert make_cell(1234) == Cell("1,234")
    assert make_cell("n") == Cell("n")
    assert make_cell(None) == Cell("")
    rate = make_cell(examples.make_rate(3, 200))
    assert rate.text == "3\u00a0of\u00a0200"
    assert rate.bar.fill == "1.50%"
    # A count of none is a number, no empty cell.
    assert make_cell(0) == Cell("0")


def test_the_first_column_names_the_row() -> None:
    columns: tuple[Column[int], ...] = (
        Column("Number", lambda one: f"no. {one}"),
        Column(("Twice", "of it"), lambda one: 2 * one),
    )
    table = make_table("", columns, [3, 4], tone=lambda one: "control" if one == 4 else "")
    rows = table.rows
    assert [row.head for row in rows] == [Cell(f"no. {one}", kind="text") for one in (3, 4)]
    assert [row.cells for row in rows] == [(Cell("6"),), (Cell("8"),)]
    assert [row.tone for row in rows] == ["", "control"]
    assert [(one.text, one.detail) for one in table.columns] == [("Number", ""), ("Twice", "of it")]


def test_rows_of_the_base_model_follow_where_they_have_a_cell() -> None:
    columns: tuple[Column[int], ...] = (
        Column("Number", str, lambda one: "Base model"),
        Column("Square", lambda one: one**2),
        Column("Half", lambda one: "odd" if one % 2 else "even", lambda one: one // 2),
        Column("Missing", str, lambda one: None),
    )
    rows = make_table("", columns, [5, 6], over_base=True).rows
    assert [(row.head.text, row.tone) for row in rows] == [
        ("5", ""),
        ("Base model", "base"),
        ("6", ""),
        ("Base model", "base"),
    ]
    assert [cell.text for cell in rows[1].cells] == ["", "2", ""]
    # Without a cell there is no row, although the column that names it has text.
    named = (columns[0], columns[1])
    (only,) = make_table("", named, [5], over_base=True).rows
    assert only.head.text == "5"
    # The row of one base model, after all others.
    last = make_table("", named, [5, 6], base=7).rows[-1]
    assert (len(last.cells), last.head.text, last.tone) == (1, "Base model", "base")


def test_counts_of_nothing_have_a_reason() -> None:
    named: Column[int] = Column("Whole", str)
    columns = (named, *count_columns("Count", "Share", lambda whole: (1, whole), "none given"))
    found, empty = make_table("", columns, [4, 0]).rows
    assert [cell.text for cell in found.cells] == ["1\u00a0of\u00a04", "25.0\u00a0%"]
    assert [cell.detail for cell in empty.cells] == ["none given"] * 2
    assert show_known(0.0, str, "not measured") == "0.0"
    assert show_known(None, str, "not measured") == show_missing("not measured")


def test_rows_beyond_those_shown_are_on_demand() -> None:
    columns: tuple[Column[int], ...] = (Column("Number", str), Column("Same", lambda one: one))
    folded = make_table("", columns, range(5), shown=3)
    assert [len(folded.rows), len(folded.more_rows), folded.more_label] == [3, 2, "Show 2 more"]
    assert make_table("", columns, range(5), shown=0, more_label="All").more_label == "All"
    whole = make_table("", columns, range(5), shown=5, more_label="All")
    assert [len(whole.rows), whole.more_rows, whole.more_label] == [5, (), ""]
    assert len(make_table("", columns, range(5)).rows) == 5


def test_a_table_of_buckets_has_the_base_model_where_it_was_scored() -> None:
    report = examples.make_report()
    buckets = [report.buckets[0], report.buckets[1].model_copy(update={"base": None})]
    report = report.model_copy(update={"buckets": buckets})
    columns: tuple[Column[r.BucketScores], ...] = (
        scores_column("Verbatim", lambda scores: scores.verbatim),
        Column("Tiny", lambda bucket: bucket.num_tiny_margin),
    )
    table = bucket_table(report, "Caption", columns, base_detail="same documents")
    assert [(row.head.text, row.head.detail, row.tone) for row in table.rows] == [
        ("control", "never trained", "control"),
        ("Base model", "same documents", "base"),
        ("r4", "trained 4 times", ""),
    ]
    assert table.rows[1].cells[1] == Cell("")
    assert [column.text for column in table.columns] == ["Bucket", "Verbatim", "Tiny"]


def test_what_was_not_generated_has_a_reason() -> None:
    report = examples.drop_near_verbatim(examples.make_report())
    columns = [scores_column("Near", lambda s: s.near_verbatim or show_missing("not generated"))]
    assert {row.cells[0].detail for row in bucket_table(report, "", columns).rows} == {
        "not generated"
    }


def test_columns_of_zeros_are_named_instead_of_shown() -> None:
    columns: tuple[Column[int], ...] = (
        Column("Name", str),
        Column(("Zero", "documents"), lambda _: 0),
        Column("Share", lambda _: fmt.percent(0.0)),
        Column("Some", lambda number: number),
        Column("Of none", lambda _: fmt.of(0, 5)),
    )
    table = drop_zero_columns(make_table("t", columns, [0, 1], shown=1, notes=["before"]))
    assert [column.text for column in table.columns] == ["Name", "Some", "Of none"]
    assert [cell.text for cell in table.rows[0].cells] == ["0", "0\u00a0of\u00a05"]
    assert [cell.text for cell in table.more_rows[0].cells] == ["1", "0\u00a0of\u00a05"]
    assert table.notes == ("before", "Not shown because every value is 0: Zero (documents), Share.")
    # A table of nothing but zeros keeps them.
    zeros = make_table("t", columns[:3], [0])
    assert drop_zero_columns(zeros) is zeros
