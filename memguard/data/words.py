"""Words of a text, the same for every way in which it is written."""

import re
import unicodedata

_WORD = re.compile(r"[^\W_]+")


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
