"""The comparison page says what the record says, and reads well where much is missing."""

import report_examples as examples
from page_checks import check_page, words_of

from memguard import records as r
from memguard.report import render_comparison
from memguard.report.comparison_figures import build_trends
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
            assert f"{cell.near_verbatim.num_matched} of {cell.num_documents}" in words
            accuracy = cell.mean_token_accuracy
            assert accuracy == 1 or f"{100 * (accuracy or 0):.1f} %" in words
    for text in ("+4.8 %", "+11.0 %", "+14.6 %", "24.8 %", "49.8 %", comparison.command):
        assert text in words
    assert "One dropped token breaks a verbatim match" in words


def test_a_comparison_with_holes_renders() -> None:
    comparison = examples.make_comparison()
    empty = r.ComparisonCell(
        num_documents=0,
        num_matched=0,
        rate=None,
        ci=None,
        near_verbatim=r.NearVerbatim(num_matched=0, rate=None, ci=None),
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
    start = words.index("Document by document")
    shown, folded = words[start : words.index("Charts", start)].split("Show the other numbers")
    # Only plain, only this one, p after Holm; near-verbatim then verbatim; token accuracy.
    assert "goldfish-k4 40 trained 64 times 34 0 < 0.001 40 0 < 0.001 -17.7 pp" in shown
    assert "goldfish-k2 40 trained 64 times 40 0 < 0.001 40 0 < 0.001 -37.9 pp" in shown
    assert "trained 16 times" not in shown
    assert folded.index("trained 16 times") < folded.index("trained 4 times")
    assert "goldfish-k4 40 trained 4 times 1 0 1.000 0 0 1.000 -8.4 pp" in folded
    assert "McNemar's exact test, two-sided" in shown
    assert "for the 12 tests of this page" in shown
    assert page.count("<details>") == 1


def test_pairs_of_several_seeds_name_the_seed() -> None:
    words = words_of(check_page(render_comparison(examples.make_comparison(2))))
    start = words.index("Document by document")
    assert "goldfish-k4, seed 1 40 trained 64 times" in words[start:]


def test_without_pairs_there_is_no_empty_section() -> None:
    alone = examples.make_comparison().model_copy(update={"paired": []})
    page = render_comparison(alone)
    check_page(page)
    assert "Document by document" not in page
    assert "#paired" not in page


def test_zero_documents_with_many_tokens_right_are_pointed_out() -> None:
    comparison = examples.make_comparison()
    words = words_of(check_page(render_comparison(comparison)))
    assert (
        "With 'goldfish-k2' no document trained 64 times comes back near-verbatim, yet 62.1 % of "
        "the tokens are right, against 18.1 % in the control" in words
    )
    flat = {dose: examples.make_cell(0, 0, 0.2) for dose in ("0", "4")}
    quiet = [s.model_copy(update={"extraction": flat}) for s in comparison.settings]
    page = render_comparison(comparison.model_copy(update={"settings": quiet}))
    assert "comes back near-verbatim, yet" not in page


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
    assert "Documents trained once, continued for 50 tokens" in words
