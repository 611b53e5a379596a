r"""The letters that the tokens of a text spell, which goldfish hashes with ``normalise: text``.

    tokens   "▁Hello"  ","  "\n"  "▁World"     letters of each   hello  -  -  world
    tokens   <E0>  <B8>  <81>  (one letter)    complete before each token   0  0  0

White space and punctuation are removed and case is folded, so that a copy with other line breaks,
indentation or quotation marks has the same letters before each word, independent of how the text
was tokenized. Bytes of a letter that tokens share (byte-level BPE, byte fallback) are joined over
the tokens of a document. A letter counts once its last byte is past: its bytes share one decision.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

_BYTES = 0xDC80
"""First of the 128 code points of bytes of shared letters, as in Python's ``surrogateescape``."""
_NUM_CODES = 0x40000
"""Unicode has letters and digits in planes 0 to 3 only; the last of these code points is none."""


class TokenLetters:
    """The letters of each token of a vocabulary."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Extract the letters of each token's text ``[V]``, and its bytes of shared letters."""
        letters = [
            [ord(c) for c in text.casefold() if c.isalnum() or ord(c) & ~0x7F == _BYTES]
            for text in texts
        ]
        self._codes = np.array([code for word in letters for code in word], dtype=np.int64)
        """Code points of all tokens, concatenated."""
        self._offsets = np.cumsum([0, *map(len, letters)])
        """``[V + 1]`` index at which the code points of each token begin."""

    def spell(
        self, ids: NDArray[np.integer], start: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the letters of tokens ``[N]``, and how many are complete before each ``[N + 1]``.

        ``start`` ``[N]`` is the index at which the document of each token starts.
        """
        sizes = self._offsets[ids + 1] - self._offsets[ids]
        begins = np.concatenate([[0], np.cumsum(sizes)])
        # For each letter: its index in the stream, minus the index where its token begins there,
        # plus the offset of its token in the vocabulary.
        places = np.arange(begins[-1]) + np.repeat(self._offsets[ids] - begins[:-1], sizes)
        codes = self._codes[places]
        is_byte = codes & ~0x7F == _BYTES
        if not is_byte.any():
            return codes, begins
        codes, num_before = _join_bytes(codes, is_byte, np.repeat(start, sizes))
        return codes, num_before[begins]


@cache
def _spell_unicode() -> TokenLetters:
    """Return the letters of each code point (0.3 s)."""
    return TokenLetters([chr(code) for code in range(_NUM_CODES)])


def _join_bytes(
    codes: NDArray[np.int64], is_byte: NDArray[np.bool_], document: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join bytes ``[M]`` to letters; those of no whole letter in their document are left out.

    Returns the letters, and how many are complete before each code point ``[M + 1]``.
    """
    num = len(codes)
    byte = np.where(is_byte, codes & 0xFF, 0)
    size = 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
    byte, document = np.pad(byte, (0, 3)), np.pad(document, (0, 3), constant_values=-1)
    goes_on = (byte & 0xC0) == 0x80
    is_first = ~goes_on[:num]
    # UTF-8: the first byte holds the bits that are left of 7 by the number of bytes.
    letter = np.where(is_byte, byte[:num] & (0x7F >> size), codes)
    for place in range(1, size.max()):
        later, has_later = slice(place, place + num), size > place
        is_first &= ~has_later | (goes_on[later] & (document[later] == document[:num]))
        letter = np.where(has_later, letter << 6 | byte[later] & 0x3F, letter)
    first = np.flatnonzero(is_first)
    whole = np.minimum(letter[first], _NUM_CODES - 1)
    letters, begins = _spell_unicode().spell(whole, np.zeros_like(whole))
    num_letters = np.zeros(num + 1, dtype=np.int64)
    num_letters[first + size[first]] = np.diff(begins)
    return letters, np.cumsum(num_letters)
