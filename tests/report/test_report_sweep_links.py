"""The reports of a sweep link to its comparison, which is written after them."""

from pathlib import Path

import report_examples as examples

from memguard.records.folders import AuditFolder
from memguard.records.record import save_record
from memguard.workflows.auditing.pages import finish_audit
from memguard.workflows.common.folder import locked
from memguard.workflows.report_links import link_reports

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
    (tmp_path / "comparison.html").touch()
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
