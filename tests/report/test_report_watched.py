"""What a page says of training, and of audits during it: first steps, budget, chart and table."""

from typing import Any

import pytest
import report_examples as examples
from page_checks import check_page, words_of
from result_examples import change_rows, rate_row, value_row

from memguard import records as r
from memguard.pages.page import CurveChart
from memguard.records.audit import WatchedStep
from memguard.report.audit_training import build_training
from memguard.report.html import render_report
from memguard.report.model_card import render_model_card
from memguard.report.training_curve import build_during

STEPS = (0, 10, 20)


def monitor(
    step: int, num_learned: int, *, num_tightened: int = 0, over: tuple[str, ...] = ()
) -> tuple[WatchedStep, list[r.ResultRow]]:
    """Return an audit of three buckets, of which r64 alone is learned, and its rows."""
    rows = []
    for bucket, learned in (("control", 0), ("r4", 0), ("r64", num_learned)):
        counts = {"verbatim": learned, "near_verbatim": learned, "learned": learned}
        rows += [
            rate_row("extraction", metric, bucket, matched, 20, step=step)
            for metric, matched in counts.items()
        ]
        accuracy = 0.2 + learned / 25
        rows.append(value_row("extraction", "token_accuracy", bucket, accuracy, 20, step=step))
    tightened = {"r64": num_tightened}
    watched = WatchedStep(
        step=step,
        over_limit=list(over),
        num_tightened=tightened,
        audit_s=0.1,
        trained=["r4", "r64"],
    )
    return watched, rows


def make(*steps: tuple[WatchedStep, list[r.ResultRow]], **fields: object) -> r.AuditReport:
    report = change_rows(examples.make_report(), add=[row for _, rows in steps for row in rows])
    watched = [step for step, _ in steps]
    training = report.training.model_copy(update={"watched": watched, **fields})
    return report.model_copy(update={"training": training})


def budget(action: str) -> r.Budget:
    return r.Budget.model_validate({"metric": "near_verbatim", "limit": 0.1, "action": action})


def during(report: r.AuditReport) -> Any:
    return build_during(report.training, report.tables)


def test_nothing_is_shown_where_nobody_looked() -> None:
    assert during(examples.make_report()) is None
    assert "During training" not in render_report(examples.make_report())


def test_the_first_step_of_each_bucket_is_told() -> None:
    section = during(make(monitor(0, 0), monitor(10, 2), monitor(20, 8)))
    assert section.lead == (
        "First extraction of a document that was not extracted before training: r4 none, "
        "r64 at step 10.",
    )
    chart = section.figure.chart
    assert isinstance(chart, CurveChart)
    (panel,) = chart.panels
    assert [line.label for line in panel.lines] == ["r4", "r64", "control"]
    points = [(point.x, point.y) for point in panel.lines[1].points]
    assert points == [(0, 0), (10, pytest.approx(10)), (20, pytest.approx(40))]
    last = section.figure.table.rows[-1]
    assert [cell.text.replace("\u00a0", " ") for cell in last.cells] == ["", "0 of 20", "8 of 20"]


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (
            make(monitor(0, 0), monitor(10, 1, num_tightened=7), budget=budget("tighten")),
            "close to extraction got a stricter mitigation: 7 of r64. It was kept.",
        ),
        (
            make(monitor(0, 0), monitor(10, 5, over=("r64",)), budget=budget("tighten")),
            "got a stricter mitigation: none. Still exceeded by r64.",
        ),
        (
            make(
                monitor(0, 0),
                monitor(430, 5, over=("r64",)),
                budget=budget("stop"),
                num_steps=420,
                last_step=430,
                kept_by="budget",
                stopped_by="budget",
            ),
            "r64 exceeded it at step 430, so the model is that of step 420.",
        ),
        (make(monitor(0, 0), budget=budget("stop")), "training never exceeded it."),
    ],
)
def test_what_a_budget_did_is_told_on_the_page_and_the_card(
    report: r.AuditReport, told: str
) -> None:
    assert told in words_of(check_page(render_report(report)))
    card = render_model_card(report, run_name="run", base_model=None, config_yaml="name: run")
    assert told.split(":")[0] in card


def test_where_nothing_was_learnt_it_is_said_once() -> None:
    section = during(make(monitor(0, 0), monitor(10, 0)))
    assert section.lead[0] == (
        "Of the sample that was audited during training, no document became extractable."
    )


def test_audits_that_generated_nothing_are_shown() -> None:
    report = change_rows(
        make(monitor(0, 0), monitor(10, 2)),
        lambda row: None if row.step is not None and row.metric == "near_verbatim" else row,
    )
    words = words_of(check_page(render_report(report)))
    assert "not extracted before training: r4 none, r64 at step 10." in words


def test_being_above_the_control_is_not_called_learned() -> None:
    # Before training the documents may be easier than the control's already.
    page = render_report(make(monitor(0, 0), monitor(10, 0)))
    assert "Step 0 is the model before training" in page
    assert "what is above it" not in page


def test_many_audits_are_folded() -> None:
    steps = [monitor(10 * number, min(number, 20)) for number in range(40)]
    section = during(make(*steps))
    table = section.figure.table
    assert (len(table.rows), len(table.more_rows)) == (12, 28)
    assert table.rows[-1].head.text == "390"
    check_page(render_report(make(*steps)))


GOLDFISH = {"name": "goldfish", "k": 8, "k_by_dose": {}}


def budget_facts(action: Any) -> r.Budget:
    return r.Budget(metric="near_verbatim", limit=0.1, action=action)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "masked by goldfish; target 12.5 % (1 in 8)"),
        ({"budget": budget_facts("stop")}, "masked by goldfish; target 12.5 % (1 in 8)"),
        # Documents differ in what was asked: the share beside it is another one.
        ({"mitigations": [{**GOLDFISH, "k_by_dose": {"16": 4, "64": 2}}]}, ""),
        ({"budget": budget_facts("tighten")}, ""),
        ({"mitigations": [{"name": "focal", "gamma": 2.0}]}, ""),
    ],
)
def test_the_share_asked_for_is_told_where_there_is_one(changes: dict[str, Any], said: str) -> None:
    report = examples.make_report(goldfish=True)
    training = report.training.model_copy(update={"mitigations": [GOLDFISH], **changes})
    section = build_training(report.model_copy(update={"training": training}))
    (fact,) = [each for each in section.facts if each.term == "Labels dropped"]
    assert fact.detail.replace("\u00a0", " ") == said


def test_the_exported_step_is_named_and_drawn() -> None:
    losses = [r.LossPoint(step=step, nll=nll) for step, nll in ((0, 4.0), (10, 3.0), (20, 3.5))]
    curve = r.LossCurve(training=losses[1:], heldout=losses)
    report = make(curve=curve, num_steps=10, last_step=20, kept_by="heldout", stopped_by="heldout")
    section = during(report)
    said = (
        "The model is that of step 10 of 20 taken, which had the lowest held-out loss. Training "
        "ended early after 1 measurement without a lower held-out loss."
    )
    assert section.lead == (said,)
    assert (section.figure.chart.mark_at, len(section.figure.chart.panels)) == (10, 1)
    page = check_page(render_report(report))
    assert said in words_of(page)
    card = render_model_card(report, run_name="run", base_model=None, config_yaml="name: run")
    assert "step 10 of 20" in card
