"""Render a record as one offline HTML file; the result is deterministic.

The page contains no script, and its content security policy allows it to load nothing. Texts are
escaped and cleaned by `engine.py`.
"""

import os
import re
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from memguard.pages import formatting as fmt
from memguard.pages.page import Figure, GateHead, Link
from memguard.records import AuditReport, Comparison
from memguard.records.run_files import find_weights_folder
from memguard.report.audit_page import digest_report
from memguard.report.charts import draw_chart
from memguard.report.comparison_page import digest_comparison
from memguard.report.engine import render_template


def render_report(
    report: AuditReport, folder: Path | None = None, *, gate: GateHead | None = None
) -> str:
    """Render the page of an audit. Encode it as UTF-8.

    Args:
        report: the record.
        folder: folder of the audit, for links to the model card and a comparison; None omits them.
        gate: what a gate decided of the audit, for the head of the gate's own page.
    """
    run_path = _find_run_path(report, folder)
    page = digest_report(report, _link_report(folder), run_path=run_path, gate=gate)
    return render_template("audit.html.j2", page, _draw)


def render_comparison(comparison: Comparison, folder: Path | None = None) -> str:
    """Render the page of a comparison. Encode it as UTF-8.

    Args:
        comparison: the record.
        folder: folder of the page, for links to the reports of its runs; None omits them.
    """
    page = digest_comparison(comparison, _link_comparison(comparison, folder))
    return render_template("comparison.html.j2", page, _draw)


def _draw(figure: Figure) -> Markup:
    # The XML serialiser has escaped every text in it.
    return Markup(draw_chart(figure.chart, figure.key))


# Relative links between a run's report, its model card and a comparison, where the files exist.

_MOST_LINKS = 40
_SPECIAL = re.compile(r"([^\w@%+=:,./-])", re.ASCII)
"""Characters that a shell takes literally only after a backslash."""


def _link_report(folder: Path | None) -> tuple[Link, ...]:
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


def _find_run_path(report: AuditReport, folder: Path | None) -> str | None:
    """Return the path of a run's folder from the working directory, escaped for a shell.

    Args:
        report: of the run.
        folder: folder of the report; None if the page is not stored.

    Returns:
        None if the report is not in the `audit/` of a run.
    """
    is_run = report.run is not None and report.model.load_as == "stored"
    if folder is None or not is_run or folder.resolve().name != "audit":
        return None
    path = os.path.relpath(folder.resolve().parent)
    # Not in quotes, because the page writes commands in quotes.
    escaped = _SPECIAL.sub(r"\\\1", path)
    return f"./{escaped}" if escaped.startswith("-") else escaped


def _link_comparison(comparison: Comparison, folder: Path | None) -> tuple[Link, ...]:
    """Return the links to the reports of the compared runs.

    Args:
        comparison: names the folders of the runs.
        folder: folder of the comparison; None if the page is not stored.
    """
    if folder is None:
        return ()
    links = []
    for run in dict.fromkeys(one.run for one in comparison.runs):
        for above, prefix in ((folder, ""), (folder.resolve().parent, "../")):
            # The name comes from a record: it must be one part of a path.
            if run not in ("", ".", "..") and Path(run).name == run and "\0" not in run:
                report = above / run / "audit" / "report.html"
                if report.is_file():
                    label = f"Report of '{fmt.clean_name(run)}'"
                    links.append(Link(label, f"{prefix}{quote(run, safe='')}/audit/report.html"))
                    break
    return tuple(links[:_MOST_LINKS])
