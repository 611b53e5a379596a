"""Encodes rendered conversations, and pieces of a text apart; what a tokenizer does of its own.

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

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
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


def find_bos(tokenizer: Any) -> int | None:
    """Return the BOS; None if it is also the EOS, and the tokenizer does not add it."""
    bos: int | None = getattr(tokenizer, "bos_token_id", None)
    if bos is None or bos != tokenizer.eos_token_id or tokenizer("a")["input_ids"][:1] == [bos]:
        return bos
    return None


def count_more_bos(ids: Sequence[int], bos: int | None) -> int:
    """Return how many of the BOS with which a document begins are one too many."""
    others = (place for place, id_ in enumerate(ids) if id_ != bos)
    return max(next(others, 1) - 1, 0)


def find_unknown(tokenizer: Any) -> int | None:
    """Return the token of unknown text; None if there is none, or it also ends documents."""
    unknown: int | None = getattr(tokenizer, "unk_token_id", None)
    return None if unknown is None or unknown == tokenizer.eos_token_id else unknown


def find_dropout(tokenizer: Any) -> float:
    """Return the share of merges that a tokenizer drops at random."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    return getattr(model, "dropout", None) or 0.0


def without_dropout(tokenizer: Any) -> Any:
    """Return the tokenizer, or a copy that keeps all merges: equal texts have equal tokens."""
    if find_dropout(tokenizer):
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.backend_tokenizer.model.dropout = None
    return tokenizer


class _Tokens(NamedTuple):
    """Tokens, and the characters that they stand for; 0 to 0 if a slow tokenizer does not know."""

    ids: list[int]
    begins: list[int]
    ends: list[int]


def encode_rendered(rendered: Rendered, tokenizer: Any, special: set[int]) -> Encoded:
    """Encode a rendered conversation; tokens inside a span are supervised.

    Raises:
        UnusableDocument: a token spans two texts that cannot be encoded apart.
    """
    whole, spans = rendered.text, sorted(rendered.spans, key=lambda span: span.begin)
    tokens = _encode_piece(whole, "", tokenizer) or _Tokens([], [], [])
    cuts = [0]
    for edge in (edge for span in spans if tokens.ids for edge in (span.begin, span.end)):
        token = bisect_left(tokens.begins, edge) - 1
        begin = tokens.begins[token]
        if tokens.ends[token] > edge > max(begin, cuts[-1]) and whole[begin:edge].strip():
            cuts.append(edge)
    if len(cuts) > 1:
        tokens = _encode_apart([], whole, cuts, tokens.ids, tokenizer)
    ids, begins, ends = tokens
    supervised = [False] * len(ids)
    for span in spans:
        first, stop = bisect_left(begins, span.begin), bisect_right(ends, span.end)
        if first and ends[first - 1] > span.begin:
            first -= not whole[begins[first - 1] : span.begin].strip()
        if not span.is_whole_turn and stop < len(ids) and ids[stop] in special:
            stop += 1
        # Generation stops at the end-of-turn token: a line break after it is from the template.
        last = stop - 1
        while last >= first and not whole[begins[last] : ends[last]].strip():
            last -= 1
        if last >= first and ids[last] in special:
            stop = last + 1
        supervised[first:stop] = [True] * (stop - first)
    changes: tuple[Change, ...] = ("reasoning",) if rendered.lacks_reasoning else ()
    marks = [begin for id_, begin in zip(ids, begins, strict=True) if id_ in special]
    if any(bisect_left(marks, begin) < bisect_left(marks, end) for begin, end in rendered.others):
        changes += ("marks",)
    return Encoded(input_ids=ids, supervised=supervised, changes=changes)


def encode_pair(
    prompt_ids: list[int], completion: str, ids: list[int], tokenizer: Any, eos: int | None
) -> Encoded:
    """Encode a completion after a prompt; ``ids`` are those of both together."""
    if len(prompt_ids) > 1 and prompt_ids[-1] == tokenizer.eos_token_id:
        # Added by the tokenizer, which treats the prompt as a complete text.
        prompt_ids = prompt_ids[:-1]
    if ids[: len(prompt_ids)] != prompt_ids:
        ids = prompt_ids + _encode_apart(prompt_ids, completion, [0], ids, tokenizer).ids
    ids = end_with(eos, ids)
    mask = [False] * len(prompt_ids) + [True] * (len(ids) - len(prompt_ids))
    return Encoded(input_ids=ids, supervised=mask)


def end_with(eos: int | None, ids: list[int]) -> list[int]:
    """Return the ids with EOS as the last one."""
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def _encode_apart(
    before: Sequence[int], text: str, cuts: Sequence[int], whole: Sequence[int], tokenizer: Any
) -> _Tokens:
    """Encode a text after the ids ``before``, so that no token spans a cut.

    Raises:
        UnusableDocument: together they would not give the text of the ids ``whole``.
    """
    decode = build_decoder(tokenizer)
    for anchor in _BEFORE:
        pieces = [
            _encode_piece(text[begin:end], anchor if before or begin else "", tokenizer, begin)
            for begin, end in pairwise((*cuts, len(text)))
        ]
        columns = zip(*(piece or _Tokens([], [], []) for piece in pieces), strict=True)
        tokens = _Tokens(*(list(chain(*column)) for column in columns))
        if None not in pieces and decode([*before, *tokens.ids]) == decode(whole):
            return tokens
    raise UnusableDocument(
        "whose prompt and answer share a token and cannot be encoded apart without a change of the "
        "text (put white space between them)"
    )


def _encode_piece(text: str, before: str, tokenizer: Any, place: int = 0) -> _Tokens | None:
    """Encode a text at a place, behind another; None if a token spans both."""
    options = {"add_special_tokens": False, "verbose": False}
    encoded = tokenizer(before + text, return_offsets_mapping=tokenizer.is_fast, **options)
    ids = encoded["input_ids"]
    first = tokenizer(before, **options)["input_ids"] if before else []
    if ids[: len(first)] != first:
        return None
    moved, size = place - len(before), len(first)
    offsets = encoded.get("offset_mapping", [(0, 0)] * len(ids))[size:]
    # The space that some tokenizers put before a text is at its first character.
    begins = [max(begin + moved, place) for begin, _ in offsets]
    return _Tokens(ids[size:], begins, [end + moved for _, end in offsets])


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
