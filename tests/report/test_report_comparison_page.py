"""The comparison page says what the record says, and reads well where much is missing."""

import evidence_examples as evidence
import pytest
import report_examples as examples
from page_checks import check_page, words_of

from memguard import records as r
from memguard.compare.front import recommend
from memguard.report import render_comparison, render_comparison_chart
from memguard.report.comparison_front import build_trends
from memguard.report.comparison_tables import build_gains
from memguard.report.page import LineChart


def test_all_numbers_of_a_comparison_appear() -> None:
    comparison = examples.make_comparison()
    words = words_of(check_page(render_comparison(comparison)))
    for setting in comparison.settings:
        assert setting.name in words
        assert setting.run in words
        assert f"{setting.utility.heldout_nll:.3f}" in words
        assert f"{setting.cost.num_supervised_tokens:,}" in words
        for cell in setting.extraction.values():
            assert f"{cell.num_matched} of {cell.num_documents}" in words
            assert cell.near_verbatim is not None
            for share in (cell.near_verbatim, cell.teacher_forced_90):
                assert f"{share.num_matched} of {cell.num_documents}" in words
            accuracy = cell.mean_token_accuracy
            assert accuracy == 1 or f"{100 * (accuracy or 0):.1f} %" in words
    for text in ("+4.8 %", "+11.0 %", "+14.6 %", "24.8 %", "49.8 %", comparison.command):
        assert text in words
    assert "One wrong token breaks an exact match" in words


def test_a_comparison_with_holes_renders() -> None:
    comparison = examples.make_comparison()
    empty = r.ComparisonCell(
        num_documents=0,
        num_matched=0,
        rate=None,
        ci=None,
        near_verbatim=examples.make_share(0, 0),
        teacher_forced_90=examples.make_share(0, 0),
        mean_token_accuracy=None,
    )
    first = comparison.settings[0].model_copy(update={"extraction": {"64": empty, "x": empty}})
    none = comparison.settings[1].model_copy(
        update={
            "extraction": {},
            "utility": r.Utility(
                heldout_nll=0.0, base_heldout_nll=0.0, num_documents=0, num_tokens=0
            ),
        }
    )
    for chosen in ([first, none], [none, first], [none]):
        hole = comparison.model_copy(
            update={"settings": chosen, "base_extraction": {}, "environment": {}}
        )
        check_page(render_comparison(hole))


def test_runs_that_differ_by_seed_share_a_look_and_are_told_apart() -> None:
    comparison = examples.make_comparison(3)
    parser = check_page(render_comparison(comparison))
    words = words_of(parser)
    assert "goldfish-k4, seed 2" in words
    first, *_ = build_trends(comparison)
    assert isinstance(first.chart, LineChart)
    named = [line.label for line in first.chart.lines if line.label]
    assert named == ["plain", "goldfish-k4", "goldfish-k2", "Base model"]


def test_pairs_of_the_highest_dose_are_open_the_others_folded() -> None:
    page = render_comparison(examples.make_comparison())
    words = words_of(check_page(page))
    start = words.index("Paired tests by document")
    shown, folded = words[start : words.index("Extraction rate by exposure", start)].split(
        "Show the other numbers"
    )
    # Only plain, only this one, p after Holm; verbatim then near-verbatim; token accuracy.
    assert "goldfish-k4 40 trained 64 times 40 0 < 0.001 34 0 < 0.001 -17.7 pp" in shown
    assert "goldfish-k2 40 trained 64 times 40 0 < 0.001 40 0 < 0.001 -37.9 pp" in shown
    assert "trained 16 times" not in shown
    assert folded.index("trained 16 times") < folded.index("trained 4 times")
    assert "goldfish-k4 40 trained 4 times 0 0 1.000 1 0 1.000 -8.4 pp" in folded
    assert "McNemar's exact test, two-sided" in shown
    assert "over the 12 tests of this page" in shown
    assert page.count("<details>") == 2, "and the data of the first chart"


def test_pairs_of_several_seeds_name_the_seed() -> None:
    words = words_of(check_page(render_comparison(examples.make_comparison(2))))
    start = words.index("Paired tests by document")
    assert "goldfish-k4, seed 1 40 trained 64 times" in words[start:]


def test_without_pairs_there_is_no_empty_section() -> None:
    alone = examples.make_comparison().model_copy(update={"paired": []})
    page = render_comparison(alone)
    check_page(page)
    assert "Paired tests by document" not in page
    assert "#paired" not in page


def give_gain(
    comparison: r.Comparison, gains: dict[tuple[str, str], r.Interval | None]
) -> r.Comparison:
    """Return the comparison with what training added beyond the control, by setting and dose."""
    settings = [
        setting.model_copy(
            update={
                "extraction": {
                    dose: cell.model_copy(
                        update={"gain_minus_control": gains.get((setting.name, dose))}
                    )
                    for dose, cell in setting.extraction.items()
                }
            }
        )
        for setting in comparison.settings
    ]
    return comparison.model_copy(update={"settings": settings})


def test_tokens_learned_of_documents_that_are_not_extracted_are_pointed_out() -> None:
    gains = {
        ("plain", "64"): examples.make_interval(0.8, 0.03, -1),  # extracted
        ("goldfish-k4", "16"): examples.make_interval(0.31, 0.03, -1),
        ("goldfish-k2", "64"): examples.make_interval(0.44, 0.03, -1),
        ("goldfish-k2", "16"): examples.make_interval(0.26, 0.03, -1),
        ("goldfish-k2", "4"): examples.make_interval(0.9, 0.91, -1),  # may be none at all
        ("goldfish-k4", "4"): None,
    }
    comparison = give_gain(examples.make_comparison(), gains)
    words = words_of(check_page(render_comparison(comparison)))
    assert (
        "With 'goldfish-k2' no document trained 64 times is extracted, yet training raised their "
        "teacher-forced token accuracy by +44.0 pp more than that of the control (+41.0 to +47.0):"
        in words
    )
    assert words.count("yet training raised") == 1
    # An accuracy above the control's, whatever the base model had, says nothing of training.
    words = words_of(check_page(render_comparison(examples.make_comparison())))
    assert "yet training raised" not in words


def test_what_an_attack_extracts_is_not_called_learned_only() -> None:
    gains = {("goldfish-k2", "64"): examples.make_interval(0.44, 0.03, -1)}
    attacked = evidence.make_full_comparison()
    words = words_of(check_page(render_comparison(give_gain(attacked, gains))))
    assert "yet training raised" not in words


@pytest.mark.parametrize("names", [{"plain", "goldfish-k4", "goldfish-k2"}, {"goldfish-k4"}])
def test_near_verbatim_that_was_not_generated_is_no_zero(names: set[str]) -> None:
    full = evidence.make_full_comparison(2)
    settings = [
        setting.model_copy(
            update={
                "extraction": {
                    dose: cell.model_copy(update={"near_verbatim": None})
                    for dose, cell in setting.extraction.items()
                }
            }
        )
        if setting.name in names
        else setting
        for setting in full.settings
    ]
    pairs = [
        pair.model_copy(update={"near_verbatim": None})
        if {pair.setting, pair.against} & names
        else pair
        for pair in full.paired
    ]
    front = examples.make_front(settings)
    parts = {"settings": settings, "paired": pairs, "front": front}
    comparison = full.model_copy(update={**parts, "recommendation": recommend(front)})
    words = words_of(check_page(render_comparison(comparison)))
    assert "goldfish-k4 : 0 of 80 verbatim, near-verbatim not generated, teacher-forced" in words
    row = (
        "goldfish-k4 2 seeds No extraction found 2 of 2 runs 0 % 0–4.5 % verbatim 0 of 80 0 % "
        "(0–4.5 %) n/a not generated 82.3 %"
    )
    assert row in words
    for seed in (0, 1):
        row = f"goldfish-k4, seed {seed} trained 64 times 0 of 40, 0 % (0–8.8 %) not generated 9 of"
        assert row in words
    num_pairs = sum(pair.near_verbatim is None for pair in pairs)
    assert words.count("n/a not generated n/a not generated n/a not generated") == num_pairs
    num_tests = 2 * len(pairs) - num_pairs
    assert f"over the {num_tests} tests of this page" in words
    table = build_gains(comparison)
    assert table is not None
    near = {row.head.text: row.cells[1].detail for row in table.tables[0].rows}
    assert {name for name, detail in near.items() if detail == "not generated"} == names
    chart = render_comparison_chart(comparison)
    assert "goldfish-k4: verbatim 0\u00a0%, near-verbatim –" in chart


def test_plain_loss_drops_no_labels() -> None:
    comparison = examples.make_comparison()
    first = comparison.settings[0]
    cost = first.cost.model_copy(update={"dropped_fraction": None})
    alone = comparison.model_copy(
        update={"settings": [first.model_copy(update={"cost": cost})], "paired": []}
    )
    words = words_of(check_page(render_comparison(alone)))
    assert "reference none 52 s 853,440" in words


def test_documents_trained_once_are_called_so() -> None:
    comparison = examples.make_comparison()
    cells = {"0": examples.make_cell(0, 0, 0.2), "1": examples.make_cell(0, 3, 0.5)}
    once = [s.model_copy(update={"extraction": cells}) for s in comparison.settings]
    update = {"settings": once, "base_extraction": cells, "paired": []}
    words = words_of(check_page(render_comparison(comparison.model_copy(update=update))))
    assert "Documents trained once, continuation of 50 tokens" in words
