r"""Text as a goldfish hashes it where formatting shall not matter: letters and digits alone.

    tokens    "▁Hello"  ","  "\n"  "▁World"        letters  hello       world
    ends [N]  where in the stream of letters each token begins:  0  5  5  5

White space, punctuation and case are left out, so that a copy with other line breaks, indentation
or quotation marks has the same letters before each word; and it does not matter how they were cut
into tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

LETTERS_PER_TOKEN = 4
"""About what a token of English text has; a context width in tokens counts so many each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenLetters:
    """The letters of each token of a vocabulary."""

    codes: NDArray[np.int64]
    """Code points, of one token after the other."""
    offsets: NDArray[np.int64]
    """``[V + 1]`` where those of each token begin."""

    @classmethod
    def of(cls, texts: Sequence[str]) -> Self:
        """Take the letters of each token's text ``[V]``."""
        letters = ["".join(c for c in text.casefold() if c.isalnum()) for text in texts]
        codes = np.array([ord(c) for each in letters for c in each], dtype=np.int64)
        return cls(codes=codes, offsets=np.cumsum([0, *map(len, letters)]))

    def count(self, ids: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return how many letters each token has, in the shape of the ids."""
        sizes: NDArray[np.int64] = self.offsets[ids + 1] - self.offsets[ids]
        return sizes

    def spell(self, ids: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return all letters of tokens ``[N]``, and where those of each begin ``[N + 1]``."""
        sizes = self.count(ids)
        begins = np.concatenate([[0], np.cumsum(sizes)])
        # Of each letter: its place in the stream, less where its token begins there, plus where it
        # begins in the vocabulary.
        places = np.arange(begins[-1]) + np.repeat(self.offsets[ids] - begins[:-1], sizes)
        return self.codes[places], begins
