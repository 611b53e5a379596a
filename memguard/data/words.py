"""The form in which texts are compared, and their words.

    form    NFKC, case folded, without format characters (zero-width spaces, soft hyphens)
    word    a run of letters and digits with their combining marks; in scripts that are written
            without spaces between words (Han, Kana, Thai, Lao, Khmer, Myanmar) one character

Two spellings of one text in Unicode, in capitals, re-wrapped or quoted have the same words.
"""

import re
import unicodedata

import numpy as np
from numpy.typing import NDArray

# Odd, so that no hash of a word loses bits; otherwise arbitrary (from the digits of pi).
_BASE = np.uint64(0x243F6A8885A308D3)
_ASCII_WORD = re.compile(r"[^\W_]+")
_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # Han: repeated, zero
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)


def normalize_text(text: str) -> str:
    """Return the form of a text in which copies are equal; runs of white space are one space."""
    if not text.isascii():
        # First what is invisible, which may stand between a letter and its mark.
        text = text.translate({ord(c): None for c in set(text) if _is_invisible(c)})
        # Decomposed first: the order of marks may depend on the case of their letter.
        folded = unicodedata.normalize("NFKD", text).casefold()
        text = unicodedata.normalize("NFKC", folded)
    return " ".join(text.casefold().split())


def split_words(text: str) -> list[str]:
    """Return the words of a text, in order."""
    text = normalize_text(text)
    if text.isascii():
        return _ASCII_WORD.findall(text)
    spaced = {ord(c): _separate(c) for c in set(text)}
    # Marks without a letter, such as an accent for an apostrophe.
    marks = "".join(c for c in spaced.values() if unicodedata.category(c[0])[0] == "M")
    words = [word.lstrip(marks) for word in text.translate(spaced).split()]
    return [word for word in words if word]


def _is_invisible(character: str) -> bool:
    is_selector = "VARIATION SELECTOR" in unicodedata.name(character, "")
    return is_selector or unicodedata.category(character) == "Cf"


def _separate(character: str) -> str:
    """Return a character, with spaces around it or instead of it where a word ends."""
    if unicodedata.category(character)[0] not in "LNM":
        return " "
    point = ord(character)
    is_word = any(first <= point <= last for first, last in _WITHOUT_SPACES)
    return f" {character} " if is_word else character


def hash_runs(words: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    """Return a hash of each run of ``size`` words, ``[N - size + 1]``, from numbers of N words."""
    num_runs = max(len(words) - size + 1, 0)
    runs = np.zeros(num_runs, dtype=np.uint64)
    for word in range(size):
        runs *= _BASE
        # Mixed, because numbers may be small, and the last bits of a product depend on few bits.
        runs ^= runs >> np.uint64(32)
        runs += words[word : word + num_runs]
    return runs ^ (runs >> np.uint64(32))
