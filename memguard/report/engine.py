"""The template engine of the pages: escaping, cleaning and line breaks of the texts of records.

The engine escapes every text; `clean_text` is applied to each text again when it is written, in
case a page forgot to clean it.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from memguard.pages import formatting as fmt

_TEMPLATES = Path(__file__).parent / "templates"
# Cleaning replaces one character by up to ten; texts that were cut already must not be cut again.
_LONGEST = 10 * fmt.COMMAND_LIMIT
_QUOTED = re.compile(r"(?<!\w)'([^']+)'(?!\w)")
_BEFORE_PERCENT = re.compile(r"(?<=\d) (?=%)")
_SEPARATORS = re.compile(r"(?<=[./_:\\])(?=[^\W\d_])")


def render_template(
    template: str, page: object, draw: Callable[[Any], Markup] | None = None
) -> str:
    """Render a page.

    Args:
        template: name of the file.
        page: its contents, `page` in the template.
        draw: converts a figure into SVG; None for a page without figures.
    """
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
    return environment.get_template(template).render(page=page, draw=draw)


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
