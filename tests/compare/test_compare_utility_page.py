"""The page, chart and terminal of a comparison whose utility is a task; sweeps that name one."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from answered_examples import make_answers, write_answered_run, write_quiz, write_three
from browser import AXE_PACKAGE, CHROMIUM, Browser, find_axe
from compare_examples import write_run

from memguard.compare import compare_runs
from memguard.errors import ConfigError
from memguard.records import Comparison
from memguard.report.comparison_front import build_front
from memguard.report.comparison_picture import render_comparison_chart
from memguard.report.html import render_comparison
from memguard.report.notebook_card import render_comparison_card
from memguard.workflows.compare import CompareRequest
from memguard.workflows.compare_runs import _headline

pytestmark = pytest.mark.slow

NEEDS_BROWSER = pytest.mark.skipif(
    not CHROMIUM.exists() or find_axe() is None, reason=f"needs {CHROMIUM} and {AXE_PACKAGE}"
)


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Comparison]:
    runs = write_three(tmp_path_factory.mktemp("three"))
    return {
        name: compare_runs(runs, name="x", command="", utility=name)
        for name in ("heldout_nll", "quiz", "texts")
    }


def read_words(page: str) -> str:
    text = re.sub(r"<style.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", text.replace("&#39;", "'").replace("\xa0", " "))


def test_every_label_follows_the_utility(comparisons: dict[str, Comparison]) -> None:
    chart = build_front(comparisons["quiz"]).chart
    assert chart.x_label == "quiz: acc minus plain (percentage points)"
    assert chart.is_right_better
    assert [mark.x for mark in chart.marks] == pytest.approx([0, -2.5, -25])
    assert chart.marks[1].x_ends[0] < -2.5 < chart.marks[1].x_ends[1]
    # 16 of 40 against 28 of 40.
    assert chart.reference_x == pytest.approx(-30)
    assert "risk 90.0 %, acc of task 'quiz' 70.0 %" in chart.description.replace("\xa0", " ")
    chart = build_front(comparisons["texts"]).chart
    assert chart.x_label == "texts: word_perplexity minus plain"
    assert not chart.is_right_better
    chart = build_front(comparisons["heldout_nll"]).chart
    assert chart.x_label == "held-out loss relative to plain (%)"


def test_the_page_shows_each_task_by_item_and_the_chosen_utility(
    comparisons: dict[str, Comparison],
) -> None:
    for name, comparison in comparisons.items():
        words = read_words(render_comparison(comparison))
        for task in ("quiz", "texts", "overlap"):
            assert f"Task {task}, same 40 items" in words
        assert (
            "Lower right is better" in words if name == "quiz" else "Lower left is better" in words
        )
        assert "with Holm's correction over the 10 tests of this page" in words
        card = read_words(render_comparison_card(comparison, Path("comparison.html")))
        image = render_comparison_chart(comparison)
        if name == "quiz":
            assert "quiz: acc" in card
            assert "quiz: acc minus plain (percentage points), higher is better" in image
            assert "acc of task 'quiz' 67.5 % (-2.5 pp, " in words
        if name == "heldout_nll":
            assert "Held-out loss" in card
            assert "held-out loss relative to plain (%), lower is better" in image


def test_a_task_at_chance_is_said_to_tell_nothing(tmp_path: Path) -> None:
    runs = write_quiz(tmp_path, dict.fromkeys(("plain", "k4"), [1.0, 0.0, 0.0, 0.0] * 5))
    comparison = compare_runs(runs, name="x", command="", utility="quiz")
    words = read_words(render_comparison(comparison))
    assert "this task cannot tell whether utility is kept" in words
    # Without answers of the base model there is no line to compare with.
    assert build_front(comparison).chart.reference_x is None
    assert not any("(base model)" in line for line in _headline(comparison))


def test_a_task_that_is_left_out_is_on_the_page(tmp_path: Path) -> None:
    runs = [
        write_answered_run(tmp_path / "plain", make_answers("plain")[:1]),
        write_run(tmp_path / "k4", name="k4"),
    ]
    words = read_words(render_comparison(compare_runs(runs, name="x", command="")))
    assert "Task 'quiz' is left out of the comparison: 'k4' (seed 0) did not answer it." in words


def test_the_terminal_names_the_utility(comparisons: dict[str, Comparison]) -> None:
    first, second, head, plain, *_ = _headline(comparisons["quiz"])
    assert first.startswith("k4 is recommended: extraction falls from 90.0 % to ")
    assert second.startswith("k2: extraction ")
    assert head.split()[-2:] == ["quiz:", "acc"]
    assert plain.split() == ["plain", "Memorized", "not", "judged", "0", "90.0", "%", "70.0", "%"]
    assert any(
        "(base model)" in line and "40.0 %" in line for line in _headline(comparisons["quiz"])
    )
    *_, head, plain, _, _, _ = _headline(comparisons["heldout_nll"])
    assert head.endswith("held-out loss")
    assert "2.000" in plain


def make_request(*given: str, fix: bool = False) -> CompareRequest:
    return CompareRequest(
        given=given, out=None, jobs=None, fix=fix, num_processes=None, utility="quiz"
    )


def test_the_option_is_for_finished_runs(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: run")
    make_request(str(tmp_path)).check()
    with pytest.raises(ConfigError, match="--utility needs RUNs; a sweep has 'utility'"):
        make_request("quickstart").check()
    with pytest.raises(ConfigError, match="--utility does not go with --fix"):
        make_request(str(tmp_path), fix=True).check()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@NEEDS_BROWSER
@pytest.mark.browser
@pytest.mark.parametrize("name", ["quiz", "texts"])
def test_the_chart_of_a_task_in_chromium(
    name: str, comparisons: dict[str, Comparison], browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "comparison.html"
    path.write_text(render_comparison(comparisons[name]), encoding="utf-8")
    page = browser.open(path)
    page.check_quiet()
    assert page.list_violations() == []
    drawn = page.evaluate(
        "[...document.querySelectorAll('svg')].map((svg) => svg.textContent).join(' ')"
    )
    label = {"quiz": "quiz: acc minus plain (percentage points)", "texts": "word_perplexity minus"}
    assert label[name] in re.sub(r"\s+", " ", drawn)
    # All of the chart is within the page, and no table of tasks widens it.
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
