"""Relative links between a run's report, its model card and a comparison, where the files exist."""

from pathlib import Path
from urllib.parse import quote

from memguard.records import Comparison
from memguard.records.run_files import find_weights_folder
from memguard.report import formatting as fmt
from memguard.report.page import Link

_MOST_LINKS = 40


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
