"""Adds to the reports of a sweep the link to its comparison, which is written after them."""

from collections.abc import Callable, Iterable
from pathlib import Path

from memguard.errors import MemguardError
from memguard.records.audit_files import PAGE, has_audit
from memguard.workflows.auditing.pages import render_audit
from memguard.workflows.common.folder import locked

_LINK = b'href="../../comparison.html"'


def link_reports(runs: Iterable[Path], warn: Callable[[str], None]) -> None:
    """Render the reports of runs again that do not link to the comparison beside them."""
    for run in runs:
        folder = run / "audit"
        page = folder / PAGE
        if not has_audit(folder) or not page.is_file() or _LINK in page.read_bytes():
            continue
        try:
            with locked(run):
                render_audit(folder)
        except (OSError, MemguardError) as error:
            warn(f"'{page}' has no link to the comparison: {error}")
