"""Pages rendered again from the JSON beside them. No torch."""

from pathlib import Path

from memguard.errors import RecordError
from memguard.records import AuditReport, Comparison, load_record, write_atomically
from memguard.report import render_comparison, render_report


def render_folder(folder: Path) -> Path:
    """Render the page of a run, an audit folder or a sweep; return its path.

    Raises:
        RecordError: no report.json or comparison.json there, or one that cannot be read.
    """
    for record in (folder / "audit" / "report.json", folder / "report.json"):
        if record.is_file():
            text = render_report(load_record(AuditReport, record))
            break
    else:
        record = folder / "comparison.json"
        if not record.is_file():
            raise RecordError(
                f"'{folder}' holds neither a report.json (of a run or an audit) nor a "
                "comparison.json"
            )
        text = render_comparison(load_record(Comparison, record))
    page = record.with_suffix(".html")
    write_atomically(page, text.encode())
    return page
