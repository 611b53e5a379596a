"""Other windows, writing, change from base, masks and trends: their numbers, or why none."""

from dataclasses import replace

import evidence_examples as evidence
import report_examples as examples
from page_checks import check_page, words_of
from result_examples import change_rows, change_tables, rate_row

from memguard import records as r
from memguard.audit.probes.generation import GenerationProbe
from memguard.audit.probes.grid import GridProbe
from memguard.audit.suite import PROBES
from memguard.pages.doses import build_copies, build_trends
from memguard.pages.page import Row
from memguard.report.audit_summary import build_change_from_base
from memguard.report.html import render_report


def texts(row: Row) -> list[str]:
    return [cell.text.replace("\u00a0", " ").replace("\u2212", "-") for cell in row.cells]


def test_the_change_from_base_is_model_minus_base() -> None:
    table = build_change_from_base(evidence.make_full_report())
    assert [row.head.text for row in table.rows] == ["control", "r4", "r16", "r64"]
    assert texts(table.rows[0]) == ["0.0 pp", "0.0 pp", "+5.5 pp", "+0.574"]
    # Near-verbatim 6 of 40; token accuracy 0.823 - 0.137; log-probability 1.7 log(0.823 / 0.137).
    assert texts(table.rows[3]) == ["0.0 pp", "+15.0 pp", "+68.6 pp", "+3.048"]
    assert table.rows[3].cells[3].detail.replace("\u2212", "-") == "+3.018 to +3.078"
    assert table.rows[0].tone == "control"


def test_without_a_base_model_there_is_no_change_from_base() -> None:
    report = change_rows(
        evidence.make_full_report(), lambda row: None if row.against or row.model == "base" else row
    )
    assert build_change_from_base(report) is None
    assert "Change from base" not in render_report(report)


def test_masks_lead_with_the_worst_copy() -> None:
    section = PROBES["mask_consistency"].section(evidence.make_full_report())
    lead = section.lead[0].replace("\u00a0", " ")
    assert "worst rewriting is 'Single line': 39 of 39 passages" in lead
    assert "51.8 % of a passage's dropped tokens" in lead
    rows = section.tables[0].rows
    assert texts(rows[0]) == ["3 of 40", "7.5 %", "1.1 %"]
    assert texts(rows[2]) == ["n/a", "n/a", "n/a"]
    assert rows[2].cells[0].detail == "no passage differs"
    assert rows[3].head.text == "Near-duplicates"


def test_masks_are_told_of_only_where_labels_are_dropped() -> None:
    plain = examples.make_report()
    assert PROBES["mask_consistency"].section(plain) is None  # drops none
    section = PROBES["mask_consistency"].section(examples.make_report(True))
    assert section.tables == ()
    assert "does not test whether copies of a text escape the mask" in section.lead[0]
    for rewritings, told in (
        (
            [("leading_space", 40, 0, 0.0)],
            "No copy has loss on a token that training dropped. Tried were 'Leading space'; copies "
            "that differ in another way were not.",
        ),
        (evidence.REWRITINGS[2:3], "No passage differs"),
    ):
        report = change_rows(plain, add=evidence.list_masks(rewritings))
        assert told in PROBES["mask_consistency"].section(report).lead[0]


def test_trends_have_a_fit_and_a_p_value_or_a_reason() -> None:
    report = evidence.make_full_report()
    table = build_trends(report)
    assert [column.text for column in table.columns] == ["Rate", "0", "4", "16", "64", "z", "p"]
    flat, rising = table.rows
    assert texts(flat) == ["0 %", "0 %", "0 %", "0 %", "–", "n/a"]
    assert texts(rising) == ["0 %", "0 %", "0 %", "15.0 %", "3.91", "< 0.001"]
    # A fit that lost a bucket has no place for the others.
    lost = [replace(report.tables.tests[1], fitted=(0.1,))]
    row = build_trends(change_tables(report, tests=lost))
    assert texts(row.rows[0])[:4] == ["n/a"] * 4
    assert build_trends(report.model_copy(update={"dose_response": False})) is None


def test_few_copies() -> None:
    report = evidence.make_full_report()
    table = build_copies(report)
    assert [row.head.text for row in table.rows][:2] == ["only itself", "at most 2"]
    assert texts(table.rows[0]) == ["3 of 104", "2.9 %"]
    assert table.notes[1] == "A limit of 10 gives the same counts as the row before."
    none = rate_row("extraction", "verbatim", r.TRAINED, 0, 0, settings={"copies_at_most": 1})
    table = build_copies(change_rows(examples.make_report(), add=[none]))
    assert texts(table.rows[0]) == ["n/a", "n/a"]
    assert build_copies(examples.make_report()) is None


def test_sections_that_do_not_apply_are_left_out() -> None:
    page = render_report(evidence.make_full_report())
    for key in ("attacks", "grid", "generation", "membership", "canaries", "masks"):
        assert f'id="{key}"' in page
    old = render_report(examples.make_report())
    for key in ("grid", "generation", "masks"):
        assert f'id="{key}"' not in old


def test_the_glossary_explains_what_the_page_has() -> None:
    terms = (
        "Attack cost",
        "Change from base",
        "ROUGE-L",
        "TPR at FPR",
        "Exposure",
        "k-eidetic",
        "Epsilon, lower bound",
        "Extraction strength",
    )
    full = render_report(evidence.make_full_report())
    assert all(f"<dt>{term}</dt>" in full for term in terms)
    old = words_of(check_page(render_report(examples.make_report())))
    assert "Exposure" not in old
    assert "Extraction strength" in old


def test_who_dropped_labels_is_told_of_the_attack_that_was_not_tried() -> None:
    words = words_of(check_page(render_report(examples.make_report(True))))
    assert "an attacker who knows which tokens the mitigation dropped" in words
    full = words_of(check_page(render_report(evidence.make_full_report(True))))
    assert "Audit once more with --suite full" not in full
    plain = words_of(check_page(render_report(examples.make_report())))
    assert "Audit once more with --suite full" not in plain


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


def test_what_was_written_stands_beside_the_control_and_the_base_model() -> None:
    (table,) = GenerationProbe.section(evidence.make_full_report()).tables
    assert [column.detail for column in table.columns] == [
        "decoding",
        "mean",
        "tokens, mean",
        "share of the length, mean",
        "documents",
        "documents",
        "generated, mean",
    ]
    heads = [(row.head.text, row.head.detail) for row in table.rows]
    assert heads[:4] == [
        ("control", "greedy"),
        ("Base model", "greedy"),
        ("control", "sampled, T=1, top-p 0.95"),
        ("Base model", "sampled, T=1, top-p 0.95"),
    ]
    assert heads[-4] == ("r64", "greedy")
    texts = [cell.text.replace("\u00a0", " ") for cell in table.rows[-4].cells]
    assert texts == ["0.790", "31.5", "24.0 %", "11 of 40", "13 of 40", "0.710"]


def test_a_report_without_generated_text_or_without_a_base_model() -> None:
    assert GenerationProbe.section(examples.make_report()) is None
    report = change_rows(
        evidence.make_full_report(), lambda row: None if row.model == "base" else row
    )
    (table,) = GenerationProbe.section(report).tables
    assert not any(row.tone == "base" for row in table.rows)
