"""Renders conversations with the chat template, and finds what the assistant says in the text.

A template with `{% generation %}` marks states which text the assistant generates. With any other
template an answer is the text that its turn adds after the generation prompt,

    render(turns before, add_generation_prompt)    <user> a <end> <assistant>
    render(turns up to this one)                   <user> a <end> <assistant> b <end>
                                                                              ^^^^^^^ supervised

Each conversation is rendered once more with a mark after the text of each turn, or of each answer.
If nothing else changes, the marks say where each text ends: a short text also occurs in other
turns. What stands between two turns is rendered once for each kind of turn, in linear time.

The text of every turn must be in the rendered text, or the document is refused, with the part that
the template leaves out. White space at its ends and at the tags of a reasoning block may differ,
and quotes may be escaped. Templates may leave out the reasoning of answers before the last one.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import accumulate, pairwise
from typing import Any

from memguard.data.formats import list_names
from memguard.data.rows import Message

_MARK = "73029415860194"
"""Digits, which no template escapes or strips; the number of the turn follows."""
_MARKS = re.compile(_MARK + r"(\d{6})")
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_REASONING_TAGS, _REASONING_END = re.compile(r"(</?think>)"), "</think>"
_NUM_PARTS_SHOWN = 3
_CHANGES = (
    "whose answers the chat template renders depending on their text, so that they cannot be "
    "located (mark them in the template with {% generation %})"
)


class UnusableDocument(Exception):
    """A document cannot be encoded; documents are counted by this message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Character range of a rendered conversation that the assistant generates."""

    begin: int
    end: int
    is_whole_turn: bool = True
    """False: `end` is the end of the content; the end-of-turn token after it is included."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation."""

    text: str
    spans: Sequence[Span]
    """What is supervised."""
    lacks_reasoning: bool
    """The reasoning of an answer before the last one is left out."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A tokenizer's chat template on a day."""

    tokenizer: Any
    text: str

    @classmethod
    def of(cls, tokenizer: Any, day: date) -> "ChatTemplate":
        """Return the tokenizer's template with ``day`` in place of today."""
        text: str = tokenizer.get_chat_template()
        return cls(tokenizer, _TODAY.sub(lambda call: json.dumps(day.strftime(call[2])), text))

    @property
    def marks_answers(self) -> bool:
        """Whether the template states what the assistant generates."""
        return _GENERATION_MARK.search(self.text) is not None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation."""
        return self.apply(messages, add_generation_prompt=add_generation_prompt)[0]

    def apply(self, messages: Sequence[Message], **how: bool) -> tuple[str, Any]:
        """Return the text of a conversation, and what the template marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            texts, generated = render_jinja_template(
                [turns], chat_template=self.text, **how, **self.tokenizer.special_tokens_map
            )
        except Exception as error:  # a template is a program: it can raise anything
            # Quote only text from the template itself, never text from the user's documents.
            reason = str(error)
            if not reason or reason not in self.text:
                reason = type(error).__name__
            raise UnusableDocument(f"that the chat template rejects ({reason})") from error
        return texts[0], generated[0] if generated else []


def writes_today(tokenizer: Any) -> bool:
    """Return whether the chat template writes the day on which it is rendered."""
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None))


def render_conversation(messages: Sequence[Message], template: ChatTemplate) -> Rendered:
    """Render a conversation; its assistant turns are supervised.

    Raises:
        UnusableDocument: the template rejects the turns, leaves out text of one, or renders an
            answer so that it cannot be located.
    """
    if template.marks_answers:
        whole, generated = template.apply(messages, return_assistant_tokens_mask=True)
        turns = _Turns(messages, whole, template)
        spans = [Span(begin=begin, end=end) for begin, end in generated]
    else:
        turns = _Turns(messages, template.render(messages), template)
        answers = [turn for turn, message in enumerate(messages) if message.role == "assistant"]
        spans = [turns.find_answer(turn) for turn in answers]
    return Rendered(turns.whole, spans, turns.lacks_reasoning)


def render_reply(
    prompt: Sequence[Message], completion: Sequence[Message], template: ChatTemplate
) -> Rendered:
    """Render a prompt and its completion: all text after the prompt is supervised.

    Raises:
        UnusableDocument: see `render_conversation`.
    """
    messages = [*prompt, *completion]
    turns = _Turns(messages, template.render(messages), template)
    span = Span(begin=turns.find_begin(len(prompt)), end=len(turns.whole))
    return Rendered(turns.whole, [span], turns.lacks_reasoning)


class _Turns:
    """Where the text of each turn stands in a rendered conversation.

    What follows a text when a conversation ends there, or when an answer is asked for, is rendered
    once for each text that stands between two turns.
    """

    def __init__(self, messages: Sequence[Message], whole: str, template: ChatTemplate) -> None:
        """Find the text of each turn.

        Raises:
            UnusableDocument: one of them is not there.
        """
        self._messages, self.whole, self._template = messages, whole, template
        self._prompts: dict[tuple[str, str], tuple[str | None, int]] = {}
        self._closings: dict[tuple[str, str], str | None] = {}
        self.lacks_reasoning = False
        is_answer = [message.role == "assistant" for message in messages]
        has_text = [bool(message.content.strip()) for message in messages]
        marked = self._render_marked([True] * len(messages))
        present = {int(turn) for turn in _MARKS.findall(marked)}
        lost = [turn for turn, says in enumerate(has_text) if says and turn not in present]
        # Without a text it takes the turns as they are, and so reads what they say.
        dropped = lost if marked else []
        ranges = self._list_ranges(marked)
        if not ranges:  # A template may look at the texts: then only the answers have marks.
            answers = [a and b for a, b in zip(is_answer, has_text, strict=True)]
            ranges = self._list_ranges(self._render_marked(answers))
        self._marked = ranges.keys()
        last = max((turn for turn, answer in enumerate(is_answer) if answer), default=-1)
        self._spans: list[tuple[int, int]] = []
        position = 0
        for turn, message in enumerate(messages):
            lower, upper = ranges.get(turn, (position, len(whole)))
            is_earlier = is_answer[turn] and turn < last
            for parts, is_cut in _list_forms(message.content, is_earlier=is_earlier):
                end = _find_end(whole, parts, lower, upper)
                if end is None and not is_answer[turn]:
                    end = _find_end(whole, parts, 0, upper)  # Templates move the system turn.
                if end is not None:
                    self.lacks_reasoning |= is_cut
                    position = upper if turn in ranges else end
                    begin = max(whole.rfind(parts[0], lower, position), 0)
                    self._spans.append((begin, position))
                    break
            else:
                dropped.append(turn)
                self._spans.append((position, position))
        if dropped:
            raise UnusableDocument(_describe_dropped(messages, sorted(set(dropped)), whole))

    def _render_marked(self, chosen: Sequence[bool]) -> str:
        """Return the text with marks in the chosen turns; empty if the template rejects them."""
        turns = [
            _mark(message, turn) if is_chosen else message
            for turn, (message, is_chosen) in enumerate(zip(self._messages, chosen, strict=True))
        ]
        try:
            return self._template.render(turns)
        except UnusableDocument:
            return ""

    def _list_ranges(self, marked: str) -> dict[int, tuple[int, int]]:
        """Return the end of each marked text, after that of the text before it.

        None of them if marks change more than themselves, so that the places are not certain.
        """
        pieces = _MARKS.split(marked)
        if "".join(pieces[::2]) != self.whole:
            return {}
        ends = accumulate(map(len, pieces[:-1:2]), initial=0)
        return dict(zip(map(int, pieces[1::2]), pairwise(ends), strict=True))

    def find_answer(self, turn: int) -> Span:
        """Return the character range of an answer, without its header."""
        end = self._spans[turn][1]
        if turn not in self._marked:
            if self._messages[turn].content.strip():
                raise UnusableDocument(_CHANGES)
            return Span(begin=end, end=end)
        begin = min(self.find_begin(turn), end)
        if turn == len(self._messages) - 1:
            return Span(begin=begin, end=len(self.whole))
        gap = self.whole[end : max(self._spans[turn + 1][0], end)]
        key = (self._messages[turn + 1].role, gap)
        if key not in self._closings:
            self._closings[key] = self._render_after(turn)
        closing = self._closings[key]
        if closing is None or not gap.startswith(closing):
            # A template may close the last turn differently.
            return Span(begin=begin, end=end, is_whole_turn=False)
        return Span(begin=begin, end=end + len(closing))

    def find_begin(self, turn: int) -> int:
        """Return the end of the generation prompt before a turn; without one, that of its header.

        It asks for no answer after the assistant's own turn.
        """
        whole, begin = self.whole, self._spans[turn][0]
        if not turn:
            # Templates cannot render zero turns: the header is what a generation prompt adds here.
            prompted = self._template.render(self._messages[:1], add_generation_prompt=True)
            header = prompted.removeprefix(self._template.render(self._messages[:1]))
            return whole.find(header) + len(header) if header in whole[:begin] else 0
        role, before = self._messages[turn - 1].role, self._spans[turn - 1][1]
        key = (role, whole[before:begin])
        if key not in self._prompts:
            prompt = self._render_after(turn - 1, add_generation_prompt=role != "assistant")
            plain = self._render_after(turn - 1)
            self._prompts[key] = prompt, _count_common(prompt or "", plain or "")
        # The prompt may open a reasoning block that the turn lacks; text before it must not differ.
        prompt, least = self._prompts[key]
        if prompt is None or before > begin:
            return begin
        common = _count_common(prompt, whole[before : before + len(prompt)])
        return before + common if common >= least else begin

    def _render_after(self, turn: int, *, add_generation_prompt: bool = False) -> str | None:
        """Return what follows the text of a turn that is the last one; None if it is not there."""
        turns = [*self._messages[:turn], _mark(self._messages[turn], turn)]
        try:
            text = self._template.render(turns, add_generation_prompt=add_generation_prompt)
        except UnusableDocument:
            return None
        _, mark, tail = text.partition(f"{_MARK}{turn:06d}")
        return tail if mark else None


def _mark(message: Message, turn: int) -> Message:
    """Return a turn with a mark after its text, before white space that a template may strip."""
    size = len(message.content.rstrip())
    marked = f"{message.content[:size]}{_MARK}{turn:06d}{message.content[size:]}"
    return replace(message, content=marked)


def _list_forms(content: str, *, is_earlier: bool) -> Iterator[tuple[list[str], bool]]:
    """Yield the parts of a text in the forms in which it may be rendered, the usual first.

    And whether the form lacks its reasoning, which only an answer ``is_earlier`` may.
    """
    text = content.strip()
    yield [text], False
    yield [json.dumps(text, ensure_ascii=False)[1:-1]], False
    if _REASONING_END in text:
        parts = [part.strip() for part in _REASONING_TAGS.split(text)]
        yield [part for part in parts if part], False
        if is_earlier:
            yield [text.split(_REASONING_END)[-1].strip()], True


def _find_end(whole: str, parts: Sequence[str], lower: int, upper: int) -> int | None:
    """Return the end of parts that follow each other between two places; None if one is missing."""
    for part in parts:
        start = whole.find(part, lower, upper)
        if start < 0:
            return None
        lower = start + len(part)
    return lower


def _describe_dropped(messages: Sequence[Message], dropped: Sequence[int], whole: str) -> str:
    shown = []
    for turn in dropped[:_NUM_PARTS_SHOWN]:
        _, tag, answer = messages[turn].content.rpartition(_REASONING_END)
        part = "reasoning" if tag and answer.strip() and answer.strip() in whole else "text"
        role = list_names([messages[turn].role])
        shown.append(f"the {part} of message {turn + 1} ('{role}')")
    if len(dropped) > len(shown):
        shown.append(f"{len(dropped) - len(shown)} more")
    return (
        f"of which the chat template leaves out or changes {' and '.join(shown)}, so that it would "
        "not be trained or audited (take a tokenizer whose template renders it, correct its "
        "chat_template.jinja, or remove it from the documents)"
    )


def _count_common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts (characters)."""
    if other.startswith(one):
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
