"""The units of a text that are compared where texts count as the same, however they are encoded.

A unit is a word with its combining marks; in scripts written without spaces between words (Han,
Kana, Thai, Lao, Khmer, Myanmar) it is one character. Case, compatibility forms (NFKC), invisible
characters (zero-width ones, soft hyphens) and all that is between words do not count.
"""

import re
import unicodedata
from functools import cache

_ASCII_WORD = re.compile("[a-z0-9]+")
_INVISIBLE = re.compile("COMBINING GRAPHEME JOINER|.*VARIATION SELECTOR")
# Of the names of characters, in any version of Unicode.
_SPACELESS = ("CJK ", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "THAI ", "LAO ", "KHMER ", "MYANMAR ")


def split_words(text: str) -> list[str]:
    """Return the units of a text in order; none if it has neither letters nor digits."""
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    # First what is invisible, which would separate a letter from its marks.
    text = text.translate({ord(letter): None for letter in set(text) if _is_invisible(letter)})
    # Decomposed first: marks of an upper-case letter change their order with its case otherwise.
    text = unicodedata.normalize("NFKD", text).casefold()
    text = unicodedata.normalize("NFKC", text)
    letters = set(text)
    words = text.translate({ord(letter): _space(letter) for letter in letters}).split()
    # Marks that follow no letter, such as an accent typed as an apostrophe.
    alone = "".join(x for x in letters if not x.isalnum() and _space(x) == x)
    return [word for word in (word.lstrip(alone) for word in words) if word] if alone else words


@cache
def _is_invisible(letter: str) -> bool:
    name = unicodedata.name(letter, "")
    return unicodedata.category(letter) == "Cf" or _INVISIBLE.match(name) is not None


@cache
def _space(letter: str) -> str:
    """Return a character of a text with the spaces that separate units."""
    if not letter.isalnum() and unicodedata.category(letter)[0] != "M":
        return " "
    is_unit = unicodedata.name(letter, "").startswith(_SPACELESS)
    return f" {letter} " if is_unit else letter
