"""Risk against utility: crosses that can be told apart, and which settings are beaten by others."""

import re
from xml.etree import ElementTree

import comparison_examples as examples
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_checks import check_page, words_of

from memguard import records as r
from memguard.pages.page import FrontChart
from memguard.records.comparison import find_change
from memguard.report.charts import draw_chart, spread_evenly
from memguard.report.comparison_front import build_front, name_dominators, show_risk
from memguard.report.html import render_comparison

pytestmark = pytest.mark.slow


def get_chart(comparison: r.Comparison) -> FrontChart:
    figure = build_front(comparison)
    assert isinstance(figure.chart, FrontChart)
    return figure.chart


def test_the_sentences_lead_and_the_table_follows() -> None:
    comparison = examples.make_comparison()
    words = words_of(check_page(render_comparison(comparison)))
    place = words.index("Recommendation")
    for head, text in comparison.recommendation.list_sentences():
        place = words.index(f"{head} : {text}", place)
    place = words.index("Risk and utility of each setting", place)
    assert words.index(comparison.recommendation.rule) > place


def test_each_setting_has_one_cross_and_one_name() -> None:
    comparison = examples.make_sweep()
    chart = get_chart(comparison)
    names = [point.name for point in comparison.front]
    assert [mark.label for mark in chart.marks] == names
    assert len(names) == 12
    root = ElementTree.fromstring(draw_chart(chart, "front"))
    texts = [(text.text or "").strip() for text in root.iter("text")]
    assert all(texts.count(name) == 1 for name in names)
    first, second = comparison.front[:2]
    assert (chart.marks[0].x, chart.marks[0].y) == (0, 100 * (first.risk or 0))
    assert chart.marks[1].x == pytest.approx(100 * (second.utility / first.utility - 1))
    change = find_change(comparison.tables, second.name)
    assert chart.marks[1].x_ends == pytest.approx((100 * change.low, 100 * change.high))
    assert second.risk_ci is not None
    assert chart.marks[1].y_ends == pytest.approx(tuple(100 * end for end in second.risk_ci))


def test_names_do_not_cover_each_other() -> None:
    svg = draw_chart(get_chart(examples.make_sweep()), "front")
    places = re.findall(r'x="([\d.]+)" y="([\d.]+)"[^>]*>(?:plain|goldfish)', svg)
    assert len(places) == 12
    assert len({x for x, _ in places}) == 1, "one column"
    heights = sorted(float(y) for _, y in places)
    # Letters are 11.5 units high.
    assert min(np.diff(heights)) > 12


@given(st.lists(st.floats(0, 1), max_size=30), st.floats(0.01, 0.1))
def test_spread_names_keep_their_distance_and_order(wanted: list[float], step: float) -> None:
    wanted.sort()
    places = spread_evenly(wanted, step)
    assert len(places) == len(wanted)
    # Distances are sums of doubles near 1.
    assert all(np.diff(places) >= step - 1e-9)
    assert all(place <= 1 for place in places)
    if all(np.diff(wanted) > step + 1e-9):
        assert places == wanted


def test_beaten_settings_are_marked_wherever_they_are_shown() -> None:
    comparison = examples.make_sweep()
    beaten = [point for point in comparison.front if point.is_dominated]
    assert 0 < len(beaten) < 11
    chart = get_chart(comparison)
    assert [m.label for m in chart.marks if m.is_dominated] == [point.name for point in beaten]
    page = render_comparison(comparison)
    words = words_of(check_page(page))
    for point in beaten:
        assert f" {name_dominators(point)} " in words
    assert page.count('<tr class="dominated">') == len(beaten)


@pytest.mark.parametrize(
    ("by", "beyond", "told"),
    [
        ([], [], ""),
        (["a"], [], "'a'"),
        (["a", "b", "c"], [], "'a' and 2 more"),
        (["a", "b", "c"], ["c"], "'c' and 2 more"),
    ],
)
def test_who_beats_a_setting(by: list[str], beyond: list[str], told: str) -> None:
    point = examples.make_comparison().front[0]
    update = {"dominated_by": by, "dominated_beyond_ci_by": beyond}
    assert name_dominators(point.model_copy(update=update)) == told


@pytest.mark.quick
def test_the_table_of_settings_is_over_seeds() -> None:
    comparison = examples.make_comparison(3)
    words = words_of(check_page(render_comparison(comparison)))
    four = comparison.front[1]
    # 6 of 40 with each seed.
    low, high = (100 * end for end in four.risk_ci or (0, 0))
    assert (
        "goldfish-k4 3 seeds None found 3 of 3 runs No sign 3 of 3 runs 18 15.0 % "
        f"{low:.1f}–{high:.1f} % near-verbatim {four.utility:.3f}" in words
    )
    low, high = (100 * end for end in find_change(comparison.tables, four.name).ci)
    assert f"{four.utility:.3f} +4.8 % {low:+.1f} to {high:+.1f} %" in words
    assert "Documents of all seeds are counted together" in words


def test_settings_without_risk_or_with_wild_losses_have_no_cross() -> None:
    comparison = examples.make_comparison()
    none = dict.fromkeys(("risk", "risk_low", "risk_high", "risk_by"))
    first, second, third = comparison.front
    changed = [first, second.model_copy(update=none), third.model_copy(update={"utility": 1e308})]
    wild = comparison.model_copy(update={"front": changed})
    assert [mark.label for mark in get_chart(wild).marks] == ["plain"]
    assert show_risk(changed[1]).detail == "not measured"
    check_page(render_comparison(wild))
