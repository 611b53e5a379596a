"""Other windows, writing, change from base, masks and trends: their numbers, or why none."""

from collections.abc import Sequence

import evidence_examples as evidence
import report_examples as examples
from page_checks import check_page, words_of

from memguard import records as r
from memguard.report import render_report
from memguard.report.audit_doses import build_copies, build_trends
from memguard.report.audit_membership import build_masks
from memguard.report.audit_probes import build_generation, build_grid
from memguard.report.audit_summary import build_change_from_base
from memguard.report.page import Row


def texts(row: Row) -> list[str]:
    return [cell.text.replace("\u00a0", " ").replace("\u2212", "-") for cell in row.cells]


def heads(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return [(row.head.text, row.head.detail) for row in rows]


def test_the_change_from_base_is_model_minus_base() -> None:
    table = build_change_from_base(evidence.make_full_report())
    assert [row.head.text for row in table.rows] == ["control", "r4", "r16", "r64"]
    assert texts(table.rows[0]) == ["0.0 pp", "0.0 pp", "+5.3 pp", "+0.579"]
    # Near-verbatim 6 of 40; token accuracy 0.82 - 0.137; log-probability -0.33 + 3.379.
    assert texts(table.rows[3]) == ["0.0 pp", "+15.0 pp", "+68.3 pp", "+3.049"]
    assert table.rows[3].cells[3].detail.replace("\u2212", "-") == "+2.939 to +3.159"
    assert table.rows[0].tone == "control"


def test_without_a_base_model_there_is_no_change_from_base() -> None:
    report = evidence.make_full_report()
    alone = [
        measure.model_copy(
            update={
                "buckets": [
                    one.model_copy(
                        update={
                            "base": None,
                            "change_from_base": None,
                            "change_from_base_minus_control": None,
                        }
                    )
                    for one in measure.buckets
                ]
            }
        )
        for measure in report.measures
    ]
    changed = report.model_copy(update={"measures": alone})
    assert build_change_from_base(changed) is None
    assert build_change_from_base(examples.make_report()) is None
    page = render_report(changed)
    assert "Change from base" not in page
    grid, writing = build_grid(changed), build_generation(changed)
    assert grid.tables[0].rows[0].cells[0].note == ""
    assert not any(row.tone == "base" for row in writing.tables[0].rows)


def test_the_grid_has_a_row_a_window_and_a_column_a_bucket() -> None:
    section = build_grid(evidence.make_full_report())
    verbatim, accuracy = section.tables
    assert [c.text for c in verbatim.columns] == ["Window", "control", "r4", "r16", "r64"]
    assert verbatim.columns[-1].detail == "trained 64 times"
    assert heads(verbatim.rows)[:2] == [
        ("10 → 25 tokens", "from the first token"),
        ("10 → 50 tokens", "from the first token"),
    ]
    assert heads(verbatim.rows)[-1] == ("50 → 50 tokens", "from token 64")
    assert texts(verbatim.rows[-1]) == ["0 of 40", "0 of 40", "2 of 40", "10 of 40"]
    # 0.6 + 50 / 250, and the base model's below.
    cell = accuracy.rows[-1].cells[-1]
    assert (cell.text, cell.note) == ("80.0\u00a0%", "base: 13.1\u00a0%")


def test_many_windows_are_folded_and_many_buckets_counted() -> None:
    report = evidence.make_full_report()
    wide = [report.buckets[1].model_copy(update={"bucket": f"b{n}"}) for n in range(20)]
    more = [
        measure.model_copy(update={"parameters": {"offset": n, "prefix_tokens": "?"}})
        for n in range(30)
        for measure in report.measures
        if measure.probe == "grid"
    ]
    section = build_grid(report.model_copy(update={"buckets": wide, "measures": more}))
    table = section.tables[0]
    assert (len(table.rows), len(table.more_rows), table.more_label) == (12, 18, "Show 18 more")
    assert len(table.columns) == 13
    assert table.notes == ("8 more buckets are in the JSON.",)
    assert table.rows[0].head.text == "? → ? tokens"
    assert {cell.text for cell in table.rows[0].cells} == {"n/a"}


def test_documents_too_short_for_a_window_are_no_zero() -> None:
    report = evidence.make_full_report()
    short = r.MeasuredBucket(
        bucket="r64",
        num_documents=0,
        num_missing=40,
        model=examples.make_rate(0, 0),
        base=None,
        change_from_base=None,
        minus_control=None,
        change_from_base_minus_control=None,
    )
    measures = [
        measure.model_copy(update={"buckets": [*measure.buckets[:3], short]})
        for measure in report.measures
    ]
    section = build_grid(report.model_copy(update={"measures": measures}))
    cell = section.tables[0].rows[0].cells[-1]
    assert (cell.text, cell.detail) == ("n/a", "40 too short, or not in the sample")


def test_what_was_written_stands_beside_the_control_and_the_base_model() -> None:
    section = build_generation(evidence.make_full_report())
    table = section.tables[0]
    assert [column.text.replace("\u00a0", " ") for column in table.columns] == [
        "Bucket",
        "ROUGE-L",
        "Longest copied run",
        "Edit distance",
        "Near-verbatim",
        "BLEU above 0.75",
        "Type-token ratio",
    ]
    assert heads(table.rows)[:4] == [
        ("control", "greedy"),
        ("Base model", "greedy"),
        ("control", "sampled, T=1, top-p 0.95"),
        ("Base model", "sampled, T=1, top-p 0.95"),
    ]
    last = table.rows[-4]
    assert heads([last]) == [("r64", "greedy")]
    assert texts(last) == ["0.790", "31.5", "24.0 %", "11 of 40", "13 of 40", "0.710"]
    assert build_generation(examples.make_report()) is None


def test_masks_lead_with_the_worst_copy() -> None:
    section = build_masks(evidence.make_full_report())
    lead = section.lead[0].replace("\u00a0", " ")
    assert "worst rewriting is 'Lower case': 39 of 39 passages" in lead
    assert "51.8 % of a passage's dropped tokens" in lead
    rows = section.tables[0].rows
    assert texts(rows[0]) == ["3 of 40", "7.5 %", "1.1 %"]
    assert texts(rows[2]) == ["n/a", "n/a", "n/a"]
    assert rows[2].cells[0].detail == "no passage differs"
    assert rows[3].head.text == "Near-duplicates"


def test_masks_are_told_of_only_where_labels_are_dropped() -> None:
    plain = examples.make_report()
    assert build_masks(plain) is None  # drops none
    section = build_masks(examples.make_report(True))
    assert section.tables == ()
    assert "does not test whether copies of a text escape the mask" in section.lead[0]
    clean = [
        one.model_copy(update={"num_changed": 0, "mean_leaked_share": 0.0})
        for one in evidence.make_mask_changes()[:2]
    ]
    kept = build_masks(plain.model_copy(update={"mask_changes": clean}))
    assert "No copy has loss on a token" in kept.lead[0]
    none = build_masks(plain.model_copy(update={"mask_changes": evidence.make_mask_changes()[2:3]}))
    assert "No passage differs" in none.lead[0]


def test_trends_have_a_fit_and_a_p_value_or_a_reason() -> None:
    report = evidence.make_full_report()
    table = build_trends(report)
    assert [column.text for column in table.columns] == ["Rate", "0", "4", "16", "64", "z", "p"]
    flat, rising = table.rows
    assert texts(flat) == ["0 %", "0 %", "0 %", "0 %", "–", "n/a"]
    assert texts(rising) == ["0 %", "0 %", "0 %", "15.0 %", "3.91", "< 0.001"]
    # A fit that lost a bucket has no place for the others.
    lost = [report.trends[1].model_copy(update={"fitted": [0.1]})]
    row = build_trends(report.model_copy(update={"trends": lost}))
    assert texts(row.rows[0])[:4] == ["n/a"] * 4
    assert build_trends(report.model_copy(update={"dose_response": False})) is None


def test_few_copies() -> None:
    report = evidence.make_full_report()
    table = build_copies(report)
    assert [row.head.text for row in table.rows][:2] == ["only itself", "at most 2"]
    assert texts(table.rows[0]) == ["3 of 104", "2.9 %"]
    none = [r.ExtractedCopies(k=1, num_documents=0, num_extracted=0)]
    table = build_copies(report.model_copy(update={"extracted_copies": none}))
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
