"""Charts: inline SVG that shares a page, follows its colours and trusts no label."""

import math
import re
from xml.etree import ElementTree

import comparison_examples as comparisons
import evidence_examples as evidence
import matplotlib
import pytest
import report_examples as examples

from memguard.audit.probes.membership import MembershipProbe
from memguard.pages.doses import build_dose_response
from memguard.pages.page import Figure, FrontChart, Line, LineChart, Mark, Point, RocChart
from memguard.report import svg as svg_module
from memguard.report.charts import draw_chart
from memguard.report.comparison_front import build_front, build_trends
from memguard.report.svg import COLOURS

pytestmark = pytest.mark.slow


def all_figures() -> list[Figure]:
    comparison = comparisons.make_comparison()
    front = build_front(comparison)
    dose = build_dose_response(examples.make_report())
    assert front is not None
    assert dose is not None
    roc = MembershipProbe.section(evidence.make_full_report()).figure
    assert roc is not None
    return [dose, front, roc, *build_trends(comparison)]


def make_lines(label: str, count: int = 1) -> LineChart:
    points = (Point(x=0, y=10, low=5, high=20), Point(x=1, y=90))
    return LineChart(
        description=label,
        ticks=("0", label),
        lines=tuple(Line(label=label, style=str(n), points=points) for n in range(count)),
        y_label=label,
        control_at=0,
    )


def make_front(label: str, count: int = 1) -> FrontChart:
    mark = Mark(label=label, x=0.0, x_ends=(-1.0, 1.0), y=0.0, y_ends=None, is_dominated=False)
    return FrontChart(
        description=label,
        marks=(mark,) * count,
        x_label=label,
        y_label=label,
        reference_x=14.0,
        reference_label="base model",
    )


def make_roc(label: str, count: int = 1, *, y: float = 0.5) -> RocChart:
    points = (Point(x=0.01, y=y), Point(x=0.1, y=0.6), Point(x=1.0, y=1.0))
    styles = ("0", "1", "2", "blind")[:count]
    return RocChart(
        description=label,
        least=0.01,
        ticks=((0.01, "1 %"), (0.1, label), (1.0, "100 %")),
        lines=tuple(Line(label=label, style=style, points=points) for style in styles),
        marks=(Point(x=0.1, y=0.6, low=0.0, high=0.8),),
        x_label=label,
        y_label=label,
    )


def test_charts_are_small_accessible_and_coloured_by_the_page() -> None:
    for figure in all_figures():
        svg = draw_chart(figure.chart, figure.key)
        root = ElementTree.fromstring(svg)
        assert (root.tag, root.get("role")) == ("svg", "img")
        assert root.get("aria-label") == root.findtext("title")
        assert "<?xml" not in svg
        assert "<!DOCTYPE" not in svg
        assert "<style" not in svg
        assert "http" not in svg
        assert not [stand_in for stand_in in COLOURS if stand_in in svg]
        assert not re.findall(r"(?:fill|stroke): #", svg), "a colour of its own"
        assert root.findall(".//text")
        assert len(svg) < 40_000


def test_ids_of_charts_on_one_page_do_not_collide() -> None:
    ids: list[str] = []
    for figure in all_figures():
        svg = draw_chart(figure.chart, figure.key)
        mine = re.findall(r' id="([^"]+)"', svg)
        assert all(name.startswith(f"{figure.key}-") for name in mine)
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) == set(mine)
        ids += mine
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    "label", ["<script>alert(1)</script>", "$x$", "$\\frac{$", "a & b", "語 🜁", "_nolegend_", " "]
)
@pytest.mark.parametrize("make", [make_lines, make_front, make_roc])
def test_labels_are_text_not_markup_nor_mathematics(label: str, make: object) -> None:
    assert callable(make)
    svg = draw_chart(make(label), "k")
    root = ElementTree.fromstring(svg)
    assert not root.findall(".//script")
    assert label.strip() in {(text.text or "").strip() for text in root.iter("text")}


def test_equal_points_and_many_settings_are_drawn() -> None:
    for count in (2, 30):
        svg = draw_chart(make_front("a name of some length", count), "k")
        positions = re.findall(r"<text[^>]*transform=\"([^\"]*)\"[^>]*>a name of", svg)
        assert len(set(positions)) == len(positions)
        draw_chart(make_lines("a name of some length", count), "k")


def test_global_settings_of_matplotlib_are_left_alone() -> None:
    with matplotlib.rc_context({"font.size": 31, "svg.hashsalt": None}):
        before = dict(matplotlib.rcParams)
        mine = draw_chart(make_lines("a"), "k")
        assert dict(matplotlib.rcParams) == before
    assert draw_chart(make_lines("a"), "k") == mine


def test_without_matplotlib_a_page_says_what_a_chart_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(svg_module, "find_spec", lambda name: None)
    root = ElementTree.fromstring(draw_chart(make_lines("a"), "k"))
    (line,) = (text.text for text in root.iter("text"))
    assert line == "No chart: pip install 'matplotlib>=3.9'"
    assert root.find("title") is not None, "what the chart would show"


@pytest.mark.parametrize(("at", "mark"), [(34.0, "base →"), (-34.0, "← base"), (4.0, "base")])
def test_a_distant_reference_does_not_squeeze_the_settings(at: float, mark: str) -> None:
    def place(reference: float | None) -> list[str]:
        marks = tuple(
            Mark(label=f"m{x}", x=x, x_ends=None, y=0.0, y_ends=None, is_dominated=False)
            for x in (0.0, 8.0)
        )
        chart = FrontChart(
            description="d",
            marks=marks,
            x_label="x",
            y_label="y",
            reference_x=reference,
            reference_label="base",
        )
        root = ElementTree.fromstring(draw_chart(chart, "k"))
        texts = [(text.text or "").strip() for text in root.iter("text")]
        if reference is not None:
            assert mark in texts
        return [text for text in texts if text.replace("\u2212", "-").lstrip("-").isdigit()]

    # The same ticks: the axis covers the settings alone.
    assert place(at) == place(None)


def list_paths(chart: RocChart, stroke: str) -> list[list[tuple[float, float]]]:
    """Return the points of the paths of one colour, the widest path last."""
    paths = []
    for path in ElementTree.fromstring(draw_chart(chart, "k")).iter("path"):
        numbers = list(map(float, re.findall(r"\d+(?:\.\d+)?", path.get("d", ""))))
        if f"stroke: {stroke};" in path.get("style", ""):
            paths.append(list(zip(numbers[::2], numbers[1::2], strict=True)))
    return sorted(paths, key=lambda points: max(points)[0] - min(points)[0])


def test_a_roc_is_drawn_as_steps_on_equal_logarithmic_axes() -> None:
    chart = make_roc("x", 3)
    *_, ((left, bottom), (right, top)) = list_paths(chart, "var(--base)")
    # The narrower path is that of the legend.
    *_, first = list_paths(chart, "var(--series-1)")
    middle = (left + right) / 2
    # Drawn to a hundredth: 1 % at the left, 10 % in the middle, 100 % at the right.
    assert [x for x, _ in first] == pytest.approx([left, middle, middle, right, right], abs=0.02)
    # Steps: the rate at 1 % holds until 10 %.
    assert first[0][1] == first[1][1] > first[2][1] == first[3][1] > first[4][1]
    height = bottom - top
    shown = [(bottom - y) / height for _, y in first[::2]]
    assert shown == pytest.approx([1 + math.log10(y) / 2 for y in (0.5, 0.6, 1.0)], abs=1e-3)


def test_the_lines_of_a_roc_differ_by_more_than_colour() -> None:
    svg = draw_chart(make_roc("x", 4), "k")
    dashes = dict(re.findall(r"stroke-dasharray: ([^;]+);[^\"]*stroke: var\(--([^)]+)", svg))
    assert sorted(dashes.values()) == ["base", "base", "series-2", "series-3"]
    assert "stroke: var(--series-1)" in svg


def test_rates_below_the_axis_are_drawn_on_its_edge() -> None:
    chart = make_roc("x", y=0.0)
    *_, ((_, bottom), _) = list_paths(chart, "var(--base)")
    *_, first = list_paths(chart, "var(--series-1)")
    assert first[0][1] == pytest.approx(bottom, abs=0.02)
    # So is the end of an interval that begins at 0.
    (mark,) = list_paths(chart, "var(--ink)")
    assert max(y for _, y in mark) == pytest.approx(bottom, abs=0.02)
