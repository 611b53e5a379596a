"""Cuts long texts before encoding if only their first tokens are kept.

A tokenizer takes a second and 200 MB for a million characters, even if most tokens are discarded.

    text       a prefix as long as `max_tokens` of the longest tokens, then twice that, and so on
    accepted   when two prefixes agree in the first `max_tokens` ids, so that the text after them
               has no influence. Tokenizers look ahead by a word; one that drops or joins characters
               needs a longer prefix, which the doubling provides
"""

from collections.abc import Sequence
from typing import Any

from memguard.data.documents import Document, name_ids
from memguard.errors import DataError

MAX_CHARACTERS = 10_000_000
"""Limit for a document that is encoded as a whole; it takes ten seconds and two gigabytes."""
_MARGIN_TOKENS = 16
"""Tokens beyond those that are kept: a tokenizer may append EOS."""


def check_lengths(documents: Sequence[Document], *, max_tokens: int | None, setting: str) -> None:
    """Reject documents that are too long to be encoded as a whole.

    Args:
        documents: of any format.
        max_tokens: texts are cut to this many tokens and may be of any length; None: not cut.
        setting: name of the documents in errors.

    Raises:
        DataError: with the number of documents that are too long and how to fix it.
    """
    too_long = [
        document.id
        for document in documents
        if _count_characters(document, max_tokens) > MAX_CHARACTERS
    ]
    if too_long:
        ways = ["cut them into several documents"]
        if not setting.startswith("--") and max_tokens is None:
            ways.insert(0, "set 'data.max_document_tokens'")
        raise DataError(
            f"'{setting}' has {len(too_long)} of {len(documents)} documents of more than "
            f"{MAX_CHARACTERS:,} characters, too long to be encoded: {name_ids(too_long)}. "
            f"{' or '.join(ways).capitalize()}."
        )


def _count_characters(document: Document, max_tokens: int | None) -> int:
    """Return the number of characters that must be encoded as a whole."""
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
    """Cuts texts to a prefix with the same first tokens."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        """Choose the first prefix length from the vocabulary's longest token.

        Args:
            tokenizer: of the texts.
            max_tokens: number of tokens that are kept of each text.
        """
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._first = (max_tokens + _MARGIN_TOKENS) * longest

    def shorten(self, text: str, before: str = "") -> str:
        """Return the text, or a prefix of it that has the same first tokens.

        Args:
            text: of any length.
            before: text encoded in front of it; it is not cut.
        """
        size = self._first
        ids: list[list[int]] | None = None
        # The result is encoded again, so that cutting pays off only for longer texts.
        while 4 * size < len(text):
            # Also without `before`: if a token would span both, the text is encoded alone.
            cut = text[:size]
            variants = dict.fromkeys((before + cut, cut))
            shorter, ids = ids, [self._encode(variant) for variant in variants]
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
