"""Relative links between a run's report, its model card and a comparison, where the files exist."""

import os
import re
from pathlib import Path
from urllib.parse import quote

from memguard.records import AuditReport, Comparison
from memguard.records.run_files import find_weights_folder
from memguard.report import formatting as fmt
from memguard.report.page import Link

_MOST_LINKS = 40
_SPECIAL = re.compile(r"([^\w@%+=:,./-])", re.ASCII)
"""Characters that a shell takes literally only after a backslash."""


def link_report(folder: Path | None) -> tuple[Link, ...]:
    """Return the links of a report.

    Args:
        folder: folder of the report; None if the page is not stored.
    """
    if folder is None:
        return ()
    run = folder.resolve().parent
    weights = find_weights_folder(run)
    # A sweep writes its comparison above its runs; `compare` of single runs beside them.
    places = (
        ("Model card", weights / "README.md", f"../{weights.name}/README.md"),
        ("Comparison", run.parent / "comparison.html", "../../comparison.html"),
        (
            "Comparison",
            run.parent / "comparison" / "comparison.html",
            "../../comparison/comparison.html",
        ),
    )
    return tuple(Link(label, target) for label, path, target in places if path.is_file())


def find_run_path(report: AuditReport, folder: Path | None) -> str | None:
    """Return the path of a run's folder from the working directory, escaped for a shell.

    Args:
        report: of the run.
        folder: folder of the report; None if the page is not stored.

    Returns:
        None if the report is not in the `audit/` of a run.
    """
    if folder is None or report.run is None or folder.resolve().name != "audit":
        return None
    path = os.path.relpath(folder.resolve().parent)
    # Not in quotes, because the page writes commands in quotes.
    escaped = _SPECIAL.sub(r"\\\1", path)
    return f"./{escaped}" if escaped.startswith("-") else escaped


def link_comparison(comparison: Comparison, folder: Path | None) -> tuple[Link, ...]:
    """Return the links to the reports of the compared runs.

    Args:
        comparison: names the folders of the runs.
        folder: folder of the comparison; None if the page is not stored.
    """
    if folder is None:
        return ()
    links = []
    for run in dict.fromkeys(setting.run for setting in comparison.settings):
        for above, prefix in ((folder, ""), (folder.resolve().parent, "../")):
            # The name comes from a record: it must be one part of a path.
            if run not in ("", ".", "..") and Path(run).name == run and "\0" not in run:
                report = above / run / "audit" / "report.html"
                if report.is_file():
                    label = f"Report of '{fmt.clean_name(run)}'"
                    links.append(Link(label, f"{prefix}{quote(run, safe='')}/audit/report.html"))
                    break
    return tuple(links[:_MOST_LINKS])
