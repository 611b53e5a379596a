"""Tables from columns and from rows of results: cells, rows of the base model, folded rows."""

from dataclasses import replace

import pytest
import report_examples as examples
from result_examples import (
    change_rows,
    change_tables,
    make_interval,
    make_metric,
    make_tables,
    rate_row,
    value_row,
)

from memguard import records as r
from memguard.audit.warnings import NOT_AUDITED
from memguard.pages import formatting as fmt
from memguard.pages.columns import (
    Column,
    count_columns,
    drop_zero_columns,
    make_cell,
    make_table,
    show_minus_control,
    show_row,
)
from memguard.pages.page import Cell
from memguard.pages.pivot import ResultColumn, bucket_table, pivot
from memguard.report.audit_summary import build_summary


def test_what_a_column_returns_becomes_a_cell() -> None:
    cell = Cell("x", detail="y", kind="code")
    assert make_cell(cell) is cell
    assert make_cell(fmt.Estimate(value="0.5", interval="0.4–0.6")) == Cell("0.5", detail="0.4–0.6")
    assert make_cell(1234) == Cell("1,234")
    assert make_cell("n") == Cell("n")
    assert make_cell(None) == Cell("")
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


def plain(cell: Cell) -> tuple[str, str, str]:
    words = (cell.text, cell.detail, cell.note)
    return tuple(word.replace("\u00a0", " ").replace("\u2212", "-") for word in words)


COPIED = replace(
    rate_row("extraction", "verbatim", "r4", 26, 39),
    low=0.447,
    high=0.843,
    num_clusters=33,
    num_matched_clusters=20,
)
ACCURACY = value_row("extraction", "token_accuracy", "r4", make_interval(0.333, 0.1), 24)
GAIN = value_row(
    *("extraction", "token_accuracy", "r4", make_interval(0.2, 0.1, -1), 24), against="base"
)


def lost(
    probe: str, reason: str = r.NO_DOCUMENTS, documents: int = 40, missing: int = 0
) -> r.ResultRow:
    """Return a rate without a value."""
    row = rate_row(probe, "verbatim", "r4", None, documents, why_not=reason)
    return replace(row, num_missing=missing)


FEW = "few documents"
LOGPROB = value_row("extraction", "logprob", "r4", make_interval(-1.5, 0.5, -9), 24)
MEDIAN = value_row("extraction", "first_divergence", "r4", 7.25, statistic="median")


@pytest.mark.parametrize(
    ("row", "options", "shown"),
    [
        (COPIED, {}, ("26 of 39", "66.7 % (44.7–84.3 %)", "20 of 33 texts")),
        (
            COPIED,
            {"how": "narrow", "note": "first: 2 of 39"},
            ("26 of 39", "44.7–84.3 %", "20 of 33 texts; first: 2 of 39"),
        ),
        (COPIED, {"how": "plain"}, ("66.7 %", "", "")),
        (rate_row("extraction", "verbatim", "r4", 1, 1), {}, ("1 of 1", "100 % (no interval)", "")),
        (ACCURACY, {}, ("33.3 %", "23.3–43.3 %", FEW)),
        (replace(ACCURACY, num_documents=25), {}, ("33.3 %", "23.3–43.3 %", "")),
        (replace(ACCURACY, num_documents=99, num_clusters=24), {}, ("33.3 %", "23.3–43.3 %", FEW)),
        (ACCURACY, {"unit": "plain"}, ("0.333", "0.233–0.433", FEW)),
        (ACCURACY, {"unit": "plain", "how": "plain"}, ("0.333", "", "")),
        (GAIN, {}, ("+20.0 pp", "+10.0 to +30.0", FEW)),
        (LOGPROB, {}, ("-1.500", "-2.000 to -1.000", "")),
        (replace(GAIN, metric="logprob"), {}, ("+0.200", "+0.100 to +0.300", "")),
        (MEDIAN, {}, ("7.2", "", "")),
        (None, {}, ("n/a", "not measured", "")),
        (None, {"why_not": "not attacked"}, ("n/a", "not attacked", "")),
        (lost("extraction", documents=0), {"why_not": "x"}, ("–", "no documents", "")),
        (lost("grid", missing=3), {}, ("n/a", "3 too short, or not in the sample", "")),
        (lost("extraction", "no cache"), {}, ("n/a", "no cache", "")),
        (lost("extraction", "no cache"), {"why_not": "not asked"}, ("n/a", "not asked", "")),
    ],
)
def test_a_row_of_results_becomes_a_cell(
    row: r.ResultRow | None, options: dict[str, str], shown: tuple[str, str, str]
) -> None:
    metric = None if row is None else make_metric(row.probe, row.metric)
    assert plain(show_row(row, metric, **options)) == shown


def test_a_rate_has_a_bar_with_its_interval() -> None:
    bar = show_row(COPIED).bar
    assert (bar.fill, bar.low, bar.width) == ("66.67%", "44.70%", "39.60%")


def test_the_difference_from_the_control_is_marked_if_either_has_few_documents() -> None:
    metric = make_metric("extraction", "token_accuracy")
    minus = {"minus_control": 0.1, "minus_control_low": 0.0, "minus_control_high": 0.2}
    many, few = replace(ACCURACY, num_documents=40, **minus), replace(ACCURACY, **minus)
    assert plain(show_minus_control(many, many, metric)) == ("+10.0 pp", "0.0 to +20.0", "")
    assert show_minus_control(few, many, metric).note == "few documents"
    assert show_minus_control(many, few, metric).note == "few documents"
    assert show_minus_control(None, many, metric).text == fmt.MISSING
    assert show_minus_control(ACCURACY, many, metric).text == fmt.MISSING


def test_rows_of_the_base_model_follow_where_they_are_wanted() -> None:
    columns: tuple[Column[int], ...] = (
        Column("Number", str, lambda one: "Base model"),
        Column("Square", lambda one: one**2),
        Column("Half", lambda one: "odd" if one % 2 else "even", lambda one: one // 2),
        Column("Missing", str, lambda one: None),
    )
    rows = make_table("", columns, [5, 6], over_base=lambda one: one == 5).rows
    assert [(row.head.text, row.tone) for row in rows] == [
        ("5", ""),
        ("Base model", "base"),
        ("6", ""),
    ]
    assert [cell.text for cell in rows[1].cells] == ["", "2", ""]
    # The row of one base model, after all others.
    last = make_table("", columns[:2], [5, 6], base=7).rows[-1]
    assert (len(last.cells), last.head.text, last.tone) == (1, "Base model", "base")


def test_counts_of_nothing_have_a_reason() -> None:
    named: Column[int] = Column("Whole", str)
    columns = (named, *count_columns("Count", "Share", lambda whole: (1, whole), "none given"))
    found, empty = make_table("", columns, [4, 0]).rows
    assert [cell.text for cell in found.cells] == ["1\u00a0of\u00a04", "25.0\u00a0%"]
    assert [cell.detail for cell in empty.cells] == ["none given"] * 2


def test_rows_beyond_those_shown_are_on_demand() -> None:
    columns: tuple[Column[int], ...] = (Column("Number", str), Column("Same", lambda one: one))
    folded = make_table("", columns, range(5), shown=3)
    assert [len(folded.rows), len(folded.more_rows), folded.more_label] == [3, 2, "Show 2 more"]
    assert make_table("", columns, range(5), shown=0, more_label="All").more_label == "All"
    whole = make_table("", columns, range(5), shown=5, more_label="All")
    assert [len(whole.rows), whole.more_rows, whole.more_label] == [5, (), ""]
    assert len(make_table("", columns, range(5)).rows) == 5


def test_a_table_of_buckets_has_the_base_model_where_it_was_scored() -> None:
    report = change_rows(
        examples.make_report(doses=examples.PLAIN[:2]),
        lambda row: None if (row.bucket, row.model) == ("r4", "base") else row,
    )
    short: Column[r.BucketRow] = Column("Short", lambda bucket: bucket.num_too_short)
    columns = (
        ResultColumn("Verbatim", "extraction", "verbatim"),
        ResultColumn("Gain", "extraction", "verbatim", key={"against": "base"}),
        ResultColumn("More", "extraction", "near_verbatim", minus_control=True),
        short,
    )
    table = bucket_table(report, "Caption", columns, base_detail="same documents")
    assert [(row.head.text, row.head.detail, row.tone) for row in table.rows] == [
        ("control", "never trained", "control"),
        ("Base model", "same documents", "base"),
        ("r4", "trained 4 times", ""),
    ]
    assert [cell.text for cell in table.rows[1].cells[1:]] == ["", "", ""]
    assert [plain(cell)[0] for cell in table.rows[2].cells] == ["0 of 40", "0.0 pp", "+2.5 pp", "0"]
    headings = ["Bucket", "Verbatim", "Gain", "More", "Short"]
    assert [column.text for column in table.columns] == headings
    near = ResultColumn("Near", "extraction", "near_verbatim", why_not="not generated")
    rows = bucket_table(examples.drop_near_verbatim(report), "", [near]).rows
    # Without a value there is no row of the base model.
    assert [row.cells[0].detail for row in rows] == ["not generated"] * 2


def test_rows_and_columns_may_be_anything_of_the_key() -> None:
    tables = make_tables(
        rate_row("grid", "verbatim", bucket, number, settings={"offset": offset}, model=model)
        for number, bucket in enumerate(("a", "b"))
        for offset in (0, 64)
        for model in ("trained", "base")
    )
    columns = [
        ResultColumn(name, "grid", "verbatim", key={"bucket": name}, base="note", how="narrow")
        for name in ("a", "b", "c")
    ]
    head: Column[str] = Column("Window", str)
    windows = ["offset=0", "offset=64", "offset=9"]
    rows = pivot(tables, "", head, columns, windows, key=lambda one: {"parameters": one}).rows
    assert [plain(cell)[0] for cell in rows[0].cells] == ["0 of 40", "1 of 40", "n/a"]
    assert plain(rows[1].cells[1])[2] == "base: 1 of 40"
    assert {cell.text for cell in rows[2].cells} == {"n/a"}


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


def test_every_document_that_was_not_audited_is_in_the_table_of_exclusions() -> None:
    """The counts are those that the notes and `num_not_auditable` add up."""
    counts = {name: 2**power for power, name in enumerate(NOT_AUDITED.values())}
    report = examples.make_report()
    first, *others = report.tables.buckets
    buckets = [replace(first, **counts), *others]
    report = change_tables(report, buckets=buckets)
    assert buckets[0].num_not_auditable == sum(counts.values()) == 31
    (table,) = (t for t in build_summary(report).tables if t.caption.startswith("Match details"))
    shown = {c.text: cell for c, cell in zip(table.columns[1:], table.rows[0].cells, strict=True)}
    names = ("Too short", "Not auditable", "Labels", "Unknown text")
    assert sum(int(shown[name].text) for name in names) == 31
