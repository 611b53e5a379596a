"""Conversations into token ids through the chat template, the assistant's turns supervised.

A template with `{% generation %}` marks says itself what the assistant writes. For all others the
conversation is rendered turn by turn: what a turn adds after the generation prompt is its own,

    render(turns before, add_generation_prompt)    <user> a <end> <assistant>
    render(turns up to this one)                   <user> a <end> <assistant> b <end>
                                                                              ^^^^^^^ supervised
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memguard.data.documents import Message

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Token ids and, for each, whether it is supervised."""

    input_ids: Sequence[int]
    supervised: Sequence[bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """Characters of a rendered conversation that the assistant writes."""

    begin: int
    end: int
    is_whole_turn: bool
    """False: `end` is where its content ends; the end-of-turn token that follows belongs to it."""


class TemplateFailure(Exception):
    """Why the template cannot be used for a document, so that such documents can be counted."""


def find_special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of all special tokens, those of the chat template included."""
    added = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def marks_generation(template: str) -> bool:
    """Tell whether a chat template says itself what the assistant writes."""
    return _GENERATION_MARK.search(template) is not None


def encode_conversation(messages: Sequence[Message], tokenizer: Any, special: set[int]) -> Encoded:
    """Encode a conversation; the assistant's turns are supervised, their end-of-turn token too.

    Args:
        messages: the turns.
        tokenizer: a fast tokenizer with a chat template.
        special: its `find_special_ids`.

    Raises:
        TemplateFailure: the template refuses the turns, or does not keep what it has rendered.
    """
    if marks_generation(tokenizer.get_chat_template()):
        marked = _apply(messages, tokenizer, return_dict=True, return_assistant_tokens_mask=True)
        return Encoded(
            input_ids=marked["input_ids"], supervised=[bool(m) for m in marked["assistant_masks"]]
        )
    whole = _render(messages, tokenizer)
    spans = [
        _find_turn(messages, turn, whole, tokenizer)
        for turn, message in enumerate(messages)
        if message.role == "assistant"
    ]
    return _encode_spans(whole, spans, tokenizer, special)


def encode_reply(
    prompt: Sequence[Message], completion: Sequence[Message], tokenizer: Any, special: set[int]
) -> Encoded:
    """Encode a prompt and its completion; everything after the templated prompt is supervised.

    Raises:
        TemplateFailure: see `encode_conversation`.
    """
    whole = _render([*prompt, *completion], tokenizer)
    asked = _find_prompt(prompt, whole, tokenizer, asks=prompt[-1].role != "assistant")
    span = _Span(begin=asked.end, end=len(whole), is_whole_turn=True)
    return _encode_spans(whole, [span], tokenizer, special)


_CHANGES = (
    "that the chat template renders differently as they grow, so that the assistant's part cannot "
    "be told (mark it in the template with {% generation %}, or end each conversation with its "
    "only assistant turn)"
)


def _find_turn(messages: Sequence[Message], turn: int, whole: str, tokenizer: Any) -> _Span:
    """Return where an assistant turn, without its header, lies in ``whole``."""
    after = _render(messages[: turn + 1], tokenizer)
    if turn:
        asked = _find_prompt(messages[:turn], whole, tokenizer)
    else:
        # No template renders nothing: the header is what a generation prompt adds to this turn.
        prompted = _render(messages[:1], tokenizer, add_generation_prompt=True)
        header = prompted.removeprefix(after)
        end = whole.find(header) + len(header) if header in whole else 0
        asked = _Prompt(header=end, end=end)
    said = messages[turn].content.strip()
    if whole.startswith(after) and said in whole[asked.header : len(after)]:
        return _Span(begin=asked.end, end=len(after), is_whole_turn=True)
    # A last turn may be closed in another way, or show thoughts that are left out later. Whatever
    # stands before its content must be its own, else that content is gone and this is another's.
    for start in (asked.end, asked.header):
        found = whole.find(said, start)
        if found >= 0 and after.startswith(whole[start:found], start):
            return _Span(begin=asked.end, end=found + len(said), is_whole_turn=False)
    raise TemplateFailure(_CHANGES)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prompt:
    """Where a generation prompt lies in a rendered conversation (characters)."""

    header: int
    end: int


def _find_prompt(
    before: Sequence[Message], whole: str, tokenizer: Any, *, asks: bool = True
) -> _Prompt:
    """Find the end of ``before`` and of the generation prompt after it (if it ``asks`` for one)."""
    prompted = _render(before, tokenizer, add_generation_prompt=asks)
    header = _count_common(prompted, _render(before, tokenizer))
    # The prompt may open thoughts that the turn does not have; nothing before it may differ.
    end = _count_common(prompted, whole)
    if end < header:
        raise TemplateFailure(_CHANGES)
    return _Prompt(header=header, end=end)


def _count_common(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    if other.startswith(one):
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _encode_spans(whole: str, spans: Sequence[_Span], tokenizer: Any, special: set[int]) -> Encoded:
    """Encode rendered text; tokens that lie inside a span are supervised."""
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
        # Nothing is generated after an end-of-turn token: a line break there is the template's.
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
        # Only what its author wrote is repeated, never what it was given.
        words = str(error)
        if not words or words not in str(tokenizer.chat_template):
            words = type(error).__name__
        raise TemplateFailure(f"that the chat template refuses ({words})") from error
