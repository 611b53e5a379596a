"""Turns the values of one row into a document, or says why it is none.

`instructions.py` renders rows of alpaca and sharegpt; the other formats are read here. Texts are
taken as they are: nothing is stripped, and nothing is left out without a word.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memguard.data.formats import Layout

Format = Literal["text", "messages", "prompt_completion"]
_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text, conversation, or prompt with completion; only the fields of its format are set.

    Rows of alpaca become a prompt with a completion, or a conversation; those of sharegpt a
    conversation.
    """

    id: str
    source: str
    """Short name of its source."""
    has_own_id: bool = False
    """Whether the user's column `id` gave the id; else it is made of file name and row number."""
    format: Format
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    prompt: str | tuple[Message, ...] | None = None
    completion: str | tuple[Message, ...] | None = None
    """Has the same type as `prompt`."""
    input_ids: "array[int] | None" = None
    """Token ids that replace `text` in format text; the tokenizer adds nothing to them."""


class UnusableRow(Exception):
    """A row is invalid; the message is the reason, by which rows are counted."""


def read_name(value: Any, column: str) -> str | None:
    """Return an id or a source; None if the cell is empty.

    Raises:
        UnusableRow: it is neither a string nor a number.
    """
    if value is None or value == "":
        return None
    if isinstance(value, (dict, list, bytes, bool)):
        raise UnusableRow(f"whose '{column}' is neither a string nor a number")
    return _check_unicode(str(value), column)


def read_plain_row(
    values: Sequence[Any], layout: Layout, named: Mapping[str, Any]
) -> Document | None:
    """Return the document of a row that is no instruction; None if it has no text to train on.

    Args:
        values: of the columns of ``layout``, in their order.
        layout: how the rows are read.
        named: id and source.

    Raises:
        UnusableRow: a value has a wrong type, or something that would be lost.
    """
    cells = dict(zip(layout.columns, values, strict=True))
    columns = layout.columns
    match layout.format:
        case "input_ids":
            ids = _read_ids(cells["input_ids"], columns["input_ids"])
            return Document(**named, format="text", input_ids=ids) if ids else None
        case "text":
            text = read_text(cells["text"], columns["text"])
            return Document(**named, format="text", text=text) if text.strip() else None
        case "messages":
            messages = _read_messages(cells["messages"], columns["messages"], layout)
            return make_conversation(messages, named)
        case "prompt_completion":
            prompt = _read_either(cells["prompt"], columns["prompt"], layout)
            completion = _read_either(cells["completion"], columns["completion"], layout)
            return _make_pair(prompt, completion, named)
        case _:
            raise AssertionError(f"instructions.py reads {layout.format}")


def read_text(value: Any, column: str) -> str:
    """Return the text of a cell; null is empty.

    Raises:
        UnusableRow: it is not a string, or not Unicode.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UnusableRow(f"whose '{column}' is not a string")
    return _check_unicode(value, column)


def _read_either(value: Any, column: str, layout: Layout) -> str | tuple[Message, ...]:
    """Read a prompt or a completion: a string, or a list of messages."""
    if isinstance(value, str):
        return _check_unicode(value, column)
    if value is None or isinstance(value, list):
        return _read_messages(value, column, layout)
    raise UnusableRow(f"whose '{column}' is not a string or messages")


def _read_messages(value: Any, column: str, layout: Layout) -> tuple[Message, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise UnusableRow(f"whose '{column}' is not a list of messages")
    return tuple(_read_message(entry, column, layout) for entry in value)


def _read_message(entry: Any, column: str, layout: Layout) -> Message:
    if not isinstance(entry, dict):
        raise UnusableRow(f"whose '{column}' holds something other than {{role, content}}")
    role, content = entry.get("role"), entry.get("content")
    if role is None and content is None and {"from", "value"} <= entry.keys():
        way = layout.write(format="sharegpt", columns={"conversations": column})
        raise UnusableRow(
            f"whose '{column}' has from and value in place of role and content ({way})"
        )
    if not isinstance(role, str) or not isinstance(content, str):
        raise UnusableRow(f"whose '{column}' has a role or content that is not a string")
    others = sorted(key for key, value in entry.items() if value is not None)
    if others != ["content", "role"]:
        # Dropping e.g. tool calls would train on a different conversation than the user's.
        raise UnusableRow(f"whose '{column}' have more than role and content")
    return Message(role=_check_unicode(role, column), content=_check_unicode(content, column))


def _read_ids(value: Any, column: str) -> "array[int]":
    if value is None:
        return array("i")
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise UnusableRow(f"whose '{column}' is not a list of whole numbers")
    if value and min(value) < 0:
        raise UnusableRow(f"whose '{column}' holds a number below 0, which is no token id")
    if value and max(value) > _LARGEST_ID:
        raise UnusableRow(f"whose '{column}' holds a number above {_LARGEST_ID}")
    return array("i", value)


def _check_unicode(text: str, column: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UnusableRow(f"whose '{column}' is not Unicode (half a surrogate pair)") from None
    return text


def make_conversation(messages: tuple[Message, ...], named: Mapping[str, Any]) -> Document | None:
    """Return a conversation as a document; None if no turn has text."""
    if not any(message.content.strip() for message in messages):
        return None
    return Document(**named, format="messages", messages=messages)


def _make_pair(
    prompt: str | tuple[Message, ...],
    completion: str | tuple[Message, ...],
    named: Mapping[str, Any],
) -> Document | None:
    if isinstance(completion, str):
        prompt, text = prompt or "", completion
    else:
        text = "".join(turn.content for turn in completion)
    if not text.strip():
        return None
    if isinstance(prompt, str) != isinstance(completion, str):
        raise UnusableRow("where only one of 'prompt' and 'completion' is a string")
    if not prompt and not isinstance(prompt, str):
        raise UnusableRow("whose 'prompt' has no message")
    return Document(**named, format="prompt_completion", prompt=prompt, completion=completion)
