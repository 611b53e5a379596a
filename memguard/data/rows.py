"""Turns the values of one row into a document, or says why it is none.

    alpaca, stanford   prompt = the published text with instruction and input; completion = output
    alpaca, chat       system; user, assistant of `history`; user = instruction, newline, input;
                       assistant = output: all assistant turns are trained, as LLaMA-Factory does
    sharegpt           one message per turn; human -> user, gpt -> assistant, observation -> tool;
                       a function_call is a turn of the assistant, with its text as it is

Texts are taken as they are: nothing is stripped, and nothing is left out without a word. The prompt
of alpaca is that of Stanford's train.py (tatsu-lab/stanford_alpaca), which ends without a newline.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memguard.data.formats import Layout, list_names

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
    """Return an id or a source; None if the cell is empty. Whole numbers have no decimal point.

    Raises:
        UnusableRow: it is neither a string nor a number.
    """
    if value is None or value == "" or value != value:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas makes floats of whole numbers with empty cells
    if isinstance(value, (dict, list, bytes, bool)):
        raise UnusableRow(f"whose '{column}' is neither a string nor a number")
    return _check_unicode(str(value), column)


def read_row(values: Sequence[Any], layout: Layout, named: Mapping[str, Any]) -> Document | None:
    """Return the document of a row; None if it has no text to train on.

    ``values`` are of the layout's columns, in their order; ``named`` has id and source.

    Raises:
        UnusableRow: a value has a wrong type, an unknown role, or something that would be lost or
            has no place in the template.
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
        case "alpaca":
            return _read_alpaca(cells, layout, named)
        case "sharegpt":
            return make_conversation(_read_sharegpt(cells, layout), named)


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
        parts = " (parts are not read)" * isinstance(content, list)
        raise UnusableRow(f"whose '{column}' has a role or content that is not a string{parts}")
    # Dropping e.g. tool calls would train on a different conversation than the user's.
    others = [
        key for key, value in entry.items() if key not in ("role", "content") and _holds(value)
    ]
    if others:
        raise UnusableRow(f"whose '{column}' have more than role and content: {list_names(others)}")
    return Message(role=_check_unicode(role, column), content=_check_unicode(content, column))


def _holds(value: Any) -> bool:
    """Return whether a cell has a content: formats fill what a row lacks with empty values."""
    return value is not None and value not in ("", [], {})


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


_PREAMBLE = "Below is an instruction that describes a task"
_WITH_INPUT = ", paired with an input that provides further context"
_TASK = ". Write a response that appropriately completes the request.\n\n### Instruction:\n"
_INPUT = "\n\n### Input:\n"
_RESPONSE = "\n\n### Response:"


def strip_stanford(prompt: str) -> str:
    """Return instruction and input of Stanford's prompt; any other text unchanged.

    All prompts share the text around them, which makes no two documents near-duplicates.
    """
    has_input = prompt.startswith(_PREAMBLE + _WITH_INPUT)
    start = _PREAMBLE + _WITH_INPUT * has_input + _TASK
    task = prompt.removesuffix("\n")[len(start) :]
    if not prompt.startswith(start) or not task.endswith(_RESPONSE):
        return prompt
    task = task.removesuffix(_RESPONSE)
    instruction, mark, input = task.partition(_INPUT)
    if not has_input:
        return task
    return "\n".join(part for part in (instruction, input) if part) if mark else prompt


def _read_alpaca(
    cells: Mapping[str, Any], layout: Layout, named: Mapping[str, Any]
) -> Document | None:
    texts = {
        name: read_text(cells.get(name), layout.columns[name])
        for name in ("instruction", "input", "system", "output")
        if name in layout.columns
    }
    history = _read_history(cells.get("history"), layout)
    instruction, input = texts["instruction"], texts.get("input", "")
    if not texts["output"].strip():
        return None
    if layout.template == "stanford":
        for name, given in {"system": texts.get("system"), "history": history}.items():
            if given:
                raise UnusableRow(
                    f"whose '{layout.columns[name]}' has no place in the template stanford "
                    f"({layout.write(template='chat')}, or remove the column)"
                )
        prompt = f"{_PREAMBLE}{_WITH_INPUT if input else ''}{_TASK}{instruction}"
        prompt += f"{_INPUT}{input}{_RESPONSE}" if input else _RESPONSE
        return _make_pair(prompt, texts["output"], named)
    turns = [("system", texts["system"])] if texts.get("system") else []
    for question, answer in history:
        turns += [("user", question), ("assistant", answer)]
    # LLaMA-Factory leaves out the line break if one of the two is empty.
    turns += [
        ("user", "\n".join(part for part in (instruction, input) if part)),
        ("assistant", texts["output"]),
    ]
    messages = tuple(Message(role=role, content=content) for role, content in turns)
    return Document(**named, format="messages", messages=messages)


def _read_history(value: Any, layout: Layout) -> list[tuple[str, str]]:
    """Read a list of pairs of a user's turn and an answer."""
    if value is None or value == "":
        return []
    column = layout.columns["history"]
    is_list = isinstance(value, list)
    if not is_list or any(not isinstance(pair, list) or len(pair) != 2 for pair in value):
        raise UnusableRow(f"whose '{column}' is not a list of pairs [user, assistant]")
    return [(read_text(user, column), read_text(answer, column)) for user, answer in value]


def _read_sharegpt(cells: Mapping[str, Any], layout: Layout) -> tuple[Message, ...]:
    """Return the turns of a row of sharegpt, after that of its column ``system``."""
    column = layout.columns["conversations"]
    turns = cells["conversations"]
    if turns is None:
        return ()
    if not isinstance(turns, list):
        raise UnusableRow(f"whose '{column}' is not a list of turns")
    messages = tuple(_read_turn(turn, column, layout) for turn in turns)
    if "system" not in layout.columns:
        return messages
    system = read_text(cells["system"], layout.columns["system"])
    if not system or not messages:
        return messages
    if messages[0].role == "system":
        if messages[0].content != system:
            raise UnusableRow(
                f"whose '{layout.columns['system']}' differs from the system turn in '{column}' "
                "(keep one of them)"
            )
        return messages
    return (Message(role="system", content=system), *messages)


def _read_turn(turn: Any, column: str, layout: Layout) -> Message:
    tags = layout.tags
    pair = f"{tags.role} and {tags.content}"
    if not isinstance(turn, dict):
        raise UnusableRow(
            f"whose '{column}' holds something other than {{{tags.role}, {tags.content}}}"
        )
    tag, content = turn.get(tags.role), turn.get(tags.content)
    if tag is None and content is None and {"role", "content"} <= turn.keys():
        way = layout.write(format="messages", columns={"messages": column})
        raise UnusableRow(f"whose '{column}' has role and content in place of {pair} ({way})")
    if not isinstance(tag, str) or not isinstance(content, str):
        raise UnusableRow(f"whose '{column}' has a {tags.role} or {tags.content} that is no string")
    role = tags.roles.get(tag)
    if role is None:
        shown = list_names([tag])
        way = layout.write(tags={"user": tag if shown == tag else "TAG"})
        raise UnusableRow(
            f"whose '{column}' has the unknown role {shown!r} (known: {', '.join(tags.roles)}; "
            f"name it, e.g. {way})"
        )
    # Weights 0 and 1 say what is trained here anyway: the assistant's turns.
    weight = int(role == "assistant")
    others = [
        key
        for key, value in turn.items()
        if key not in (tags.role, tags.content)
        and _holds(value)
        and not (key == "weight" and value == weight)
    ]
    if others:
        raise UnusableRow(f"whose '{column}' has turns with more than {pair}: {list_names(others)}")
    return Message(role=role, content=read_text(content, column))
