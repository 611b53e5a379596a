"""Membership: what is shown, what could not be asked, and a baseline that needs no model."""

import math
from dataclasses import replace
from typing import Any

import evidence_examples as evidence
import numpy as np
import pytest
import report_examples as examples
from page_checks import check_page, words_of
from result_examples import auc_row, change_rows, change_tables, make_metric, rate_row

from memguard import records as r
from memguard.audit.probes.membership import MembershipProbe
from memguard.pages.membership import warn_of_blind
from memguard.pages.page import Point, RocChart, Table
from memguard.report.html import render_report


def change(
    report: r.AuditReport, score: str, auc: r.Interval | None, members: int = 120, **key: Any
) -> r.AuditReport:
    row = auc_row(score, auc, members, **key)
    return change_rows(report, lambda old: row if old.key == row.key else old)


def rate_at(fpr: str, matched: int | None) -> r.ResultRow:
    settings = {"score": "loss", "fpr": fpr}
    return rate_row("membership", "tpr", r.MEMBERS, matched, 120, settings=settings, num_other=40)


def texts(table: Table, number: int) -> list[str]:
    return [cell.text.replace("\u00a0", " ") for cell in table.rows[number].cells]


def test_scores_stand_with_rates_counts_and_definitions() -> None:
    report = evidence.make_full_report()
    meaning = "Mean log-probability of a token (Yeom et al. 2018)."
    metrics = [*report.tables.metrics, make_metric("membership", "auc", "score=loss")]
    kept = [m for m in metrics if (m.metric, m.parameters) != ("auc", "score=loss")]
    named = replace(metrics[-1], meaning=meaning)
    scores, blind = MembershipProbe.section(change_tables(report, metrics=[*kept, named])).tables
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
    assert scores.rows[0].cells[0].detail == "0.834–0.934"
    assert scores.rows[0].head.detail == meaning
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
    section = MembershipProbe.section(evidence.make_full_report())
    row = texts(section.tables[0], 4)
    assert row[:3] == ["n/a", "too few documents to say", "n/a"]
    assert row[3:5] == ["0", "0"]
    assert section.tables[0].rows[4].cells[0].detail == "could not be computed"
    assert "Could not be computed: Reference model." in section.lead[0]


def test_a_rate_that_some_scores_have_says_what_the_others_need() -> None:
    report = evidence.make_full_report()
    table = MembershipProbe.section(change_rows(report, add=[rate_at("0.01", 9)])).tables[0]
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
    auc = r.Interval(value=0.5 if ci is None else sum(ci) / 2, ci=ci)
    report = change(evidence.make_full_report(), "loss", auc, counts[0], num_other=counts[1])
    section = MembershipProbe.section(report)
    assert texts(section.tables[0], 0)[1] == words
    assert "with the opposite sign: an interval wholly below 0.5" in section.lead[0]


def test_a_baseline_above_chance_is_warned_of() -> None:
    report = evidence.make_full_report()
    assert warn_of_blind(report) is None  # 0.48 to 0.58
    loud = change(report, r.BLIND, r.Interval(value=0.61, ci=(0.501, 0.72)))
    words = words_of(check_page(render_report(loud)))
    assert "Membership scores prove nothing here." in words
    assert "(AUC 0.610, 95 % CI 0.501–0.720)" in words
    for quiet in (None, r.Interval(value=0.9, ci=None), r.Interval(value=0.6, ci=(0.5, 0.7))):
        assert warn_of_blind(change(report, r.BLIND, quiet)) is None
    assert warn_of_blind(loud.model_copy(update={"run": None})) is None
    assert warn_of_blind(examples.make_report()) is None


def test_rates_that_are_none_are_left_out() -> None:
    wild = [rate_at(fpr, None) for fpr in ("x", "1", "0", "nan", "-3", "1e-9")]
    report = change_rows(evidence.make_full_report(), add=wild)
    table = MembershipProbe.section(report).tables[0]
    assert len(table.columns) == 7
    assert "needs ≥ 1,000,000,000 control documents" in table.notes[-1]
    check_page(render_report(report))


def test_unknown_scores_and_no_scores() -> None:
    report = examples.make_report()
    (table,) = MembershipProbe.section(
        change_rows(report, add=[auc_row("<b>mine", r.Interval(value=0.7, ci=(0.6, 0.8)))])
    ).tables
    assert [row.head.text for row in table.rows] == ["Loss", "Min-K\u00a0%", "<b>mine"]
    assert (len(table.columns), table.notes) == (5, ())
    none = change_rows(report, lambda row: None if row.probe == "membership" else row)
    section = MembershipProbe.section(none)
    assert section.tables == ()
    assert "Probe 'membership' ran, but this report has no results of it." in section.lead[0]


def name_verdict(report: r.AuditReport, score: str | None) -> r.AuditReport:
    """Return the report with this score in the second line of its verdict."""
    membership = report.verdict.membership.model_copy(update={"score": score})
    verdict = report.verdict.model_copy(update={"membership": membership})
    return report.model_copy(update={"verdict": verdict})


def change_curves(report: r.AuditReport, **changes: Any) -> r.AuditReport:
    """Return the report with these values in every curve; ``curves=[]`` leaves none."""
    details = [d for d in report.tables.details if d.probe != "membership"]
    (old,) = (d for d in report.tables.details if d.probe == "membership")
    curves = changes.pop("curves", [{**curve, **changes} for curve in old.value["roc"]])
    return change_tables(report, details=[*details, replace(old, value={"roc": curves})])


def test_the_roc_shows_the_score_of_the_verdict_two_others_and_the_blind_baseline() -> None:
    report = name_verdict(evidence.make_full_report(), "loss")
    figure = MembershipProbe.section(report).figure
    assert figure is not None
    chart = figure.chart
    assert isinstance(chart, RocChart)
    # 'Loss' is the verdict's; of the others ReCaLL has the AUC closest to 0.5.
    labels = [line.label.replace("\u00a0", " ") for line in chart.lines]
    assert labels == ["Loss", "Loss minus base", "Min-K %++", "Blind baseline"]
    assert [line.style for line in chart.lines] == ["0", "1", "2", "blind"]
    assert chart.least == 1 / 40
    assert [text.replace("\u00a0", " ") for _, text in chart.ticks] == ["2.5 %", "10 %", "100 %"]
    # No point at a rate of 0, and the last one is 100 %.
    assert (chart.lines[0].points[0].x, chart.lines[0].points[-1]) == (1 / 40, Point(x=1.0, y=1.0))
    row = report.tables.find("membership", "tpr", r.MEMBERS, parameters="fpr=0.1, score=loss")
    assert row is not None
    assert row.ci is not None
    assert chart.marks == (Point(x=0.1, y=88 / 120, low=row.ci[0], high=row.ci[1]),)
    assert Point(x=0.1, y=88 / 120) in chart.lines[0].points
    assert [texts(figure.table, number)[0] for number in range(3)] == ["73", "88", "109"]
    assert [row.head.text.replace("\u00a0", " ") for row in figure.table.rows] == [
        "2.5 %",
        "10 %",
        "50 %",
    ]
    for words in ("120 trained and 40 control documents", "'Loss' is the score of the verdict"):
        assert words in figure.caption
    assert "Blind baseline: 32\u00a0of\u00a0120 at 2.5\u00a0%" in chart.description


def test_a_blind_baseline_that_separates_is_drawn_once() -> None:
    report = name_verdict(evidence.make_full_report(), "loss")
    report = change(report, r.BLIND, r.Interval(value=0.99, ci=(0.97, 1.0)))
    figure = MembershipProbe.section(report).figure
    assert figure is not None
    assert isinstance(figure.chart, RocChart)
    assert [line.style for line in figure.chart.lines] == ["0", "1", "2", "blind"]


@pytest.mark.parametrize(
    ("changes", "is_drawn"),
    [({}, True), ({"num_control": 9}, False), ({"num_members": 9}, False), ({"curves": []}, False)],
)
def test_a_roc_of_few_documents_is_not_drawn(changes: dict[str, Any], is_drawn: bool) -> None:
    section = MembershipProbe.section(change_curves(evidence.make_full_report(), **changes))
    assert (section.figure is not None) == is_drawn
    assert len(section.tables) == 2


def test_a_roc_without_a_score_of_the_verdict_has_three_others() -> None:
    figure = MembershipProbe.section(name_verdict(evidence.make_full_report(), None)).figure
    assert figure is not None
    assert isinstance(figure.chart, RocChart)
    assert len(figure.chart.lines) == 4
    assert "score of the verdict" not in figure.caption


@pytest.mark.parametrize("num_control", [10, 12, 40, 99, 100, 1000, 2500, 10_000, 123_456])
def test_the_labels_of_the_axes_do_not_touch(num_control: int) -> None:
    report = change_curves(
        evidence.make_full_report(),
        num_control=num_control,
        num_allowed=[0, 1, num_control],
        num_matched=[0, 5, 120],
    )
    figure = MembershipProbe.section(report).figure
    assert figure is not None
    assert isinstance(figure.chart, RocChart)
    length = math.log10(num_control)
    places = [math.log10(place) / length for place, _ in figure.chart.ticks]
    assert places[0] == pytest.approx(-1)
    assert places[-1] == 0
    # In shares of the axis: 340 units, and a label is at most 60 units wide.
    assert min(np.diff(places)) >= 0.15
