"""Encodes rendered conversations, and pieces of a text apart; cuts long texts before.

A token that spans a prompt and its answer would be trained in part or not at all, and at inference
the prompt is encoded alone. The text is cut there, and its pieces are encoded one after the other.
White space before an answer belongs to it: most tokenizers join it to the first word.

A long text of which only the first tokens are kept is cut before it is encoded (`Shortener`): a
tokenizer takes a second and 200 MB for a million characters, even if most tokens are discarded.

    text       a prefix as long as `max_tokens` of the longest tokens, then twice that, and so on
    accepted   when two prefixes agree in the first `max_tokens` ids, so that the text after them
               has no influence. Tokenizers look ahead by a word; one that drops or joins characters
               needs a longer prefix, which the doubling provides
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from memguard.data.chat import Rendered, UnusableDocument
from memguard.data.documents import Decode, Document, name_ids
from memguard.errors import DataError

_BEFORE = ("", "\n", "a", "0", ".")
"""Texts before a piece, whose tokens are taken away: alone, some tokenizers put a space there."""


Change = Literal["BOS", "reasoning", "marks"]
"""Said of documents: a second BOS is left out; the chat template leaves out the reasoning of
earlier answers; a turn of the user has special tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Token ids and, for each, whether it is supervised."""

    input_ids: Sequence[int]
    supervised: Sequence[bool]
    changes: tuple[Change, ...] = ()


def find_special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of all special tokens, including those of the chat template."""
    added = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


class _Piece(NamedTuple):
    """The tokens of a text."""

    input_ids: list[int]
    offsets: list[tuple[int, int]]
    """Begin and end of each token (characters); empty if a slow tokenizer does not know them."""


def encode_rendered(rendered: Rendered, tokenizer: Any, special: set[int]) -> Encoded:
    """Encode a rendered conversation; tokens inside a span are supervised.

    Raises:
        UnusableDocument: a token spans two texts that cannot be encoded apart.
    """
    whole, spans = rendered.text, sorted(rendered.spans, key=lambda span: span.begin)
    input_ids, offsets = _encode_piece(whole, "", tokenizer) or _Piece([], [])
    starts = [start for start, _ in offsets]
    cuts = [0]
    for edge in (edge for span in spans for edge in (span.begin, span.end)):
        token = bisect_left(starts, edge) - 1
        is_inside = token >= 0 and offsets[token][1] > edge > cuts[-1]
        if is_inside and whole[starts[token] : edge].strip():
            cuts.append(edge)
    if len(cuts) > 1:
        parts = [whole[begin:end] for begin, end in pairwise((*cuts, len(whole)))]
        pieces = _encode_apart([], parts, input_ids, tokenizer)
        input_ids = [id_ for piece in pieces for id_ in piece.input_ids]
        offsets = [
            (begin + cut, end + cut)
            for cut, piece in zip(cuts, pieces, strict=True)
            for begin, end in piece.offsets
        ]
    supervised = [False] * len(input_ids)
    token = 0
    for span in spans:
        inside = []
        while token < len(offsets) and offsets[token][1] <= span.end:
            start, end = offsets[token]
            if start >= span.begin or (end > span.begin and not whole[start : span.begin].strip()):
                inside.append(token)
            token += 1
        if not span.is_whole_turn and token < len(offsets) and input_ids[token] in special:
            inside.append(token)
        # Generation stops at the end-of-turn token: a line break after it is from the template.
        count = len(inside)
        while count and not whole[slice(*offsets[inside[count - 1]])].strip():
            count -= 1
        if count and input_ids[inside[count - 1]] in special:
            del inside[count:]
        for position in inside:
            supervised[position] = True
    changes: tuple[Change, ...] = ("reasoning",) if rendered.lacks_reasoning else ()
    marks = [begin for id_, (begin, _) in zip(input_ids, offsets, strict=True) if id_ in special]
    if any(bisect_left(marks, begin) < bisect_left(marks, end) for begin, end in rendered.others):
        changes += ("marks",)
    return Encoded(input_ids=input_ids, supervised=supervised, changes=changes)


def split_pair(prompt: str, completion: str) -> tuple[str, str]:
    """Move white space at the end of a prompt to its completion."""
    size = len(prompt.rstrip())
    return prompt[:size], prompt[size:] + completion


def encode_pair(
    prompt_ids: list[int], completion: str, ids: list[int], tokenizer: Any, eos: int | None
) -> Encoded:
    """Encode a completion after a prompt; ``ids`` are those of both together."""
    if len(prompt_ids) > 1 and prompt_ids[-1] == tokenizer.eos_token_id:
        # Added by the tokenizer, which treats the prompt as a complete text.
        prompt_ids = prompt_ids[:-1]
    if ids[: len(prompt_ids)] != prompt_ids:
        # A token would span prompt and completion. At inference the prompt is encoded alone, so the
        # completion must be trained after those ids.
        (rest,) = _encode_apart(prompt_ids, [completion], ids, tokenizer)
        ids = prompt_ids + rest.input_ids
    ids = end_with(eos, ids)
    mask = [False] * len(prompt_ids) + [True] * (len(ids) - len(prompt_ids))
    return Encoded(input_ids=ids, supervised=mask)


def end_with(eos: int | None, ids: list[int]) -> list[int]:
    """Return the ids with EOS as the last one."""
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def _encode_apart(
    before: Sequence[int], parts: Sequence[str], whole: Sequence[int], tokenizer: Any
) -> list[_Piece]:
    """Encode parts of a text so that no token spans two of them, after the ids ``before``.

    Raises:
        UnusableDocument: together they would not give the text of the ids ``whole``.
    """
    decode = build_decoder(tokenizer)
    for anchor in _BEFORE:
        pieces = [
            _encode_piece(part, anchor if before or index else "", tokenizer)
            for index, part in enumerate(parts)
        ]
        known = [piece for piece in pieces if piece is not None]
        ids = [*before, *(id_ for piece in known for id_ in piece.input_ids)]
        if len(known) == len(parts) and decode(ids) == decode(whole):
            return known
    raise UnusableDocument(
        "whose prompt and answer share a token and cannot be encoded apart without a change of the "
        "text (put white space between them)"
    )


def _encode_piece(text: str, before: str, tokenizer: Any) -> _Piece | None:
    """Encode a text behind another; None if a token spans both."""
    options = {"add_special_tokens": False, "verbose": False}
    encoded = tokenizer(before + text, return_offsets_mapping=tokenizer.is_fast, **options)
    first = tokenizer(before, **options)["input_ids"] if before else []
    if encoded["input_ids"][: len(first)] != first:
        return None
    size, offsets = len(before), encoded.get("offset_mapping", [])[len(first) :]
    # The space that some tokenizers put before a text is at its first character.
    moved = [(max(begin - size, 0), end - size) for begin, end in offsets]
    return _Piece(encoded["input_ids"][len(first) :], moved)


def build_decoder(tokenizer: Any) -> Decode:
    """Return a function that decodes token ids to text, without special tokens."""
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    return lambda ids: tokenizer.decode(list(ids), **options)


MAX_CHARACTERS = 10_000_000
"""Limit for a document that is encoded as a whole; it takes ten seconds and two gigabytes."""
_MARGIN_TOKENS = 16
"""Tokens beyond those that are kept: a tokenizer may append EOS."""


def check_lengths(documents: Sequence[Document], *, max_tokens: int | None, setting: str) -> None:
    """Reject documents that are too long to be encoded as a whole.

    Texts are cut to ``max_tokens`` and may be of any length; None: not cut.

    Raises:
        DataError: with the number of documents that are too long and how to fix it.
    """
    too_long = [
        document.id
        for document in documents
        if count_characters(document, max_tokens) > MAX_CHARACTERS
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


def count_characters(document: Document, max_tokens: int | None = None) -> int:
    """Return the number of characters, without those that ``max_tokens`` may cut."""
    parts = (document.text, document.messages, document.prompt, document.completion)
    ends = () if max_tokens is None else (document.text, document.completion)
    size = sum(
        len(part) if isinstance(part, str) else sum(len(turn.content) for turn in part)
        for part in parts
        if part is not None
    )
    return size - sum(len(end) for end in ends if isinstance(end, str))


class Shortener:
    """Cuts texts to a prefix with the same first tokens."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        """Choose the first prefix length from the vocabulary's longest token."""
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._first = (max_tokens + _MARGIN_TOKENS) * longest

    def shorten(self, text: str, before: str = "") -> str:
        """Return the text, or a prefix of it that has the same first tokens after ``before``."""
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
        encoded = self._tokenizer(text, return_attention_mask=False, verbose=False)
        ids: list[int] = encoded["input_ids"]
        return ids

    def _agree(self, shorter: Sequence[int], longer: Sequence[int]) -> bool:
        count = self._max_tokens
        return len(shorter) >= count + _MARGIN_TOKENS and shorter[:count] == longer[:count]
