"""Render a record as one offline HTML file; the result is deterministic.

The page contains no script, and its content security policy allows it to load nothing. The template
engine escapes every text; `clean_text` is applied to each text again when it is written, in case a
page forgot to clean it.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from memguard.errors import MemguardError
from memguard.pages import formatting as fmt
from memguard.pages.page import Figure, GateHead, Link, TrainingPage
from memguard.records import AuditReport, Comparison
from memguard.records.audit_files import PAGE
from memguard.records.comparison import COMPARISON, load_comparison
from memguard.records.gate import GATE_FOLDER
from memguard.report.audit_facts import collect_facts
from memguard.report.charts import draw_chart
from memguard.report.comparison_page import digest_comparison


def render_report(
    report: AuditReport, folder: Path | None = None, *, gate: GateHead | None = None
) -> str:
    """Render the page of an audit, or that of its ``gate``. Encode it as UTF-8.

    ``folder`` is that of the audit, for links to its gate and a comparison; None omits them.
    """
    run_path = find_run_path(report, folder)
    facts = collect_facts(report, gate=gate, run_path=run_path)
    # The page of a gate has the whole report, and is read in other places.
    links = () if folder is None or gate is not None else _link_report(report, folder)
    return _render("audit.html.j2", facts, links)


def render_comparison(comparison: Comparison, folder: Path | None = None) -> str:
    """Render the page of a comparison. Encode it as UTF-8.

    ``folder`` is that of the page, for links to the reports of its runs; None omits them.
    """
    page = digest_comparison(comparison)
    return _render("comparison.html.j2", page, _link_comparison(comparison, folder))


def render_training(page: TrainingPage) -> str:
    """Render the page of a run that was not audited."""
    return _render("training.html.j2", page)


def _draw(figure: Figure) -> Markup:
    # The XML serialiser has escaped every text in it.
    return Markup(draw_chart(figure.chart, figure.key))


# Relative links between a run's report, its gate and a comparison, where the files exist.

_SPECIAL = re.compile(r"([^\w@%+=:,./-])", re.ASCII)
"""Characters that a shell takes literally only after a backslash."""
_LINKS = re.compile(rb'<p class="links">.*?</p>\n')


def _link_report(report: AuditReport, folder: Path) -> tuple[Link, ...]:
    """Return the links of an audit's page to the gate of its run and to its comparison."""
    audit = folder.resolve()
    run, above = audit.parent, audit.parent.parent
    links = []
    if audit.name == "audit" and (run / GATE_FOLDER / PAGE).is_file():
        links.append(Link("Gate, to sign", f"../{GATE_FOLDER}/{PAGE}"))
    # A sweep writes its comparison above its runs; `compare` of single runs beside them.
    places = ((above, "../.."), (above / "comparison", "../../comparison"))
    compared = (prefix for place, prefix in places if _is_compared(report, place))
    links += (Link("Comparison", f"{prefix}/comparison.html") for prefix in compared)
    return tuple(links)


def drop_links(page: bytes) -> bytes:
    """Return a page without links to pages that are not beside it."""
    return _LINKS.sub(b"", page)


def _is_compared(report: AuditReport, folder: Path) -> bool:
    """Return whether a folder has a comparison in which the audited run is."""
    if not (folder / "comparison.html").is_file() or report.run is None:
        return False
    try:
        comparison = load_comparison(folder / COMPARISON)
    except MemguardError:
        return False
    return any(one.run == report.run for one in comparison.runs)


def find_run_path(report: AuditReport, folder: Path | None) -> str | None:
    """Return a run's folder from the working directory, escaped for a shell; None without one."""
    is_run = report.run is not None and report.model.load_as == "stored"
    if folder is None or not is_run or folder.resolve().name != "audit":
        return None
    path = os.path.relpath(folder.resolve().parent)
    # Not in quotes, because the page writes commands in quotes.
    escaped = _SPECIAL.sub(r"\\\1", path)
    return f"./{escaped}" if escaped.startswith("-") else escaped


def _link_comparison(comparison: Comparison, folder: Path | None) -> tuple[Link, ...]:
    """Return the links to the reports of the compared runs; none if the page is not stored."""
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
    return tuple(links)


_TEMPLATES = Path(__file__).parent / "templates"
# Cleaning replaces one character by up to ten; texts that were cut already must not be cut again.
_LONGEST = 10 * fmt.COMMAND_LIMIT
_MOST_ROWS = 1000
"""Rows of a table that a page shows; the files beside it have all."""
_QUOTED = re.compile(r"(?<!\w)'([^']+)'(?!\w)")
_BEFORE_PERCENT = re.compile(r"(?<=\d) (?=%)")
_SEPARATORS = re.compile(r"(?<=[./_:\\])(?=[^\W\d_])")


def _render(template: str, page: object, links: Sequence[Link] = ()) -> str:
    """Render a page; ``links`` are pages beside this one."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["breakable"] = _make_breakable
    environment.filters["with_code"] = _mark_code
    return environment.get_template(template).render(
        page=page, draw=_draw, links=links, most_rows=_MOST_ROWS
    )


def _make_breakable(text: str) -> Markup:
    """Escape, and allow line breaks after separators, so that long names do not break in words."""
    parts = _SEPARATORS.split(fmt.clean_text(text, _LONGEST))
    return Markup("<wbr>").join(escape(part) for part in parts)


def _mark_code(text: str) -> Markup:
    """Escape, and mark text in single quotes as code, which breaks lines between words only."""
    parts = _QUOTED.split(fmt.clean_text(text, _LONGEST))
    marked = [
        Markup("<code>{}</code>").format(
            Markup(" ").join(Markup("<span>{}</span>").format(word) for word in part.split(" "))
        )
        for part in parts[1::2]
    ]
    plain = [escape(part) for part in parts[::2]]
    return Markup("").join(
        piece for pair in zip(plain, [*marked, Markup("")], strict=True) for piece in pair
    )


def _finalize(value: Any) -> Any:
    if isinstance(value, Markup):
        return value
    # Sentences of the record have a plain space there, at which a line would break.
    return _BEFORE_PERCENT.sub(fmt.NBSP, fmt.clean_text(str(value), _LONGEST))
