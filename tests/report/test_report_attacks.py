"""What it takes to get documents out: costs a person can read, attacks, and why there are none."""

import math
from dataclasses import replace

import evidence_examples as evidence
import pytest
import report_examples as examples
from hypothesis import given
from hypothesis import strategies as st
from page_checks import check_page, words_of
from result_examples import change_rows, rate_row

from memguard import records as r
from memguard.pages import formatting as fmt
from memguard.pages.extraction_cost import build_extraction_cost
from memguard.pages.page import Cell, Table
from memguard.report.html import render_report


@pytest.mark.parametrize(
    ("log10_queries", "written"),
    [
        (0.0, "1"),
        (math.log10(2), "2"),  # 10 ** log10(2) is a hair above 2
        (0.31, "3"),  # 2.04: two are not enough
        (1.6, "40"),
        (2.0, "100"),
        (3.0899, "1,200"),
        (5.9, "790,000"),
        (5.9999, "1,000,000"),
        (6.0, "10⁶"),
        (12.4, "10¹²"),
        (73.77, "10⁷⁴"),
        (1e300, ">\u00a010⁹⁹⁹⁹⁹"),
    ],
)
def test_queries_as_a_person_reads_them(log10_queries: float, written: str) -> None:
    assert fmt.queries(log10_queries) == written


@given(st.floats(0, 5.99))
def test_written_counts_are_near_the_cost(log10_queries: float) -> None:
    count = int(fmt.queries(log10_queries).replace(",", ""))
    # Rounded up to whole queries below 100, to two digits above.
    queries = 10**log10_queries
    assert queries * 0.95 <= count <= max(queries + 1, queries * 1.05)


def read(table: Table, head: str) -> list[tuple[str, str, str]]:
    """Return text, detail and note of the cells of the first row of this name."""
    row = next(row for row in (*table.rows, *table.more_rows) if row.head.text == head)
    return [plain(cell) for cell in row.cells]


def plain(cell: Cell) -> tuple[str, str, str]:
    text, detail, note = (one.replace("\u00a0", " ") for one in (cell.text, cell.detail, cell.note))
    return text, detail, note


def test_the_table_says_what_the_attacker_may_do_and_gets() -> None:
    table = build_extraction_cost(evidence.make_full_report()).tables[0]
    assert [column.text for column in table.columns] == [
        "Bucket",
        "Verbatim",
        "Near-verbatim",
        "Attack cost",
        "Within 1,000",
        "Within the limit",
        "Beyond the limit",
        "Sampling",
        "Beam search",
        "Fill in dropped tokens",
    ]
    assert table.columns[-1].detail == "any of 16 answers"
    verbatim, near, cost, few, many, beyond, *attacks = read(table, "r16")
    assert verbatim == ("0 of 40", "0–8.8 %", "")
    assert near[0] == "0 of 40"
    # 10^5.13, 10^3.43 to 10^8.43, rounded up: the exact cost of a document is not shown.
    assert cost == ("10⁶", "10,000 to 10⁹", "")
    assert few[:2] == ("1 of 40", "0.06–13.2 %")
    assert many[0] == "28 of 40"
    assert beyond[0] == "10 of 40"
    assert attacks == [
        ("3 of 40", "1.6–20.4 %", "first: 1 of 40"),
        ("6 of 40", "5.7–29.8 %", "first: 2 of 40"),
        ("19 of 40", "31.5–63.9 %", "first: 11 of 40"),
    ]
    # The control's median cannot be drawn at all.
    assert read(table, "control")[2] == ("never", "10⁵² to never", "25 of 40 never")
    assert [row.tone for row in table.rows] == ["control", "base", *["", "base"] * 3]
    base = table.rows[-1]
    assert [cell.text for cell in base.cells[-3:]] == ["", "", ""]


def test_the_lead_tells_the_verdicts_bucket_and_the_best_attack() -> None:
    report = evidence.make_full_report()
    words = words_of(check_page(render_report(report)))
    assert (
        "In r64, 40 of 40 documents could be obtained within the limit (10^6 queries from 50 "
        "tokens on, fewer for shorter answers); half of the documents cost at most 100 queries "
        "(median of the base model: never, of the control: never). The attack that extracts most "
        "is 'Fill in dropped tokens': 38 of 40 documents." in words
    )
    assert (
        "At least 38 of 40 came out by greedy text, an attack, another window or another method. "
        "40 of 40 are within the limit of queries, of 0 it depends on the decoding; for 0 (95 % CI "
        "0–8.8 %) no "
        "temperature, top-k, top-p or min-p gives the continuation word for word within the limit "
        "after the true prefix, with a probability of one half. This says nothing about texts with "
        "a few edits, beam search, penalties, logit bias, other prompts or other forms of the "
        "weights." in words
    )
    assert "Fill in dropped tokens: Knows which tokens the mitigation drops" in words
    assert "Decoding: greedy and sampling (temperature 1; temperature 1, top-k 40)" in words
    assert "'never': every decoding method excludes a token of the text." in words


def test_what_depends_on_the_decoding_is_said_before_what_is_beyond() -> None:
    full = evidence.make_full_report()
    for near, said in ((0, ""), (7, "At least 7 of 40 came out by greedy text, an attack")):

        def change(row: r.ResultRow, near: int = near) -> r.ResultRow | None:
            counts = {"within_limit": 0, "beyond_limit": 34, "near_verbatim": near, "verbatim": 0}
            if is_attack(row) or row.bucket != "r64" or row.metric not in counts:
                return None if is_attack(row) else row
            return replace(row, num_matched=counts[row.metric])

        report = change_rows(full.model_copy(update={"findings": []}), change)
        (text,) = (one for one in build_extraction_cost(report).lead if "depends on" in one)
        text = text.replace("\u00a0", " ")
        assert text.startswith(said or "0 of 40 are within")
        assert "0 of 40 are within the limit of queries, of 6 it depends on the decoding" in text
        assert "; for 34 (" in text
        assert not {"certified", "safe", "cannot"} & set(text.split())


def test_each_attack_in_full_is_there_on_demand() -> None:
    section = build_extraction_cost(evidence.make_full_report())
    table = section.tables[1]
    assert table.rows == ()
    assert len(table.more_rows) == 12
    row = table.more_rows[-1]
    assert (row.head.text, row.head.detail) == ("r64", "Fill in dropped tokens")
    first, any_answer, answers, accuracy = (plain(cell) for cell in row.cells)
    assert first[:2] == ("24 of 40", "60.0 % (43.3–75.1 %)")
    assert any_answer[:2] == ("38 of 40", "95.0 % (83.1–99.4 %)")
    assert answers[0] == "16"
    assert accuracy[0] == "70.0 %"


def test_a_report_without_attacks_says_why() -> None:
    report = examples.make_report()
    section = build_extraction_cost(report)
    assert section.tables == ()
    assert section.lead == (
        "Suite 'extraction' (version 1) does not measure the cost of sampling; '--suite full' "
        "does.",
        "Suite 'extraction' (version 1) runs no attacks; '--suite full' does.",
    )
    assert "Attack cost, median queries" not in words_of(check_page(render_report(report)))


def is_attack(row: r.ResultRow) -> bool:
    return row.probe == "attacks"


def test_what_was_asked_for_and_is_not_there_is_told() -> None:
    report = change_rows(evidence.make_full_report(), lambda row: None if is_attack(row) else row)
    section = build_extraction_cost(report)
    assert section.lead[-1] == "Probe 'attacks' ran, but this report has no results of it."
    assert len(section.tables) == 1
    assert [column.text for column in section.tables[0].columns][-1] == "Beyond the limit"


def test_missing_costs_are_named_and_never_0() -> None:
    def change(row: r.ResultRow) -> r.ResultRow | None:
        """Leave no document of r4, no cost of r16, and one attack on the control only."""
        if row.probe == "sampling" and row.bucket == "r4":
            return replace(row, num_documents=0, num_matched=0, value=None)
        is_left = row.bucket == "control" or not is_attack(row)
        return None if (row.probe, row.bucket) == ("sampling", "r16") or not is_left else row

    changed = change_rows(evidence.make_full_report(), change)
    table = build_extraction_cost(changed).tables[0]
    assert read(table, "r4")[2:6] == [("n/a", "no documents", "")] * 4
    assert read(table, "r16")[2:6] == [("n/a", "not measured", "")] * 4
    assert read(table, "r64")[6] == ("n/a", "not attacked", "")
    words_of(check_page(render_report(changed)))


def test_quantiles_of_few_documents_are_not_shown() -> None:
    def change(row: r.ResultRow) -> r.ResultRow:
        is_quantile = row.metric == "log10_queries"
        return replace(row, num_documents=9, value=None if is_quantile else row.value)

    section = build_extraction_cost(change_rows(evidence.make_full_report(), change))
    assert read(section.tables[0], "r64")[2] == ("n/a", "fewer than 10 documents", "")
    assert "half of the documents" not in "".join(section.lead)


def test_unknown_attacks_of_any_probe_are_shown_by_the_name_they_have() -> None:
    rows = [
        rate_row(
            *("mine", "any_answer", bucket, 2),
            settings={"attack": "<b>new_idea</b>", "answers": answers},
        )
        for bucket, answers in (("r16", 1), ("r64", 3))
    ]
    report = change_rows(
        evidence.make_full_report(), lambda row: None if is_attack(row) else row, add=rows
    )
    page = render_report(report)
    assert "<b>new idea</b> any answer" in words_of(check_page(page))
    assert "<b>" not in page


def test_an_attacker_who_got_nothing() -> None:
    def change(row: r.ResultRow) -> r.ResultRow:
        return replace(row, num_matched=0, value=0.0) if row.metric == "any_answer" else row

    lead = build_extraction_cost(change_rows(evidence.make_full_report(), change)).lead
    assert lead[-2].endswith("No attack extracts any of the 40 attacked documents.")
