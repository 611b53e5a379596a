"""The comparison's picture: a file of its own, readable anywhere, safe with any name."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import comparison_examples as examples
import pytest
from result_examples import make_tables

import memguard.report
from memguard import records as r
from memguard.report.comparison_picture import render_comparison_chart
from memguard.report.svg import LIGHT

pytestmark = pytest.mark.slow

SVG = "{http://www.w3.org/2000/svg}"
STYLE = Path(memguard.report.__file__).parent / "templates" / "style.css.j2"


def parse(comparison: r.Comparison) -> ElementTree.Element:
    return ElementTree.fromstring(render_comparison_chart(comparison).encode())


def texts_of(root: ElementTree.Element) -> list[str]:
    return [(text.text or "").strip() for text in root.iter(f"{SVG}text")]


def test_it_stands_alone_on_a_light_panel() -> None:
    picture = render_comparison_chart(examples.make_comparison())
    assert picture.startswith('<?xml version="1.0" encoding="UTF-8"?>')
    root = ElementTree.fromstring(picture.encode())
    assert (root.tag, root.get("width"), root.get("height")) == (f"{SVG}svg", "960", "380")
    assert root.get("viewBox") == "0 0 960 380"
    panel = root.find(f"{SVG}rect")
    assert panel is not None
    assert panel.get("fill") == "#ffffff"
    assert "var(" not in picture
    for loading in ("<style", "<script", "<image", "@import", "url(http", "<!DOCTYPE"):
        assert loading not in picture
    assert len(picture) < 60_000


def test_it_shows_every_setting_and_the_control() -> None:
    root = parse(examples.make_comparison())
    texts = texts_of(root)
    for name in ("plain", "goldfish-k4", "goldfish-k2"):
        assert texts.count(name) == 2  # under its bars, and beside its point
    assert "control" in texts
    # Near-verbatim, verbatim and token accuracy of goldfish-k4; that of the control.
    for number in ("15.0", "0", "82.3", "20.3"):
        assert number in texts
    assert "Risk-utility trade-off" in texts
    told = root.get("aria-label") or ""
    assert "goldfish-k4: verbatim 0\u00a0%, near-verbatim 15.0" in told
    assert "teacher-forced accuracy, not extraction 82.3" in told
    assert root.findtext(f"{SVG}title") == told


def test_same_record_same_bytes() -> None:
    comparison = examples.make_comparison(2)
    assert render_comparison_chart(comparison) == render_comparison_chart(comparison)


def test_its_colours_are_those_of_the_page() -> None:
    light, _ = STYLE.read_text(encoding="utf-8").split("@media", 1)
    page = dict(re.findall(r"(--[a-z0-9-]+): (#[0-9a-f]{6});", light))
    assert {name: page[name] for name in LIGHT} == LIGHT


@pytest.mark.parametrize(
    "names",
    [("<script>alert(1)</script>", '"/><image href="x"/>', "$x$"), ("\x00\u202e", "_a", "x" * 500)],
)
def test_names_are_text_and_short(names: tuple[str, ...]) -> None:
    renamed = []
    for name, (run, rows) in zip(names, examples.list_parts(), strict=True):
        own = run.model_copy(update={"setting": name})
        renamed.append((own, [replace(row, setting=name) for row in rows]))
    root = parse(examples.assemble(renamed))
    assert not [e for e in root.iter() if e.tag in (f"{SVG}script", f"{SVG}image")]
    assert max(map(len, texts_of(root))) < 140


def test_many_settings_have_the_whole_picture_for_the_front() -> None:
    comparison = examples.make_sweep()
    texts = texts_of(parse(comparison))
    for point in comparison.front:
        assert texts.count(point.name) == 1
    assert "near-verbatim" not in texts, "no bars"
    few = examples.make_sweep(6)
    assert "near-verbatim" in texts_of(parse(few))


def test_bars_are_means_over_seeds() -> None:
    parts = [
        examples.make_run(name, None, 4.4, [(0, 0, 0, 0.2), (64, 0, 10, (0.2, 0.3)[seed])], seed)
        for name in ("plain", "goldfish-k4", "goldfish-k2")
        for seed in (0, 1)
    ]
    texts = texts_of(parse(examples.assemble(parts)))
    assert texts.count("25.0") == 6  # near-verbatim and token accuracy of three settings


def test_holes_are_drawn() -> None:
    """What was not measured has its name and no number; what was stays."""
    names = ["plain", "goldfish-k4", "goldfish-k2"]
    front, tables = (getattr(examples.make_comparison(), name) for name in ("front", "tables"))

    def draw(*doses: examples.Dose) -> tuple[list[str], str]:
        runs = [examples.make_run(name, None, 4.4, doses) for name in names]
        made = examples.assemble(runs)
        results = [*made.tables.results, *tables.select("extraction", "verbatim", seed=None)]
        update = {"front": front, "tables": make_tables(results)}
        root = parse(made.model_copy(update=update))
        return texts_of(root), root.get("aria-label") or ""

    # No bars: under the axis of bars every name stands once, beside its point once more.
    texts, told = draw()
    assert [texts.count(name) for name in names] == [2, 2, 2]
    assert "control" not in texts
    assert "82.3" not in texts
    assert told.startswith("Risk-utility trade-off")
    # The control alone has its bars.
    texts, told = draw((0, 0, 0, 0.2))
    bars = texts[: texts.index("Extraction: no trained bucket")]
    axis = bars.index("documents, or tokens (%)")
    assert bars[:4] == [*names, "control"]
    assert bars[axis + 1 :] == ["0", "0", "20.0"]
    assert told.startswith("Bar chart of no trained bucket, and risk-utility trade-off. control: ")
