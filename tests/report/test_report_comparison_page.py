"""The comparison page says what the record says, and reads well where much is missing."""

from dataclasses import replace

import comparison_examples as examples
import pytest
from page_checks import check_page, words_of
from result_examples import auc_row, make_interval, value_row

from memguard import records as r
from memguard.pages.page import LineChart
from memguard.report.comparison_front import build_trends
from memguard.report.comparison_picture import render_comparison_chart
from memguard.report.comparison_tables import build_gains
from memguard.report.html import render_comparison

pytestmark = pytest.mark.slow


def test_all_numbers_of_a_comparison_appear() -> None:
    comparison = examples.make_comparison()
    words = words_of(check_page(render_comparison(comparison)))
    for run in comparison.runs:
        assert run.setting in words
        assert run.run in words
        assert f"{run.cost.num_supervised_tokens:,}" in words
    for row in comparison.tables.results:
        if row.statistic == "rate" and row.seed is not None:
            assert f"{row.num_matched} of {row.num_documents}" in words
        if row.metric == "token_accuracy" and row.statistic == "mean":
            assert row.value == 1 or f"{100 * (row.value or 0):.1f} %" in words
        if row.metric == "nll":
            assert f"{row.value:.3f}" in words
    for text in ("+4.8 %", "+11.0 %", "+14.6 %", "24.8 %", "49.8 %", comparison.command):
        assert text in words
    assert "One wrong token breaks an exact match" in words


def test_a_comparison_with_holes_renders() -> None:
    empty = examples.make_run("plain", None, 4.4, [(64, 0, 0, 0.0)])
    counts = {"num_documents": 0, "num_matched": None, "value": None, "low": None, "high": None}
    rows = [
        replace(row, **counts, missing_because=r.NO_DOCUMENTS) if row.probe == "extraction" else row
        for row in empty[1]
    ]
    first = (empty[0], rows)
    none = examples.make_run("none", 4, 0.0, [])
    for chosen in ([first, none], [none, first], [none]):
        hole = examples.assemble(chosen).model_copy(update={"environment": {}})
        check_page(render_comparison(hole))
        assert render_comparison_chart(hole)


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
    shown, folded = words[start : words.index("Charts by number of repetitions", start)].split(
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
    assert page.count('<details class="printed">') == 1
    assert "<details>" not in page


def test_pairs_of_several_seeds_name_the_seed() -> None:
    words = words_of(check_page(render_comparison(examples.make_comparison(2))))
    start = words.index("Paired tests by document")
    assert "goldfish-k4, seed 1 40 trained 64 times" in words[start:]


def test_without_pairs_there_is_no_empty_section() -> None:
    alone = examples.assemble(examples.list_parts()[:1])
    page = render_comparison(alone)
    check_page(page)
    assert "Paired tests by document" not in page
    assert "#paired" not in page


def give_gains(
    comparison: r.Comparison, gains: dict[tuple[str, int], tuple[float, float]]
) -> r.Comparison:
    """Return the comparison with what training added beyond the control, by setting and dose."""
    rows = [
        value_row(
            *("extraction", "token_accuracy", f"r{dose}", make_interval(0.95, 0.01)),
            minus=make_interval(*gain, -1),
            setting=setting,
            seed=0,
            against="base",
        )
        for (setting, dose), gain in gains.items()
    ]
    blind = auc_row(r.BLIND, make_interval(0.53, 0.05))
    rows += [replace(blind, setting=run.setting, seed=0) for run in comparison.runs]
    present = {row.key for row in comparison.tables.results}
    return examples.change_rows(comparison, add=[row for row in rows if row.key not in present])


def test_tokens_learned_of_documents_that_are_not_extracted_are_pointed_out() -> None:
    gains = {
        ("plain", 64): (0.8, 0.03),  # extracted
        ("goldfish-k4", 16): (0.31, 0.03),
        ("goldfish-k2", 64): (0.44, 0.03),
        ("goldfish-k2", 16): (0.26, 0.03),
        ("goldfish-k2", 4): (0.9, 0.91),  # may be none at all
    }
    comparison = give_gains(examples.make_comparison(), gains)
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
    attacked = examples.make_full_comparison()
    gained = give_gains(attacked, {("goldfish-k2", 64): (0.44, 0.03)})
    assert gained != attacked
    words = words_of(check_page(render_comparison(gained)))
    assert "yet training raised" not in words


@pytest.mark.quick
@pytest.mark.parametrize("names", [{"plain", "goldfish-k4", "goldfish-k2"}, {"goldfish-k4"}])
def test_near_verbatim_that_was_not_generated_is_no_zero(names: set[str]) -> None:
    parts = [examples.attack(part) for part in examples.list_parts(2)]
    comparison = examples.assemble(
        [examples.drop_near(part) if part[0].setting in names else part for part in parts]
    )
    words = words_of(check_page(render_comparison(comparison)))
    row = "goldfish-k4 2 seeds None found 2 of 2 runs No sign 2 of 2 runs 79 98.8 % 93.2–99.97 %"
    assert f"{row} sampling" in words
    for seed in (0, 1):
        row = f"goldfish-k4, seed {seed} trained 64 times 0 of 40, 0 % (0–8.8 %) not generated 9 of"
        assert row in words
    num_pairs, num_tests = 12, len(comparison.tables.tests)
    missing = words.count("n/a not generated n/a not generated n/a not generated")
    assert missing == 2 * num_pairs - num_tests
    assert f"over the {num_tests} tests of this page" in words
    table = build_gains(comparison)
    assert table is not None
    near = {row.head.text: row.cells[1].detail for row in table.tables[0].rows}
    missing_in = {name for name, detail in near.items() if detail == "not generated"}
    # The base model is that of the first run.
    assert missing_in == names | ({"Base model"} if "plain" in names else set())
    chart = render_comparison_chart(comparison)
    assert "goldfish-k4: verbatim 0\u00a0%, near-verbatim –" in chart


def test_plain_loss_drops_no_labels() -> None:
    run, rows = examples.list_parts()[0]
    cost = run.cost.model_copy(update={"dropped_fraction": None})
    alone = examples.assemble([(run.model_copy(update={"cost": cost}), rows)])
    words = words_of(check_page(render_comparison(alone)))
    assert "none (plain loss) none none 52 s 853,440 420" in words


def test_documents_trained_once_are_called_so() -> None:
    once = examples.make_run("plain", None, 4.4, [(0, 0, 0, 0.2), (1, 0, 3, 0.5)])
    words = words_of(check_page(render_comparison(examples.assemble([once]))))
    assert "plain trained once 0 of 40, 0 % (0–8.8 %) 3 of 40" in words
