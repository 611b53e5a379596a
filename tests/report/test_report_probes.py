"""A page lists only probes that ran, with the documents of each; the others with the reason."""

import evidence_examples as evidence
import pytest
import report_examples as examples
from page_checks import check_page, words_of
from pydantic import ValidationError
from result_examples import change_rows, change_tables, make_interval, make_metric, rate_row

from memguard import records as r
from memguard.audit.suite import PROBES
from memguard.pages.facts import describe_not_run, describe_probes, write_not_run, write_ran
from memguard.report.html import render_report
from memguard.report.model_card import render_model_card

WHY = {
    "membership": "no control documents",
    "canaries": "the model was not trained by memguard",
    "attacks": "no document was attacked",
    "mask_consistency": "no mitigation of the run drops labels",
}


def make_foreign_report() -> r.AuditReport:
    """Return a report of which half the probes did not run."""
    report = evidence.make_full_report()
    runs = [
        run.model_copy(update={"num_documents": None, "reason_not_run": WHY[run.name]})
        if run.name in WHY
        else run
        for run in report.probe_runs
    ]
    details = [row for row in report.tables.details if row.probe not in WHY]
    report = change_rows(report, lambda row: None if row.probe in WHY else row)
    report = change_tables(report, details=details, metrics=())
    return report.model_copy(update={"probe_runs": runs, "training": None})


def test_a_probe_that_ran_has_its_documents_version_and_settings() -> None:
    facts = {fact.term: fact for fact in describe_probes(evidence.make_full_report())}
    assert facts["canaries"].value == "32 canaries"
    assert facts["mask_consistency"].value == "40 texts"
    assert facts["sampling"].value == "160 documents"
    schemes = "schemes [(temperature 1), (temperature 1, top_k 40)]"
    assert facts["sampling"].detail == f"version 1; {schemes}"
    one = evidence.make_full_report().model_copy(
        update={"probe_runs": [examples.make_probe_run("extraction", 1)]}
    )
    assert [fact.value for fact in describe_probes(one)] == ["1 document"]


def test_a_score_that_was_not_computed_is_named() -> None:
    """'reference' needs another model; the probe ran without it."""
    report = evidence.make_full_report()
    for scores, ending in ((["loss", "reference"], "; not computed: reference"), (["loss"], "]")):
        probes = [{"name": "membership", "scores": scores}]
        method = report.method.model_copy(update={"probes": probes})
        facts = {f.term: f for f in describe_probes(report.model_copy(update={"method": method}))}
        assert facts["membership"].detail.endswith(ending)


def test_a_probe_that_did_not_run_is_listed_apart_with_its_reason() -> None:
    report = make_foreign_report()
    ran = [fact.term for fact in describe_probes(report)]
    assert ran == ["extraction", "grid", "sampling", "generation"]
    assert {fact.term: fact.detail for fact in describe_not_run(report)} == WHY
    assert not any(name in write_ran(report) for name in WHY)
    assert all(f"{name} ({why})" in write_not_run(report) for name, why in WHY.items())


def test_page_and_card_say_the_same() -> None:
    report = make_foreign_report()
    words = words_of(check_page(render_report(report)))
    only = "Only these probes ran: extraction (160 documents), grid (160 documents), "
    assert only in words
    assert "Probes that did not run" in words
    card = render_model_card(report, run_name="x", base_model=None, config_yaml="")
    assert "Only these probes ran: extraction (160 documents)" in card.replace("\u00a0", " ")
    for name, why in WHY.items():
        assert f"{name} ({why})" in words
        assert f"({why})" in card
    full = words_of(check_page(render_report(evidence.make_full_report())))
    assert "Probes that did not run" not in full
    assert "Not run:" not in full


def test_sections_without_numbers_give_the_same_reason() -> None:
    report = make_foreign_report()
    for name in ("membership", "canaries", "attacks"):
        section = PROBES[name].section(report)
        told = " ".join((*section.lead, *(note for t in section.tables for note in t.notes)))
        assert f"Probe '{name}' did not run: {WHY[name]}." in told


def test_a_probe_of_another_package_has_a_table_without_it() -> None:
    rows = [rate_row("first_word", "right", "r4", 7, minus=make_interval(0.1, 0.05, -1))]
    metric = make_metric("first_word", "right", package="other 1.2", meaning="First word right.")
    report = change_rows(examples.make_report(), add=rows)
    others = [one for one in report.tables.metrics if one.probe != "first_word"]
    words = words_of(check_page(render_report(change_tables(report, metrics=[*others, metric]))))
    assert "Probe 'first_word' of package other 1.2." in words
    assert "The details need this package, which is not installed." in words
    assert "7 of 40 17.5 % (7.3–32.8 %)" in words
    assert "Right - control" in words
    assert "Right: First word right." in words


def test_a_reason_is_as_hostile_as_any_text_of_a_record() -> None:
    report = examples.make_report()
    run = r.ProbeRun(
        name="<b>x", version=1, num_documents=None, reason_not_run="<script>alert(1)</script>\x1b"
    )
    page = render_report(report.model_copy(update={"probe_runs": [run]}))
    check_page(page)
    assert "<script>alert" not in page
    assert "\x1b" not in page


@pytest.mark.parametrize(
    ("documents", "reason"), [(None, None), (0, None), (-1, None), (3, "but it ran")]
)
def test_a_probe_ran_or_has_a_reason(documents: int | None, reason: str | None) -> None:
    with pytest.raises(ValidationError):
        r.ProbeRun(name="x", version=1, num_documents=documents, reason_not_run=reason)
