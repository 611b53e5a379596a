"""The page in a real browser: the first screen, the words before a click, the console, print."""

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import comparison_examples as comparisons
import evidence_examples as evidence
import pytest
import report_examples as examples

from memguard import records as r
from memguard.report import render_comparison, render_report

CHROMIUM = Path("/usr/bin/chromium")
"""Debian's package."""
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Debian's chromium ({CHROMIUM})"),
]
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
# The page forbids scripts: this one runs in a copy without that rule.
MEASURE = """
<script>
addEventListener("load", () => {
  const bottom = (name) => document.querySelector(name).getBoundingClientRect().bottom;
  const words = (text) => text.split(/\\s+/).filter((word) => word).length;
  const result = {
    width: innerWidth,
    height: innerHeight,
    pageWidth: document.documentElement.scrollWidth,
    sentence: bottom(".verdict .sentence"),
    tiles: bottom(".tiles"),
    membership: bottom(".membership"),
    wide: [...document.querySelectorAll(".verdict *")]
      .filter((one) => one.scrollWidth > one.clientWidth + 1 && one.clientWidth).length,
    rows: new Set([...document.querySelectorAll(".tiles > div")].map((one) => one.offsetTop)).size,
    words: words(document.body.innerText),
  };
  const holder = parent.document.createElement("pre");
  holder.id = "measured";
  holder.textContent = JSON.stringify(result);
  parent.document.body.append(holder);
});
</script>
"""


# Opens what is closed, and lists the tables that scroll sideways.
OPEN = """
<script>
addEventListener("load", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
  const tables = [...document.querySelectorAll(".scroll")];
  const result = {
    width: innerWidth,
    height: innerHeight,
    pageWidth: document.documentElement.scrollWidth,
    tables: tables.filter((table) => table.clientWidth > 0).length,
    scrolling: tables.filter((table) => table.scrollWidth > table.clientWidth + 1)
      .map((table) => table.getAttribute("aria-label")),
  };
  const holder = parent.document.createElement("pre");
  holder.id = "measured";
  holder.textContent = JSON.stringify(result);
  parent.document.body.append(holder);
});
</script>
"""


def run_chromium(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(CHROMIUM), *OPTIONS, f"--user-data-dir={folder / 'profile'}", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


def measure(
    page: str, folder: Path, width: int, height: int, script: str = MEASURE
) -> dict[str, Any]:
    """Return what a script measures of a page on a screen of this size (CSS pixels)."""
    free = re.sub(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", page)
    inner = html.escape(free.replace("</body>", f"{script}</body>"))
    # In a frame, because a window is neither as narrow nor as high as it is asked to be.
    path = folder / "page.html"
    frame = f'<iframe srcdoc="{inner}" style="border:0;width:{width}px;height:{height}px"></iframe>'
    path.write_text(f"<!doctype html><meta charset='utf-8'><body>{frame}", encoding="utf-8")
    dom = run_chromium(folder, "--window-size=1600,1200", "--dump-dom", path.as_uri()).stdout
    found = re.search(r'<pre id="measured">(.*?)</pre>', dom)
    assert found is not None, dom[-500:]
    measured: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert (measured["width"], measured["height"]) == (width, height)
    return measured


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


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800)])
def test_the_result_is_on_the_first_screen(width: int, height: int, tmp_path: Path) -> None:
    name = "fine-tune-of-support-mails-with-goldfish"
    assert len(name) == 40
    seen = measure(render_report(make_hard(name)), tmp_path, width, height)
    assert seen["sentence"] < seen["tiles"] < seen["membership"] <= height
    assert seen["rows"] == 1, "three tiles side by side"
    assert seen["wide"] == 0, "a text is wider than its box"
    assert seen["pageWidth"] == width, "the page scrolls sideways"


@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_no_table_scrolls_sideways_on_a_tablet(kind: str, tmp_path: Path) -> None:
    if kind == "report":
        page = render_report(make_hard("x"))
    else:
        page = render_comparison(comparisons.make_full_comparison(2))
    seen = measure(page, tmp_path, 768, 1024, OPEN)
    assert seen["tables"] > 5, "they are open"
    assert seen["scrolling"] == []
    assert seen["pageWidth"] == 768


def test_few_words_are_visible_before_a_click(tmp_path: Path) -> None:
    seen = measure(render_report(make_hard("x")), tmp_path, 1280, 800)
    # The limit for the quickstart's report; this one has more probes.
    assert 100 < seen["words"] <= 1200


def test_the_console_is_empty_and_print_opens_notes_and_method(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(render_report(make_hard("x")), encoding="utf-8")
    pdf = tmp_path / "report.pdf"
    done = run_chromium(tmp_path, "--enable-logging=stderr", f"--print-to-pdf={pdf}", path.as_uri())
    assert "CONSOLE" not in done.stderr
    assert pdf.stat().st_size > 10_000
