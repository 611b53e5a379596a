"""Neutralise strings that may be hostile before anyone sees them.

Ids, names and sentences of a record come from other people's data. Escaping for HTML is the
template engine's work; this file removes what escaping leaves in: characters that steer a terminal
or reverse the reading direction, halves of surrogate pairs, and lines of a megabyte.
"""

import re
import unicodedata

ELLIPSIS = "…"
NAME_LIMIT = 72
SENTENCE_LIMIT = 700
COMMAND_LIMIT = 4000

_STEERING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_LOCAL_PATH = re.compile(
    r"""(?<![\w/.\\~-])            # not inside a word or a longer path
        (?:file:/+ | ~[\w.-]*[/\\] | [A-Za-z]:(?:\\|/(?!/)) | \\\\
           | /(?!/) | (?<!:)//       # but not those of https://
           | \.{1,2}[/\\])
        [^\s'"`,;()\[\]{}<>|]+""",
    re.VERBOSE,
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?")


def clean_text(text: str, limit: int = SENTENCE_LIMIT) -> str:
    """Return ``text`` on one line, cut in its middle, with steering characters spelled out.

    Args:
        text: anything, also lone surrogates.
        limit: characters kept, the ellipsis included; a replaced character counts as one.
    """
    if len(text) > limit:
        tail = limit // 3
        text = text[: limit - tail - 1] + ELLIPSIS + text[len(text) - tail :]
    return text if text.isprintable() else "".join(map(_show, text))


def _show(character: str) -> str:
    if character in "\n\r\t":
        return " "
    code = ord(character)
    noncharacter = code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF
    if noncharacter or unicodedata.category(character) in _STEERING:
        return f"[U+{code:04X}]"
    return character


def clean_name(text: str, limit: int = NAME_LIMIT) -> str:
    """Clean an id or a name; an empty one becomes visible."""
    return clean_text(text, limit) or "(empty)"


def shorten_place(place: str) -> str:
    """Return the last three parts of a path; a hub id or a shorter path whole."""
    parts = [part for part in re.split(r"[/\\]", place) if part]
    return place if len(parts) <= 3 else f"{ELLIPSIS}/{'/'.join(parts[-3:])}"


def hide_paths(text: str) -> str:
    """Replace local paths, which tell of someone's machine, by ``(local path)``."""
    return _LOCAL_PATH.sub("(local path)", text)


def is_hub_id(name: str) -> bool:
    """Tell whether ``name`` has the form of a Hugging Face hub id (``org/name`` or ``name``)."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name
