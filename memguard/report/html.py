"""Render a record as one offline HTML file, the same bytes each time.

Everything shown is escaped by the template engine; `clean_text` runs over it once more on the way
out, so that a digest that forgot a string is not a hole. The page runs no script and its content
security policy lets it load nothing.
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
from memguard.report.page import AuditPage, ComparisonPage, Figure

_TEMPLATES = Path(__file__).parent / "templates"
# Cleaning spells a character out in up to ten; what the digest cut stays whole here.
_LONGEST = 10 * fmt.COMMAND_LIMIT
_QUOTED = re.compile(r"(?<!\w)'([^']+)'(?!\w)")
_SEPARATORS = re.compile(r"(?<=[./_:\\])(?=[^\W\d_])")


def render_report(report: AuditReport) -> str:
    """Render the page of an audit. Encode it as UTF-8."""
    return _render("audit.html.j2", digest_report(report))


def render_comparison(comparison: Comparison) -> str:
    """Render the page of a comparison. Encode it as UTF-8."""
    return _render("comparison.html.j2", digest_comparison(comparison))


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
    # Written by an XML serialiser, which escaped every text in it.
    return Markup(draw_chart(figure.chart, figure.key))


def _make_breakable(text: str) -> Markup:
    """Escape, and let a long name break after a separator rather than inside a word."""
    parts = _SEPARATORS.split(fmt.clean_text(text, _LONGEST))
    return Markup("<wbr>").join(escape(part) for part in parts)


def _mark_code(text: str) -> Markup:
    """Escape, and set what stands in single quotes as code, which keeps ``--option`` whole."""
    parts = _QUOTED.split(fmt.clean_text(text, _LONGEST))
    marked = [Markup("<code>{}</code>").format(part) for part in parts[1::2]]
    plain = [escape(part) for part in parts[::2]]
    return Markup("").join(
        piece for pair in zip(plain, [*marked, Markup("")], strict=True) for piece in pair
    )


def _finalize(value: Any) -> Any:
    return value if isinstance(value, Markup) else fmt.clean_text(str(value), _LONGEST)
