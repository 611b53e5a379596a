"""Pages made again from the JSON beside them."""

from pathlib import Path

from memguard.errors import RecordError
from memguard.records import AuditReport, Comparison, load_record, write_atomically
from memguard.report import render_comparison, render_report


def render_folder(folder: Path) -> Path:
    """Render the page of a run, an audit folder or a sweep; return its path.

    Raises:
        RecordError: no report.json or comparison.json there, or one that cannot be read.
    """
    for json_path in (folder / "audit" / "report.json", folder / "report.json"):
        if json_path.is_file():
            page = json_path.with_suffix(".html")
            write_atomically(page, render_report(load_record(AuditReport, json_path)).encode())
            return page
    json_path = folder / "comparison.json"
    if json_path.is_file():
        page = json_path.with_suffix(".html")
        write_atomically(page, render_comparison(load_record(Comparison, json_path)).encode())
        return page
    raise RecordError(
        f"'{folder}' holds neither a report.json (of a run or an audit) nor a comparison.json"
    )
