"""Text of records as Markdown: nothing in it starts a table cell, a link, a tag or a mention.

    escape      a sentence
    code        a name, as code
    build_row   cells -> a row of a table

GitHub's additions count too: `@name`, `#12` and bare addresses become links and notify people, so
an empty comment separates their first character from the rest.
"""

import re
from collections.abc import Iterable

from memguard.pages import formatting as fmt

_SPECIAL = re.compile(r"([\\`*_{}\[\]()<>|~$!])")
_AT_START = re.compile(r"^(\s*)([-+=#:])")
_NUMBERED = re.compile(r"^(\s*\d+)([.)])(?=\s|$)")
_MENTIONS = re.compile(r"[@#](?=\w)|\b(?:https?|ftp|mailto)(?=:)|\bwww(?=\.)", re.IGNORECASE)
_BREAK = "<!-- -->"


def escape(text: str, limit: int = fmt.SENTENCE_LIMIT) -> str:
    """Return a sentence on one line, of which Markdown shows every character as it is.

    Args:
        text: of a record.
        limit: largest number of characters, before escaping.
    """
    shown = _SPECIAL.sub(r"\\\1", fmt.clean_text(text, limit).replace("&", "&amp;"))
    shown = _NUMBERED.sub(r"\1\\\2", _AT_START.sub(r"\1\\\2", shown))
    return _MENTIONS.sub(lambda found: found[0] + _BREAK, shown)


def code(name: str, limit: int = fmt.NAME_LIMIT) -> str:
    """Return a name as code; a backtick in it becomes an apostrophe, a bar a broken bar.

    Neither can be escaped in code: a backslash is shown there, or does not keep a cell together.

    Args:
        name: of a record.
        limit: largest number of characters.
    """
    cleaned = fmt.clean_name(name, limit).replace("`", "'").replace("|", "¦")
    return f"`{cleaned}`" if cleaned.strip() else "`(empty)`"


def build_row(cells: Iterable[str]) -> str:
    """Return a row of a table; its cells are escaped already."""
    return f"| {' | '.join(cells)} |"
