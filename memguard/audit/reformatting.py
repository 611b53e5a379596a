"""The same words formatted otherwise, as copies of a text are.

    a text                  A “fine” day. It rained.

    leading_space           ␣A “fine” day. It rained.
    windows_lines           lines end with carriage return and line feed
    wrapped_60              paragraphs broken at 60 columns
    single_line             every run of white space one space
    indented                four spaces before each line
    quoted                  "> " before each line
    double_spaces           two spaces after full stops, ! and ?
    single_spaces           one space where there were several
    curly_quotes            typographic quotation marks and apostrophes
    straight_quotes         A "fine" day. It rained.
    lower_case              a “fine” day. it rained.
    lower_case_first        a “fine” day. It rained.

No rewriting draws anything. What all of them keep is `fold_text`: everything but white space, case
and the shape of quotation marks; `quoted` adds its marks.
"""

import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_COLUMNS = 60
_PARAGRAPHS = re.compile(r"\n\s*\n")
_AFTER_SENTENCE = re.compile(r"""(?<=[.!?]) (?=\S)|(?<=[.!?]["')”’]) (?=\S)""")
_SPACES = re.compile(" {2,}")
_OPENING_DOUBLE = re.compile(r"""(?<![^\s(\[{<'‘—–-])\"""")
_OPENING_SINGLE = re.compile(r"""(?<![^\s(\[{<"“—–-])'""")
_STRAIGHT = str.maketrans({**dict.fromkeys("“”„‟", '"'), **dict.fromkeys("‘’‚‛", "'")})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FoldedText:
    """What of a text does not depend on its formatting."""

    characters: str
    """F characters: no white space, no upper case, straight quotation marks."""
    places_F: NDArray[np.int64]
    """Where in the text each stands; one character may become several (ß, ss)."""


def fold_text(text: str) -> FoldedText:
    """Leave out white space, case and the shape of quotation marks."""
    words = "".join(text.translate(_STRAIGHT).split())
    places = np.flatnonzero([not character.isspace() for character in text])
    widths = [len(character.casefold()) for character in words]
    return FoldedText(characters=words.casefold(), places_F=np.repeat(places, widths))


def _wrap(text: str) -> str:
    return "\n\n".join(
        textwrap.fill(paragraph, _COLUMNS, break_long_words=False, break_on_hyphens=False)
        for paragraph in _PARAGRAPHS.split(text)
    )


def _set_before_lines(text: str, mark: str) -> str:
    return "\n".join(f"{mark}{line}".rstrip(" ") for line in text.split("\n"))


def _curl_quotes(text: str) -> str:
    text = _OPENING_DOUBLE.sub("“", text).replace('"', "”")
    return _OPENING_SINGLE.sub("‘", text).replace("'", "’")


def _lower_first(text: str) -> str:
    start = len(text) - len(text.lstrip())
    return text[:start] + text[start : start + 1].lower() + text[start + 1 :]


REWRITINGS: Mapping[str, Callable[[str], str]] = {
    "leading_space": lambda text: f" {text}",
    "windows_lines": lambda text: text.replace("\r\n", "\n").replace("\n", "\r\n"),
    "wrapped_60": _wrap,
    "single_line": lambda text: " ".join(text.split()),
    "indented": lambda text: _set_before_lines(text, "    "),
    "quoted": lambda text: _set_before_lines(text, "> "),
    "double_spaces": lambda text: _AFTER_SENTENCE.sub("  ", text),
    "single_spaces": lambda text: _SPACES.sub(" ", text),
    "curly_quotes": _curl_quotes,
    "straight_quotes": lambda text: text.translate(_STRAIGHT),
    "lower_case": str.lower,
    "lower_case_first": _lower_first,
}
"""How copies of a text differ from it. A text that one leaves as it is has no such copy."""
