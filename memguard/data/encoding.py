"""Encodes conversations with the chat template; the assistant's turns are supervised.

A template with `{% generation %}` marks states which text the assistant generates. With any other
template the conversation is rendered turn by turn: the text that a turn adds after the generation
prompt belongs to that turn,

    render(turns before, add_generation_prompt)    <user> a <end> <assistant>
    render(turns up to this one)                   <user> a <end> <assistant> b <end>
                                                                              ^^^^^^^ supervised

A template may leave out the turns of roles that it does not know. Such documents are refused: each
conversation is rendered once more with a mark at the end of each turn's text, and every mark must
arrive. The text itself is not searched for: templates strip it, escape it, or leave out the
reasoning of earlier answers, and a short text also occurs in other turns.

A long text of which only the first tokens are kept is cut before it is encoded (`Shortener`): a
tokenizer takes a second and 200 MB for a million characters, even if most tokens are discarded.

    text       a prefix as long as `max_tokens` of the longest tokens, then twice that, and so on
    accepted   when two prefixes agree in the first `max_tokens` ids, so that the text after them
               has no influence. Tokenizers look ahead by a word; one that drops or joins characters
               needs a longer prefix, which the doubling provides
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memguard.data.documents import Document, Message, name_ids
from memguard.data.formats import list_names
from memguard.errors import DataError

_MARK = "73029415860194"
"""Digits, which no template escapes or strips; the number of the turn follows."""
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Token ids and, for each, whether it is supervised."""

    input_ids: Sequence[int]
    supervised: Sequence[bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """Character range of a rendered conversation that the assistant generates."""

    begin: int
    end: int
    is_whole_turn: bool
    """False: `end` is the end of the content; the end-of-turn token after it is included."""


class TemplateFailure(Exception):
    """The template cannot be applied to a document; documents are counted by this message."""


def find_special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of all special tokens, including those of the chat template."""
    added = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def encode_conversation(messages: Sequence[Message], tokenizer: Any, special: set[int]) -> Encoded:
    """Encode a conversation; assistant turns and their end-of-turn tokens are supervised.

    Raises:
        TemplateFailure: the template rejects the turns, leaves out the text of one, or renders
            earlier turns differently when later ones are added.
    """
    if _GENERATION_MARK.search(tokenizer.get_chat_template()):
        marked = _apply(messages, tokenizer, return_dict=True, return_assistant_tokens_mask=True)
        _refuse_dropped(messages, tokenizer)
        return Encoded(
            input_ids=marked["input_ids"], supervised=[bool(m) for m in marked["assistant_masks"]]
        )
    whole = _render(messages, tokenizer)
    _refuse_dropped(messages, tokenizer)
    spans = [
        _find_turn(messages, turn, whole, tokenizer)
        for turn, message in enumerate(messages)
        if message.role == "assistant"
    ]
    return _encode_spans(whole, spans, tokenizer, special)


def encode_reply(
    prompt: Sequence[Message], completion: Sequence[Message], tokenizer: Any, special: set[int]
) -> Encoded:
    """Encode a prompt and its completion; see `encode_conversation`.

    All text after the rendered prompt is supervised.
    """
    whole = _render([*prompt, *completion], tokenizer)
    _refuse_dropped([*prompt, *completion], tokenizer)
    needs_reply = prompt[-1].role != "assistant"
    _, begin = _find_prompt(prompt, whole, tokenizer, add_generation_prompt=needs_reply)
    span = _Span(begin=begin, end=len(whole), is_whole_turn=True)
    return _encode_spans(whole, [span], tokenizer, special)


def _refuse_dropped(messages: Sequence[Message], tokenizer: Any) -> None:
    """Raise TemplateFailure if the template leaves out all text of a turn that has some."""
    marked = [
        Message(role=message.role, content=f"{message.content} {_MARK}{turn:06d}")
        for turn, message in enumerate(messages)
    ]
    try:
        text = _render(marked, tokenizer)
    except TemplateFailure:
        return  # It takes the turns as they are, and so reads what they say.
    dropped = {
        message.role
        for turn, message in enumerate(messages)
        if message.content.strip() and f"{_MARK}{turn:06d}" not in text
    }
    if dropped:
        roles = " and ".join(f"'{list_names([role])}'" for role in sorted(dropped))
        raise TemplateFailure(
            f"with turns of the role {roles} whose text the chat template leaves out, so that it "
            "would not be trained or audited (take a tokenizer whose template renders them, add "
            "them to its chat_template.jinja, or remove these turns from the documents)"
        )


_CHANGES = (
    "that the chat template renders differently as turns are added, so that the assistant's text "
    "cannot be located (mark it in the template with {% generation %}, or end each conversation "
    "with its only assistant turn)"
)


def _find_turn(messages: Sequence[Message], turn: int, whole: str, tokenizer: Any) -> _Span:
    """Return the character range of an assistant turn, without its header, in ``whole``."""
    after = _render(messages[: turn + 1], tokenizer)
    if turn:
        header, end = _find_prompt(messages[:turn], whole, tokenizer)
    else:
        # Templates cannot render zero turns: the header is what a generation prompt adds here.
        prompted = _render(messages[:1], tokenizer, add_generation_prompt=True)
        text = prompted.removeprefix(after)
        header = end = whole.find(text) + len(text) if text in whole else 0
    content = messages[turn].content.strip()
    if whole.startswith(after) and content in whole[header : len(after)]:
        return _Span(begin=end, end=len(after), is_whole_turn=True)
    # A template may close the last turn differently, or omit the reasoning of earlier turns. The
    # text before the content must belong to this turn; otherwise the match is in another turn.
    for start in (end, header):
        position = whole.find(content, start)
        if position >= 0 and after.startswith(whole[start:position], start):
            return _Span(begin=end, end=position + len(content), is_whole_turn=False)
    raise TemplateFailure(_CHANGES)


def _find_prompt(
    before: Sequence[Message], whole: str, tokenizer: Any, *, add_generation_prompt: bool = True
) -> tuple[int, int]:
    """Find the ends of ``before`` and of the generation prompt after it, if any (characters)."""
    prompted = _render(before, tokenizer, add_generation_prompt=add_generation_prompt)
    header = _count_common(prompted, _render(before, tokenizer))
    # The prompt may open a reasoning block that the turn lacks; text before it must not differ.
    end = _count_common(prompted, whole)
    if end < header:
        raise TemplateFailure(_CHANGES)
    return header, end


def _count_common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts (characters)."""
    if other.startswith(one):
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _encode_spans(whole: str, spans: Sequence[_Span], tokenizer: Any, special: set[int]) -> Encoded:
    """Encode rendered text; tokens inside a span are supervised."""
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    input_ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    supervised = [False] * len(input_ids)
    token = 0
    for span in spans:
        inside = []
        while token < len(offsets) and offsets[token][1] <= span.end:
            if offsets[token][0] >= span.begin:
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
    return Encoded(input_ids=input_ids, supervised=supervised)


def _render(
    messages: Sequence[Message], tokenizer: Any, *, add_generation_prompt: bool = False
) -> str:
    text = _apply(messages, tokenizer, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert isinstance(text, str), "tokenize=False gives text"
    return text


def _apply(messages: Sequence[Message], tokenizer: Any, **how: Any) -> Any:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return tokenizer.apply_chat_template(turns, tokenizer_kwargs={"verbose": False}, **how)
    except Exception as error:  # a template is a program: it can raise anything
        # Quote only text from the template itself, never text from the user's documents.
        reason = str(error)
        if not reason or reason not in str(tokenizer.chat_template):
            reason = type(error).__name__
        raise TemplateFailure(f"that the chat template rejects ({reason})") from error


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
    turns = [*(document.messages or ()), *(document.prompt or ()), *(document.completion or ())]
    return sum(len(turn.content) for turn in turns if not isinstance(turn, str))


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
