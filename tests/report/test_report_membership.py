"""Membership: what is shown, what could not be asked, and a baseline that needs no model."""

import evidence_examples as evidence
import pytest
import report_examples as examples
from page_checks import check_page, words_of

from memguard import records as r
from memguard.report import render_report
from memguard.report.audit_membership import build_membership, warn_of_blind
from memguard.report.page import Table


def change(report: r.AuditReport, score: str, **update: object) -> r.AuditReport:
    scores = [
        one.model_copy(update=update) if one.score == score else one for one in report.membership
    ]
    return report.model_copy(update={"membership": scores})


def texts(table: Table, number: int) -> list[str]:
    return [cell.text.replace("\u00a0", " ") for cell in table.rows[number].cells]


def test_scores_stand_with_rates_counts_and_definitions() -> None:
    scores, blind = build_membership(evidence.make_full_report()).tables
    assert [column.text.replace("\u00a0", " ") for column in scores.columns] == [
        "Score",
        "AUC",
        "Trained and control",
        "TPR at 10 % FPR",
        "Trained",
        "Control",
        "Missing",
    ]
    assert texts(scores, 0) == ["0.884", "told apart", "88 of 120", "120", "40", "0"]
    assert scores.rows[0].head.detail == "Mean log-probability of a token (Yeom et al. 2018)."
    assert texts(scores, 3) == ["0.791", "told apart", "75 of 116", "116", "40", "4"]
    assert scores.notes == (
        "The interval of a TPR includes the error of its threshold, which is estimated on the "
        "control documents. With fewer than about 3.7 / FPR of them (36 at 10\u00a0%, 368 at "
        "1\u00a0%) the interval starts at 0.",
        "Not shown: TPR at 0.1\u00a0% FPR needs ≥ 1,000 control documents; TPR at 1\u00a0% FPR "
        "needs ≥ 100 control documents.",
    )
    # Set apart, with what it means.
    assert [row.head.text for row in blind.rows] == ["Blind"]
    assert "the scores above prove nothing" in blind.notes[0]


def test_a_score_that_could_not_be_asked_is_no_zero() -> None:
    section = build_membership(evidence.make_full_report())
    assert texts(section.tables[0], 4)[:3] == ["n/a", "too few documents to say", "n/a"]
    assert texts(section.tables[0], 4)[3:] == ["0", "0", "160"]
    assert "Could not be computed: Reference model." in section.lead[0]


def test_a_rate_that_some_scores_have_says_what_the_others_need() -> None:
    report = evidence.make_full_report()
    rates = {"0.01": examples.make_rate(9, 120), "0.1": examples.make_rate(88, 120)}
    table = build_membership(change(report, "loss", tpr_at_fpr=rates)).tables[0]
    assert texts(table, 0)[2] == "9 of 120"
    cell = table.rows[1].cells[2]
    assert (cell.text, cell.detail) == ("n/a", "needs ≥ 100 control documents")
    # The unasked one lacks more than control documents.
    assert table.rows[4].cells[2].detail == "could not be computed"


@pytest.mark.parametrize(
    ("ci", "counts", "words"),
    [
        ((0.154, 0.332), (120, 40), "told apart, with the opposite sign"),
        ((0.45, 0.501), (120, 40), "not told apart"),
        ((0.5, 0.6), (120, 40), "not told apart"),
        ((0.501, 0.7), (10, 10), "told apart"),
        ((0.9, 1.0), (9, 40), "too few documents to say"),
        ((0.0, 0.1), (120, 9), "too few documents to say"),
        (None, (120, 40), "no interval"),
    ],
)
def test_a_score_says_which_way_it_points(
    ci: tuple[float, float] | None, counts: tuple[int, int], words: str
) -> None:
    """Dropped labels are the least likely tokens of a trained document, so Min-K% is reversed."""
    report = change(
        evidence.make_full_report(),
        "loss",
        auc=r.Interval(value=0.5 if ci is None else sum(ci) / 2, ci=ci),
        num_members=counts[0],
        num_nonmembers=counts[1],
    )
    section = build_membership(report)
    assert texts(section.tables[0], 0)[1] == words
    assert "with the opposite sign: an interval wholly below 0.5" in section.lead[0]


def test_a_baseline_above_chance_is_warned_of() -> None:
    report = evidence.make_full_report()
    assert warn_of_blind(report) is None  # 0.48 to 0.58
    auc = r.Interval(value=0.61, ci=(0.501, 0.72))
    loud = change(report, "blind", auc=auc)
    words = words_of(check_page(render_report(loud)))
    assert "Membership scores prove nothing here." in words
    assert "(AUC 0.610, 95 % CI 0.501–0.720)" in words
    for quiet in (None, r.Interval(value=0.9, ci=None), r.Interval(value=0.6, ci=(0.5, 0.7))):
        assert warn_of_blind(change(report, "blind", auc=quiet)) is None
    assert warn_of_blind(examples.make_report()) is None


def test_older_records_have_neither_definitions_nor_rates() -> None:
    old = examples.make_report()
    scores = [old.membership[0].model_copy(update={"score": "loss"}), old.membership[1]]
    section = build_membership(old.model_copy(update={"membership": scores}))
    (table,) = section.tables
    assert len(table.columns) == 5
    assert table.rows[0].head.detail == "Mean log-probability of a continuation token."
    assert table.rows[1].head.text == "min-k 20 %"
    assert table.notes == ()


def test_rates_that_are_none_are_left_out() -> None:
    wild = {"x": None, "1": None, "0": None, "nan": None, "-3": None, "1e-9": None}
    report = evidence.make_full_report()
    table = build_membership(change(report, "loss", tpr_at_fpr=wild)).tables[0]
    assert len(table.columns) == 7
    assert "needs ≥ 1,000,000,000 control documents" in table.notes[-1]
    check_page(render_report(change(report, "loss", tpr_at_fpr=wild)))
