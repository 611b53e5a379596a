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
from collections.abc import Collection, Iterator, Sequence
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
    others: Sequence[tuple[int, int]]
    """Where the texts of other turns than the assistant's stand."""
    lacks_reasoning: bool
    """The reasoning of an answer before the last one is left out."""


class ChatTemplate:
    """A tokenizer's chat template on a day."""

    def __init__(self, tokenizer: Any, day: date) -> None:
        """Write ``day`` in place of today."""
        self.tokenizer, text = tokenizer, tokenizer.get_chat_template()
        self.text = _TODAY.sub(lambda call: json.dumps(day.strftime(call[2])), text)

    def render(self, messages: Sequence[Message], **how: bool) -> tuple[str, Any]:
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


def render_turns(
    messages: Sequence[Message], template: ChatTemplate, num_prompt: int | None = None
) -> Rendered:
    """Render a conversation; its assistant turns are supervised, or all after a prompt of turns.

    Raises:
        UnusableDocument: the template rejects the turns, leaves out text of one, or renders an
            answer so that it cannot be located.
    """
    is_marked = num_prompt is None and _GENERATION_MARK.search(template.text) is not None
    whole, generated = template.render(messages, return_assistant_tokens_mask=is_marked)
    turns = _Turns(messages, whole, template)
    if num_prompt is not None:
        spans = [Span(begin=turns.find_begin(num_prompt), end=len(whole))]
    elif is_marked:
        spans = [Span(begin=begin, end=end) for begin, end in generated]
    else:
        spans = [turns.find_answer(turn) for turn in turns.answers]
    others = [span for turn, span in enumerate(turns.texts) if turn not in turns.answers]
    return Rendered(whole, spans, others, turns.lacks_reasoning)


class _Turns:
    """Positions of the text of each turn in a rendered conversation."""

    def __init__(self, messages: Sequence[Message], whole: str, template: ChatTemplate) -> None:
        """Find the text of each turn.

        Raises:
            UnusableDocument: one of them is not there.
        """
        self._messages, self._whole, self._template = messages, whole, template
        self._tails: dict[tuple[str, str, bool], str | None] = {}
        self.answers = {turn for turn, own in enumerate(messages) if own.role == "assistant"}
        self.texts: list[tuple[int, int]] = []
        self.lacks_reasoning = False
        says = {turn for turn, message in enumerate(messages) if message.content.strip()}
        marked = self._mark(range(len(messages)))
        # Without a text it takes the turns as they are, and so reads what they say.
        dropped = says - {int(turn) for turn in _MARKS.findall(marked)} if marked else set()
        # A template may look at the texts: then only the answers have marks.
        self._ranges = self._locate(marked) or self._locate(self._mark(self.answers & says))
        position, last = 0, max(self.answers, default=-1)
        for turn, message in enumerate(messages):
            lower, upper = self._ranges.get(turn, (position, len(whole)))
            is_answer = turn in self.answers
            for parts, is_cut in _list_forms(message.content, is_earlier=is_answer and turn < last):
                end = _find_end(whole, parts, lower, upper)
                if end is None and not is_answer:
                    end = _find_end(whole, parts, 0, upper)  # Templates move the system turn.
                if end is not None:
                    self.lacks_reasoning |= is_cut
                    position = upper if turn in self._ranges else end
                    begin = whole.rfind(parts[0], 0, position)
                    space = message.content[: -len(message.content.lstrip())]
                    begin -= len(space) if whole.endswith(space, 0, begin) else 0
                    self.texts.append((begin, position))
                    break
            else:
                dropped.add(turn)
                self.texts.append((position, position))
        if dropped:
            raise UnusableDocument(_describe_dropped(messages, sorted(dropped), whole))

    def _mark(self, chosen: Collection[int], end: int | None = None, **how: bool) -> str:
        """Render the turns before ``end`` with marks; return "" if the template rejects them."""
        marked = list(self._messages[:end])
        for turn in chosen:
            # Before white space at the end, which a template may strip.
            text = marked[turn].content.rstrip()
            content = f"{text}{_MARK}{turn:06d}{marked[turn].content[len(text) :]}"
            marked[turn] = replace(marked[turn], content=content)
        try:
            return self._template.render(marked, **how)[0]
        except UnusableDocument:
            return ""

    def _locate(self, marked: str) -> dict[int, tuple[int, int]]:
        """Return the end of each marked text, after that of the text before it.

        None of them if marks change more than themselves, so that the places are not certain.
        """
        pieces = _MARKS.split(marked)
        if "".join(pieces[::2]) != self._whole:
            return {}
        ends = accumulate(map(len, pieces[:-1:2]), initial=0)
        return dict(zip(map(int, pieces[1::2]), pairwise(ends), strict=True))

    def find_answer(self, turn: int) -> Span:
        """Return the character range of an answer, without its header."""
        end = self.texts[turn][1]
        if turn not in self._ranges:
            if self._messages[turn].content.strip():
                raise UnusableDocument(_CHANGES)
            return Span(begin=end, end=end)
        begin = min(self.find_begin(turn), end)
        if turn == len(self._messages) - 1:
            return Span(begin=begin, end=len(self._whole))
        closing = self._find_tail(turn)
        if closing is None or not self._whole[end : self.texts[turn + 1][0]].startswith(closing):
            # A template may close the last turn differently.
            return Span(begin=begin, end=end, is_whole_turn=False)
        return Span(begin=begin, end=end + len(closing))

    def find_begin(self, turn: int) -> int:
        """Return the end of the generation prompt before a turn; without one, that of its header.

        The assistant's own turn has none after it, and the first turn none before it.
        """
        begin, before = self.texts[turn][0], self.texts[turn - 1][1]
        wants_answer = turn - 1 not in self.answers
        prompt = self._find_tail(turn - 1, add_generation_prompt=wants_answer) if turn else None
        if prompt is None or before > begin:
            return begin
        # The prompt may open a reasoning block that the turn lacks; text before it must not differ.
        # Where the place of the turn before is not certain, nothing may.
        plain = (self._find_tail(turn - 1) or "") if turn - 1 in self._ranges else prompt
        common = _count_common(prompt, self._whole[before : before + len(prompt)])
        return before + common if common >= _count_common(prompt, plain) else begin

    def _find_tail(self, turn: int, *, add_generation_prompt: bool = False) -> str | None:
        """Return what follows the text of a turn that is the last one; None if it is not there."""
        gap = self._whole[self.texts[turn][1] : self.texts[turn + 1][0]]
        key = (self._messages[turn].role, gap, add_generation_prompt)
        if key not in self._tails:
            text = self._mark([turn], turn + 1, add_generation_prompt=add_generation_prompt)
            _, mark, tail = text.partition(f"{_MARK}{turn:06d}")
            self._tails[key] = tail if mark else None
        return self._tails[key]


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
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
