"""Render a record as one offline HTML file; the result is deterministic.

The template engine escapes every text; `clean_text` is applied to each text again when it is
written, in case a page forgot to clean it. The page contains no script, and its content security
policy allows it to load nothing.
"""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from memguard.records import AuditReport, Comparison
from memguard.report import formatting as fmt
from memguard.report.audit_page import digest_report
from memguard.report.charts import draw_chart
from memguard.report.comparison_page import digest_comparison
from memguard.report.links import find_run_path, link_comparison, link_report
from memguard.report.page import AuditPage, ComparisonPage, Figure

_TEMPLATES = Path(__file__).parent / "templates"
# Cleaning replaces one character by up to ten; texts that were cut already must not be cut again.
_LONGEST = 10 * fmt.COMMAND_LIMIT
_QUOTED = re.compile(r"(?<!\w)'([^']+)'(?!\w)")
_SEPARATORS = re.compile(r"(?<=[./_:\\])(?=[^\W\d_])")


def render_report(report: AuditReport, folder: Path | None = None) -> str:
    """Render the page of an audit. Encode it as UTF-8.

    Args:
        report: the record.
        folder: folder of the page, for links to the model card and a comparison; None omits them.
    """
    page = digest_report(report, link_report(folder), run_path=find_run_path(report, folder))
    return _render("audit.html.j2", page)


def render_comparison(comparison: Comparison, folder: Path | None = None) -> str:
    """Render the page of a comparison. Encode it as UTF-8.

    Args:
        comparison: the record.
        folder: folder of the page, for links to the reports of its runs; None omits them.
    """
    page = digest_comparison(comparison, link_comparison(comparison, folder))
    return _render("comparison.html.j2", page)


def _render(template: str, page: AuditPage | ComparisonPage) -> str:
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
    return environment.get_template(template).render(page=page, draw=_draw)


def _draw(figure: Figure) -> Markup:
    # The XML serialiser has escaped every text in it.
    return Markup(draw_chart(figure.chart, figure.key))


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
    return value if isinstance(value, Markup) else fmt.clean_text(str(value), _LONGEST)
