"""Landmarks, headings and the form of a percentage, the same on every page.

The rules are those of axe-core: `heading-order`, `landmark-unique` and its like.
"""

import re
from html.parser import HTMLParser
from itertools import pairwise

import comparison_examples as comparisons
import evidence_examples as evidence
import pytest
import report_examples as examples
from page_checks import VOID, check_page

from memguard.report.html import render_comparison, render_report

LANDMARKS = {
    "header": "banner",
    "footer": "contentinfo",
    "main": "main",
    "nav": "navigation",
    "aside": "complementary",
    "region": "region",
}


class Outline(HTMLParser):
    """Collects the levels of headings, and the landmarks with their labels."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.levels: list[int] = []
        self.landmarks: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        label = attributes.get("aria-label") or attributes.get("aria-labelledby", "")
        role = attributes.get("role", tag)
        # A section without a label is no landmark.
        role = "region" if role == "section" and label else role
        if role in LANDMARKS:
            self.landmarks.append((LANDMARKS[role], label))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        inside = {"header", "main", "footer", "head"} & set(self.open)
        if data.strip() and not inside and self.open[-1] != "a":  # The link that skips the heading.
            self.outside.append(data)


@pytest.fixture(scope="module", params=["report", "comparison"])
def page(request: pytest.FixtureRequest) -> str:
    if request.param == "report":
        return render_report(evidence.make_full_report())
    return render_comparison(comparisons.make_full_comparison())


def test_headings_leave_out_no_level_and_landmarks_differ(page: str) -> None:
    outline = Outline()
    outline.feed(page)
    levels = outline.levels
    assert levels.count(1) == 1
    assert levels[0] == 1
    steps = [after - before for before, after in pairwise(levels)]
    assert max(steps) <= 1, "a level is left out"
    assert len(levels) > 5
    assert len(set(outline.landmarks)) == len(outline.landmarks)
    assert [role for role, _ in outline.landmarks].count("main") == 1
    assert outline.outside == [], "text outside of the landmarks"


def test_every_table_can_be_reached_with_the_keyboard(page: str) -> None:
    tables = [a for _, a in check_page(page).tags if a.get("class") == "scroll"]
    assert tables
    # A label needs a role; a group, unlike a region, is no landmark.
    assert all((a["role"], a["tabindex"]) == ("group", "0") and a["aria-label"] for a in tables)


def test_a_percentage_has_one_form(page: str) -> None:
    text = re.sub(r"<style>.*?</style>|<[^>]+>", "", page, flags=re.DOTALL)
    signs = re.findall(r".%", text)
    assert len(signs) > 20
    # The axis of a chart has the sign alone: "documents (%)".
    assert set(signs) <= {"\u00a0%", "(%"}


def test_the_percentages_of_a_verdict_do_not_break() -> None:
    verdict = examples.make_verdict(sentence="Of 40 documents 10.5 % were extracted.")
    report = examples.make_report().model_copy(update={"verdict": verdict})
    assert "Of 40 documents 10.5\u00a0% were extracted." in render_report(report)
