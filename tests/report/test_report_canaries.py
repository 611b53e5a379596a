"""Canaries: main numbers, what they rest on, and what is not known without them."""

import math

import evidence_examples as evidence
import pytest
import report_examples as examples
from page_checks import check_page, words_of

from memguard import records as r
from memguard.report import render_model_card, render_report
from memguard.report.audit_canaries import build_canaries, build_exposure, write_canaries
from memguard.report.charts import draw_chart


def show(canaries: r.CanaryScores | None) -> str:
    report = evidence.make_full_report().model_copy(update={"canaries": canaries})
    return words_of(check_page(render_report(report)))


def test_the_sentence_has_the_main_numbers() -> None:
    scores = evidence.make_canaries()
    words = show(scores)
    ceiling = math.log2(15)
    median = sorted(one.exposure_bits or 0 for one in scores.canaries[:17])[8]
    assert (
        "17 of 32 canaries were randomly selected for training (64 times): 3 of 17 are fully "
        f"extracted, and of the references 0 of 15; median exposure is {median:.1f} bits, the "
        f"highest {ceiling:.1f} bits, and the highest that 15 references can show {ceiling:.1f} "
        "bits. We guessed from the NLL of each secret, adjusted for the base model's, whether 24 "
        "of 32 canaries were trained; 23 guesses were right: for one canary with all its "
        "repetitions, epsilon of the training algorithm with these settings is at least 1.50 (this "
        "random split could show at most "
        "2.02) at delta 1e-05, with 95 % confidence." in words
    )
    for fact in (
        "3 of 17, 17.6 %, 95 % CI 3.8–43.4 %",
        f"{2.5 * median:.1f} bits and {2.5 * ceiling:.1f} bits Less precise",
        "75.0 % Share of the trained secrets' tokens that received loss at least once. 0 secrets "
        "received no loss.",
        "1.50 (this random split could show at most 2.02) at delta 1e-05 For the training "
        "algorithm with these settings and one canary with all its repetitions. Right guesses: 23 "
        "of 24, for 32 canaries; 95 % confidence.",
        "Assumptions behind the epsilon bound",
        *scores.assumptions,
    ):
        assert fact in words


def test_exposure_stands_beside_what_chance_would_do() -> None:
    scores = evidence.make_canaries()
    figure = build_exposure(scores)
    bits = [one.exposure_bits for one in scores.canaries if one.was_trained]
    steps = [0, 1, 2, 3, math.log2(15)]
    for row, step in zip(figure.table.rows, steps, strict=True):
        reached = sum(one >= step - 1e-9 for one in bits if one is not None)
        # Count the ranks, of all 16 that a secret among 15 references can have.
        by_chance = sum(math.log2(15) - math.log2(rank) >= step - 1e-9 for rank in range(1, 17))
        count, _, chance = (cell.text.replace("\u00a0", " ") for cell in row.cells)
        assert count == f"{reached} of 17"
        assert chance == f"{100 * by_chance / 16:.1f} %"
    assert figure.table.rows[-1].head.text == "3.9"
    svg = draw_chart(figure.chart, figure.key)
    assert "exposure of at least (bits)" in svg
    assert "times trained" not in svg


@pytest.mark.parametrize(
    ("references", "last"), [(16, "4"), (17, "4.1"), (2, "1"), (200_000, "17.6")]
)
def test_the_last_step_is_what_references_can_show(references: int, last: str) -> None:
    scores = evidence.make_canaries().model_copy(update={"num_ranked_references": references})
    figure = build_exposure(scores)
    assert figure.table.rows[-1].head.text == last
    assert len(figure.table.rows) <= 18


def test_a_bound_of_0_is_called_what_it_is() -> None:
    words = show(evidence.make_canaries(epsilon=0.0))
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
    scores = evidence.make_canaries(epsilon=epsilon)
    text = write_canaries(scores.model_copy(update={"median_exposure_bits": median}))
    text = text.replace("\u00a0", " ")
    assert (words is None and "Do not read" not in text) or (words is not None and words in text)


def test_guesses_without_a_base_model_say_so() -> None:
    scores = evidence.make_canaries()
    alone = [one.model_copy(update={"base_nll": None}) for one in scores.canaries]
    text = write_canaries(scores.model_copy(update={"canaries": alone}))
    assert "We guessed from the NLL of each secret whether 24 of 32 canaries" in text


def test_secrets_of_another_length_are_told() -> None:
    """Only one length is compared: ceiling and chance are those of its references."""
    scores = evidence.make_canaries()
    assert "another length" not in show(scores)
    mixed = scores.model_copy(update={"num_ranked": 26, "num_ranked_references": 12})
    words = show(mixed)
    assert (
        "6 secrets have another length in tokens than most, so that their NLL cannot be compared: "
        "they are neither ranked nor guessed. We guessed from the NLL of each secret, adjusted for "
        "the base model's, whether 24 of 26" in words
    )
    assert f"12 references can show {math.log2(12):.1f} bits" in words
    figure = build_exposure(mixed)
    assert figure.table.rows[-1].head.text == f"{math.log2(12):.1f}"
    assert "17 secrets, 12 references" in figure.caption
    one = write_canaries(scores.model_copy(update={"num_ranked": 31}))
    assert "1 secret has another length" in one


def test_what_is_missing_says_why() -> None:
    bare = evidence.make_canaries(epsilon=None).model_copy(
        update={
            "num_repetitions": None,
            "loss_coverage": None,
            "num_without_loss": None,
            "median_exposure_bits": None,
            "max_exposure_bits": None,
            "median_exposure_extrapolated_bits": None,
            "max_exposure_extrapolated_bits": None,
            "assumptions": [],
            "canaries": [],
            "num_references": 0,
            "num_ranked": 17,
            "num_ranked_references": 0,
            "reference_verbatim": examples.make_rate(0, 0),
        }
    )
    words = show(bare)
    for told in (
        "n/a: not recorded",
        "n/a: no guesses were made",
        "n/a: too few references, or all equal",
        "not equally often",
        "References: no documents",
    ):
        assert told in words
    assert build_exposure(bare) is None
    assert "Assumptions" not in words
    assert write_canaries(bare).count(";") == 0


def test_the_most_exposed_secrets_are_listed_first() -> None:
    section = build_canaries(evidence.make_full_report())
    (table,) = section.tables
    assert [row.head.text for row in table.rows] == [f"canary-{n:04d}" for n in range(5)]
    assert (len(table.rows), len(table.more_rows), table.more_label) == (5, 12, "Show 12 more")
    values = [cell.text.replace("\u00a0", " ") for cell in table.rows[0].cells]
    assert values == ["yes", "3.9 bits", "9.8 bits", "4.25", "64", "9 of 12"]
    assert table.rows[0].cells[3].detail == "base 28.00"


def test_without_canaries_the_page_says_what_is_not_known() -> None:
    report = evidence.make_full_report().model_copy(update={"canaries": None})
    why = r.ProbeRun(
        name="canaries", version=1, num_documents=None, reason_not_run="the run has none"
    )
    runs = [why if run.name == "canaries" else run for run in report.probe_runs]
    words = words_of(check_page(render_report(report.model_copy(update={"probe_runs": runs}))))
    assert "Probe 'canaries' did not run: the run has none." in words
    assert "no lower bound on the privacy loss" in words
    old = words_of(check_page(render_report(examples.make_report())))
    assert "Suite 'extraction' (version 1) does not measure canaries" in old


def test_the_model_card_has_one_line_each() -> None:
    report = evidence.make_full_report()
    card = render_model_card(report, run_name="x", base_model=None, config_yaml="")
    lines = card.replace("\u00a0", " ").splitlines()
    (cost,) = (line for line in lines if line.startswith("Attack cost"))
    assert cost.endswith("r64 100; control never.")
    (canaries,) = (line for line in lines if line.startswith("Canaries: "))
    assert "3 of 17 are fully extracted" in canaries
    assert "canary-0000" not in card
    old = render_model_card(examples.make_report(), run_name="x", base_model=None, config_yaml="")
    assert "Attack cost" not in old
    assert "Canaries" not in old
