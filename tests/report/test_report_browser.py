"""The pages in a real browser: first screen, words before a click, console, print, axe-core."""

from collections.abc import Iterator
from pathlib import Path

import comparison_examples as comparisons
import evidence_examples as evidence
import pytest
import report_examples as examples
from browser import AXE_PACKAGE, CHROMIUM, OPEN, Browser, find_axe
from gate_results import make_acceptance, make_judgement, make_result

from memguard import records as r
from memguard.pages.judgements import build_gate_head
from memguard.report.html import render_comparison, render_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Debian's chromium ({CHROMIUM})"),
]
MEASURE = """
(() => {
  const bottom = (name) => document.querySelector(name).getBoundingClientRect().bottom;
  const words = (text) => text.split(/\\s+/).filter((word) => word).length;
  return {
    pageWidth: document.documentElement.scrollWidth,
    sentence: bottom(".verdict .sentence"),
    tiles: bottom(".tiles"),
    membership: bottom(".states"),
    wide: [...document.querySelectorAll(".verdict *")]
      .filter((one) => one.scrollWidth > one.clientWidth + 1 && one.clientWidth).length,
    rows: new Set([...document.querySelectorAll(".tiles > div")].map((one) => one.offsetTop)).size,
    words: words(document.body.innerText),
  };
})()
"""
# Lists the tables that scroll sideways.
TABLES = """
(() => {
  const tables = [...document.querySelectorAll(".scroll")];
  return {
    pageWidth: document.documentElement.scrollWidth,
    tables: tables.filter((table) => table.clientWidth > 0).length,
    scrolling: tables.filter((table) => table.scrollWidth > table.clientWidth + 1)
      .map((table) => table.getAttribute("aria-label")),
  };
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


def make_hard(name: str) -> r.AuditReport:
    """Return a full report with copies, three notes, and the longest sentences of the verdict."""
    copies = examples.make_counts(26, 139, copies=6)
    note = "Fewer than 30 documents in 'r64' (12), 'r16' (12), 'r4' (12): the intervals are wide."
    return evidence.make_full_report().model_copy(
        update={
            "run": name,
            "banners": [r.Banner(level="note", text=note)] * 2
            + [r.Banner(level="warning", text="There is no control: " + "words " * 40)],
            "verdict": examples.make_verdict(
                sentence="126 of 139 documents trained 64 times, unknown to the base model, were "
                "extracted; 10 of 114 unseen ones.",
                trained=copies,
                control=examples.make_counts(10, 114, copies=5),
                base=examples.make_counts(101, 139, copies=6),
            ),
        }
    )


@pytest.fixture(scope="module", params=["report", "comparison"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of a page with everything that a page can have."""
    file = tmp_path_factory.mktemp(request.param) / f"{request.param}.html"
    if request.param == "report":
        page = render_report(make_hard("x"))
    else:
        page = render_comparison(comparisons.make_full_comparison(2))
    file.write_text(page, encoding="utf-8")
    return file


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800)])
def test_the_result_is_on_the_first_screen(
    width: int, height: int, browser: Browser, tmp_path: Path
) -> None:
    name = "fine-tune-of-support-mails-with-goldfish"
    assert len(name) == 40
    file = tmp_path / "report.html"
    file.write_text(render_report(make_hard(name)), encoding="utf-8")
    seen = browser.open(file, width=width, height=height).evaluate(MEASURE)
    assert seen["sentence"] < seen["tiles"] < seen["membership"] <= height
    assert seen["rows"] == 1, "three tiles side by side"
    assert seen["wide"] == 0, "a text is wider than its box"
    assert seen["pageWidth"] == width, "the page scrolls sideways"
    # The limit for the quickstart's report; this one has more probes.
    assert 100 < seen["words"] <= 1200, "few words are visible before a click"


@pytest.mark.parametrize("num_settings", [6, 40])
def test_a_comparison_begins_with_few_words(
    num_settings: int, browser: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "comparison.html"
    page = render_comparison(comparisons.make_sweep(num_settings, 3))
    file.write_text(page, encoding="utf-8")
    words = "document.body.innerText.split(/\\s+/).length"
    assert 100 < browser.open(file).evaluate(words) <= 600


def test_no_table_scrolls_sideways_on_a_tablet(path: Path, browser: Browser) -> None:
    page = browser.open(path, width=768, height=1024)
    page.evaluate(OPEN)
    seen = page.evaluate(TABLES)
    assert seen["tables"] > 5, "they are open"
    assert seen["scrolling"] == []
    assert seen["pageWidth"] == 768


def test_the_console_is_empty_and_nothing_is_requested(path: Path, browser: Browser) -> None:
    page = browser.open(path)
    page.evaluate(OPEN)
    page.check_quiet()


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a gate with long names, every outcome, and accepted findings."""
    name = "customer-support-tickets-of-the-northern-region/" * 4
    outcomes = ("fail", "cannot-be-judged", "inconclusive", "pass")
    result = make_result(
        *(
            make_judgement(outcome, 7, rule=n, name=f"{n}{name} at most 10 %", sentence=name * 2)
            for n, outcome in enumerate(outcomes, start=1)
        ),
        accepted=[
            make_acceptance(f"{name}:{name}", state, by=name, reason=name * 2)
            for state in ("accepted", "expired", "not-found")
        ],
    )
    report = make_hard("x")
    file = tmp_path_factory.mktemp("gate") / "report.html"
    head = build_gate_head(result, report, f"{name}.yaml")
    file.write_text(render_report(report, gate=head), encoding="utf-8")
    return file


@pytest.mark.parametrize(("width", "height"), [(390, 844), (768, 1024), (1280, 800)])
def test_the_page_of_a_gate_is_quiet_and_fits(
    width: int, height: int, signed: Path, browser: Browser
) -> None:
    page = browser.open(signed, width=width, height=height)
    page.evaluate(OPEN)
    page.check_quiet()
    assert page.evaluate(TABLES)["pageWidth"] == width


def test_the_line_to_sign_is_printed_only(signed: Path, browser: Browser) -> None:
    page = browser.open(signed)
    assert page.evaluate("document.querySelector('.signature').offsetHeight") == 0
    page.send("Emulation.setEmulatedMedia", media="print")
    assert page.evaluate("document.querySelector('.signature').offsetHeight") > 0


def test_print_opens_what_matters(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(render_report(make_hard("x")), encoding="utf-8")
    page = browser.open(file)
    closed = page.count_printed_pages()
    page.evaluate(OPEN)
    assert page.count_printed_pages() > closed, "other parts are not printed"
    # Some parts are printed although they are closed: among them every document.
    page = browser.open(file)
    page.evaluate("for (const part of document.querySelectorAll('.printed')) part.remove(); 0")
    assert page.count_printed_pages() < closed


@pytest.mark.skipif(find_axe() is None, reason=f"needs axe-core ({AXE_PACKAGE})")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_serious(path: Path, signed: Path, dark: bool, browser: Browser) -> None:
    assert browser.open(path, dark=dark).list_violations() == []
    assert browser.open(signed, dark=dark).list_violations() == []


def test_the_checks_notice_what_they_look_for(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    file.write_text(
        "<!doctype html><html><title>x</title><body><img src='missing.png'>"
        "<script>console.error('wrong'); fetch('http://127.0.0.1:9/').catch(() => 0)</script>",
        encoding="utf-8",
    )
    page = browser.open(file)
    assert any("wrong" in message for message in page.list_messages())
    requests = page.list_requests()
    assert (tmp_path / "missing.png").as_uri() in requests
    assert "http://127.0.0.1:9/" in requests
    if find_axe() is not None:
        rules = {violation.split(" ")[0] for violation in page.list_violations()}
        assert rules >= {"image-alt", "html-has-lang"}
