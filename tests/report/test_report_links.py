"""Links between a run's report, its gate and a comparison that has the run, where they exist."""

from pathlib import Path

import comparison_examples as comparisons
import pytest
import report_examples as examples
from page_checks import check_page, words_of

from memguard.records.folders import AuditFolder
from memguard.records.record import save_record
from memguard.records.sealed import save_sealed
from memguard.report.html import drop_links, render_comparison, render_report
from memguard.workflows.auditing.pages import finish_audit, link_reports
from memguard.workflows.common.folder import locked


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")


def test_a_report_links_to_its_gate_and_to_a_comparison_of_its_run(tmp_path: Path) -> None:
    report, folder = examples.make_report(), tmp_path / "sweep" / "plain" / "audit"
    folder.mkdir(parents=True)
    assert 'class="links"' not in render_report(report, folder)
    touch(folder.parent / "gate" / "report.html", tmp_path / "sweep" / "comparison.html")
    comparison = comparisons.make_comparison()
    save_sealed(comparison, tmp_path / "sweep" / "comparison.json")
    # A comparison of other runs, in the same folder, has no link.
    assert LINK not in render_report(report, folder)
    write_comparison(tmp_path / "sweep", str(report.run))
    links = ("../gate/report.html", "../../comparison.html")
    page = render_report(report, folder)
    parser = check_page(page, links)
    assert [a["href"] for tag, a in parser.tags if tag == "a" and a["href"] in links] == [*links]
    assert 'class="links"' not in drop_links(page.encode()).decode()


def write_comparison(folder: Path, run: str) -> None:
    comparison = comparisons.make_comparison()
    first = comparison.runs[0].model_copy(update={"run": run})
    changed = comparison.model_copy(update={"runs": [first, *comparison.runs[1:]]})
    save_sealed(changed, folder / "comparison.json")
    (folder / "comparison.html").touch()


@pytest.mark.parametrize("beside", [False, True])
def test_a_comparison_links_to_the_reports_of_its_runs(tmp_path: Path, beside: bool) -> None:
    comparison = comparisons.make_comparison()
    folder = tmp_path / "comparison" if beside else tmp_path
    folder.mkdir(exist_ok=True)
    first, second, third = comparison.runs
    odd = second.model_copy(update={"run": "a b:<c>"})
    outside = third.model_copy(update={"run": "../plain"})
    for run in (first.run, "a b:<c>"):
        touch(tmp_path / run / "audit" / "report.html")
    changed = comparison.model_copy(update={"runs": [first, odd, outside]})
    above = "../" if beside else ""
    links = (f"{above}{first.run}/audit/report.html", f"{above}a%20b%3A%3Cc%3E/audit/report.html")
    parser = check_page(render_comparison(changed, folder), links)
    assert [a["href"] for tag, a in parser.tags if tag == "a" and a["href"] in links] == [*links]
    assert "report.html" not in render_comparison(changed)


def test_a_comparison_has_its_date_of_creation() -> None:
    comparison = comparisons.make_comparison()
    dated = comparison.model_copy(update={"created": "2026-11-20T14:03:07Z"})
    assert "Created 2026-11-20 14:03:07 UTC" in words_of(check_page(render_comparison(dated)))
    undated = comparison.model_copy(update={"created": None})
    assert "Created not recorded" in words_of(check_page(render_comparison(undated)))


LINK = 'href="../../comparison.html"'


def write_audit(run: Path) -> Path:
    folder = run / "audit"
    folder.mkdir(parents=True)
    report = examples.make_report()
    save_record(report, folder / "report.json")
    for name in ("records.parquet", "results.parquet", "findings.csv"):
        (folder / name).touch()
    finish_audit(folder, report, card_of=None)
    return folder / "report.html"


def test_reports_link_to_the_comparison_beside_their_runs(tmp_path: Path) -> None:
    pages = [write_audit(tmp_path / name) for name in ("none", "k4")]
    runs = [tmp_path / "none", tmp_path / "k4", tmp_path / "not-audited"]
    assert all(LINK not in page.read_text() for page in pages)
    write_comparison(tmp_path, str(examples.make_report().run))
    warnings: list[str] = []
    with locked(tmp_path / "k4"):
        link_reports(runs, warnings.append)
    assert [LINK in page.read_text() for page in pages] == [True, False]
    (warning,) = warnings
    assert f"'{pages[1]}' has no link to the comparison: " in warning
    link_reports(runs, warnings.append)
    assert [LINK in page.read_text() for page in pages] == [True, True]
    assert len(warnings) == 1
    assert AuditFolder(pages[0].parent).find_damage() == []

    written = [page.stat().st_mtime_ns for page in pages]
    link_reports(runs, warnings.append)
    assert [page.stat().st_mtime_ns for page in pages] == written, "a page was written again"
