"""Pages of a run, its gate and its bundle in Chromium: quiet, no dead link, whole in print."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import AXE_PACKAGE, CHROMIUM, Browser, find_axe
from bundle_examples import write_audited_run
from check_pages import check_folder, check_page
from cli_examples import succeed
from finding_audits import draw_audit, write_run

from memguard.workflows.auditing.pages import render_audit
from memguard.workflows.gate import judge_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Debian's chromium ({CHROMIUM})"),
    pytest.mark.skipif(find_axe() is None, reason=f"needs axe-core ({AXE_PACKAGE})"),
]
PAGES = ("audit/report.html", "gate/report.html")
POLICY = {"gate": [{"metric": "findings", "at_most": 0}]}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.mark.parametrize("seed", [1, 4, 43], ids=["47 documents", "none", "118 documents"])
def test_pages_of_a_run_and_its_gate(seed: int, browser: Browser, tmp_path: Path) -> None:
    audit = write_run(tmp_path / "run", draw_audit(seed))
    judge_folder(audit, POLICY, out=tmp_path / "run" / "gate")
    render_audit(audit)
    pages = {name: check_page(browser, audit.parent / name) for name in PAGES}
    assert {name: page.wrong for name, page in pages.items()} == dict.fromkeys(PAGES, ())
    assert all(page.num_words <= 1200 and page.num_printed >= 3 for page in pages.values())
    assert min(page.num_words for page in pages.values()) > 100


def test_pages_of_a_bundle_have_no_dead_link(browser: Browser, tmp_path: Path) -> None:
    run = write_audited_run(tmp_path / "run")
    judge_folder(run / "audit", POLICY, out=run / "gate")
    render_audit(run / "audit")
    assert 'href="../gate/report.html"' in (run / "audit" / "report.html").read_text()
    (tmp_path / "bundles").mkdir()
    succeed("bundle", run, tmp_path / "bundles" / "run.zip")
    checked = dict(check_folder(browser, tmp_path / "bundles"))
    assert {"run.zip/report.html", "run.zip/gate/report.html"} <= checked.keys()
    assert {name: page.wrong for name, page in checked.items() if page.wrong} == {}


def test_what_is_wrong_is_named(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "findings.csv").write_text("id\nlost-document\n")
    (tmp_path / "report.html").write_text(
        "<!doctype html><html lang='en'><title>x</title><body><main><h1>x</h1>"
        "<a href='gone.html'>gone</a> <a href='#nowhere'>nowhere</a> <a href='#here'>here</a>"
        "<p id='here' style='width: 500px'>x</p><script>console.error('said')</script></main>",
        encoding="utf-8",
    )
    wrong = check_page(browser, tmp_path / "report.html").wrong
    assert {"dead link gone.html", "dead link #nowhere"} <= {*wrong}
    assert "dead link #here" not in wrong
    assert "390 dark: scrolls sideways" in wrong
    assert "1280 light: console: ['said']" in wrong
    assert "1 findings are not printed, such as lost-document" in wrong
