"""Texts of which only the first tokens are kept: as much of them is encoded as decides these.

A tokenizer takes a second and 200 MB for a million characters, whatever is thrown away afterwards.

    text       as long as `max_tokens` of the longest tokens, then twice that, and so on
    accepted   when two lengths agree in the first `max_tokens` ids: what follows them no longer
               matters. Tokenizers look ahead by a word; one that drops or joins characters needs
               more of the text, and gets it
"""

from collections.abc import Sequence
from typing import Any

from memguard.data.documents import Document, name_ids
from memguard.errors import DataError

MAX_CHARACTERS = 10_000_000
"""Of a document that is encoded whole: ten seconds and two gigabytes."""
_MARGIN_TOKENS = 16
"""Beyond those that are kept: a tokenizer may put EOS at the end."""


def check_lengths(documents: Sequence[Document], *, max_tokens: int | None, setting: str) -> None:
    """Refuse documents that are too long to be encoded whole.

    Args:
        documents: of any format.
        max_tokens: texts are cut to so many tokens and may be of any length; None cuts none.
        setting: what to call the documents.

    Raises:
        DataError: with how many there are, and the way out.
    """
    too_long = [
        each.id for each in documents if _count_characters(each, max_tokens) > MAX_CHARACTERS
    ]
    if too_long:
        ways = ["cut them into several documents"]
        if not setting.startswith("--") and max_tokens is None:
            ways.insert(0, "set 'data.max_document_tokens'")
        raise DataError(
            f"'{setting}' has {len(too_long)} of {len(documents)} documents of more than "
            f"{MAX_CHARACTERS:,} characters, which would be encoded whole: {name_ids(too_long)}. "
            f"{' or '.join(ways).capitalize()}."
        )


def _count_characters(document: Document, max_tokens: int | None) -> int:
    """Return the characters that have to be encoded whole."""
    if document.text is not None:
        return len(document.text) if max_tokens is None else 0
    if isinstance(document.prompt, str) and isinstance(document.completion, str):
        return len(document.prompt) + (len(document.completion) if max_tokens is None else 0)
    turns = [
        *(document.messages or ()),
        *(document.prompt or ()),
        *(document.completion or ()),
    ]
    return sum(len(turn.content) for turn in turns if not isinstance(turn, str))


class Shortener:
    """Cuts texts to what decides their first tokens."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        """Look at the vocabulary.

        Args:
            tokenizer: of the texts.
            max_tokens: tokens that are kept of each.
        """
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._first = (max_tokens + _MARGIN_TOKENS) * longest

    def shorten(self, text: str, before: str = "") -> str:
        """Return the text, or a beginning of it that has the same first tokens.

        Args:
            text: of any length.
            before: encoded in front of it; kept whole.
        """
        size = self._first
        ids: list[list[int]] | None = None
        # Encoded once more and then for good: not worth it for less.
        while 4 * size < len(text):
            # Alone too: where a token would span the seam, the text is encoded by itself.
            cut = text[:size]
            shorter, ids = ids, [self._encode(each) for each in dict.fromkeys((before + cut, cut))]
            if shorter is not None and all(map(self._agree, shorter, ids)):
                return cut
            size *= 2
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        return ids

    def _agree(self, shorter: Sequence[int], longer: Sequence[int]) -> bool:
        count = self._max_tokens
        return len(shorter) >= count + _MARGIN_TOKENS and shorter[:count] == longer[:count]
