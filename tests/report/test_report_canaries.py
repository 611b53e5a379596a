"""Canaries: main numbers, what they rest on, and what is not known without them."""

import math
from dataclasses import replace
from typing import Any

import evidence_examples as evidence
import pytest
import report_examples as examples
from page_checks import check_page, words_of
from result_examples import change_rows, change_tables, rate_row, value_row

from memguard import records as r
from memguard.audit.probes.canaries import CanaryProbe, build_exposure, read_detail, write_canaries
from memguard.audit.probes.canary_results import CanaryDetail, compute_chance
from memguard.report.charts import draw_chart
from memguard.report.html import render_report
from memguard.report.model_card import render_model_card


def change(**changes: Any) -> r.AuditReport:
    """Return the full report with another detail of the canaries."""
    report = evidence.make_full_report()
    details = [
        replace(row, value={**row.value, **changes}) if row.probe == "canaries" else row
        for row in report.tables.details
    ]
    return change_tables(report, details=details)


def with_median(report: r.AuditReport, bits: float | None) -> r.AuditReport:
    key = {"statistic": "median", "num_other": 15}
    return change_rows(report, add=[value_row("canaries", "exposure_bits", r.SECRETS, bits, **key)])


def detail_of(report: r.AuditReport) -> CanaryDetail:
    detail = read_detail(report)
    assert detail is not None
    return detail


def show(report: r.AuditReport) -> str:
    return words_of(check_page(render_report(report)))


def test_the_sentence_has_the_main_numbers() -> None:
    report = evidence.make_full_report()
    words, median = show(report), math.log2(15) - math.log2(5)
    assert (
        "17 of 32 canaries were randomly selected for training (64 times): 3 of 17 are fully "
        f"extracted, and of the references 0 of 15; median exposure is {median:.1f} bits, the "
        "highest 3.9 bits, and the highest that 15 references can show 3.9 "
        "bits. We guessed from the NLL of each secret, adjusted for the base model's, whether 24 "
        "of 32 canaries were trained; 23 guesses were right: for one canary with all its "
        "repetitions, epsilon of the training algorithm with these settings is at least 1.50 (this "
        "random split could show at most "
        "2.02) at delta 1e-05, with 95 % confidence." in words
    )
    for fact in (
        "3 of 17, 17.6 %, 95 % CI 3.8–43.4 %",
        f"{median:.1f} bits and 3.9 bits By rank among the references: about 1 bit if nothing was "
        "learned, and at most log2(15) = 3.9 bits, however well a secret is known.",
        "75.0 % Share of the trained secrets' tokens that received loss at least once. 0 secrets "
        "received no loss.",
        "1.50 (this random split could show at most 2.02) at delta 1e-05 For the training "
        "algorithm with these settings and one canary with all its repetitions. Right guesses: 23 "
        "of 24, for 32 canaries; 95 % confidence.",
        "Assumptions behind the epsilon bound",
        *detail_of(report).assumptions,
    ):
        assert fact in words


def test_exposure_stands_beside_what_chance_would_do() -> None:
    steps, reached = [0, 1, 2, 3, math.log2(15)], [17, 14, 8, 2, 1]
    exposure = {"bits": steps, "reached": reached, "num_secrets": 17}
    figure = build_exposure(detail_of(change(exposure=exposure)))
    assert figure is not None
    for row, step, count in zip(figure.table.rows, steps, reached, strict=True):
        # Count the ranks, of all 16 that a secret among 15 references can have.
        by_chance = sum(math.log2(15) - math.log2(rank) >= step - 1e-9 for rank in range(1, 17))
        assert compute_chance(step, 15) == by_chance / 16
        shown, _, chance = (cell.text.replace("\u00a0", " ") for cell in row.cells)
        assert shown == f"{count} of 17"
        assert chance == f"{100 * by_chance / 16:.1f} %"
    assert figure.table.rows[-1].head.text == "3.9"
    assert "17 secrets, 15 references" in figure.caption
    svg = draw_chart(figure.chart, figure.key)
    assert "exposure of at least (bits)" in svg
    assert "times trained" not in svg


def test_a_bound_of_0_is_called_what_it_is() -> None:
    words = show(change(epsilon_lower_bound=0.0))
    assert "no lower bound on epsilon above 0 (this random split could show at most 2.02)." in words
    assert "0 is no evidence of privacy." in words


@pytest.mark.parametrize(
    ("epsilon", "median", "words"),
    [
        (0.0, 3.7, "half of the trained secrets reach 3.7 bits, and of untrained ones at most one "
         "in 13 would. Do not read the bound as little memorization."),
        (0.5, 2.0, "half of the trained secrets reach 2.0 bits"),
        (0.51, 3.7, None),
        (0.0, 1.9, None),
        (1.5, 0.9, "Do not read the exposure as no memorization."),
        (1.5, 1.1, None),
        (0.0, 0.9, None),
    ],
)  # fmt: skip
def test_a_bound_that_contradicts_the_exposure_says_so(
    epsilon: float, median: float, words: str | None
) -> None:
    """A bound is low up to a quarter of 2.02; secrets without a trace have a median of 1 bit."""
    text = write_canaries(with_median(change(epsilon_lower_bound=epsilon), median))
    text = text.replace("\u00a0", " ")
    assert (words is None and "Do not read" not in text) or (words is not None and words in text)


def test_guesses_without_a_base_model_say_so() -> None:
    text = write_canaries(change(has_base=False))
    assert "We guessed from the NLL of each secret whether 24 of 32 canaries" in text


def test_secrets_of_another_length_are_told() -> None:
    """Only one length is compared: ceiling and chance are those of its references."""
    assert "another length" not in write_canaries(evidence.make_full_report())
    words = show(change(num_ranked=26, num_ranked_references=12))
    assert (
        "6 secrets have another length in tokens than most, so that their NLL cannot be compared: "
        "they are neither ranked nor guessed. We guessed from the NLL of each secret, adjusted for "
        "the base model's, whether 24 of 26" in words
    )
    assert f"12 references can show {math.log2(12):.1f} bits" in words
    assert "1 secret has another length" in write_canaries(change(num_ranked=31))


def test_what_is_missing_says_why() -> None:
    bare = change(
        num_repetitions=None,
        epsilon_lower_bound=None,
        epsilon_ceiling=None,
        assumptions=[],
        num_references=0,
        num_ranked=17,
        num_ranked_references=0,
        exposure={"bits": [], "reached": [], "num_secrets": 0},
    )

    def clear(row: r.ResultRow) -> r.ResultRow:
        if row.probe != "canaries" or row.metric == "verbatim":
            return row
        return replace(row, value=None, num_matched=None, missing_because="not recorded")

    none = rate_row("canaries", "verbatim", r.REFERENCE_SECRETS, 0, 0)
    bare = change_rows(bare, clear, add=[none])
    words = show(bare)
    for told in (
        "n/a: not recorded",
        "n/a: no guesses were made",
        "n/a: too few references By rank among the references, of which there are none.",
        "not equally often",
        "References: no documents",
    ):
        assert told in words
    assert build_exposure(detail_of(bare)) is None
    assert "Assumptions" not in words
    assert write_canaries(bare).count(";") == 0


def test_no_single_canary_is_on_the_page() -> None:
    section = CanaryProbe.section(evidence.make_full_report())
    assert section.tables == ()
    assert len(section.facts) == 5


def test_without_canaries_the_page_says_what_is_not_known() -> None:
    report = evidence.make_full_report()
    details = [row for row in report.tables.details if row.probe != "canaries"]
    without = change_tables(
        change_rows(report, lambda row: None if row.probe == "canaries" else row), details=details
    )
    why = r.ProbeRun(
        name="canaries", version=1, num_documents=None, reason_not_run="the run has none"
    )
    runs = [why if run.name == "canaries" else run for run in report.probe_runs]
    words = show(without.model_copy(update={"probe_runs": runs}))
    assert "Probe 'canaries' did not run: the run has none." in words
    assert "no lower bound on the privacy loss" in words
    assert "Suite 'extraction' (version 1) does not measure canaries" in show(
        examples.make_report()
    )


def test_the_model_card_has_one_line_each() -> None:
    report = evidence.make_full_report()
    card = render_model_card(report, run_name="x", base_model=None, config_yaml="")
    lines = card.replace("\u00a0", " ").splitlines()
    (cost,) = (line for line in lines if line.startswith("Attack cost"))
    assert cost.endswith("r64 100; control never.")
    (canaries,) = (line for line in lines if line.startswith("Canaries: "))
    assert "3 of 17 planted secrets were extracted, and 0 of 15 that were never trained" in canaries
    old = render_model_card(examples.make_report(), run_name="x", base_model=None, config_yaml="")
    assert "Attack cost" not in old
    assert "Canaries" not in old
