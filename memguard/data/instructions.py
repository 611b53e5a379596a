"""Renders rows of alpaca and sharegpt: the two formats in which most instructions are published.

    alpaca, stanford   prompt = the published text with instruction and input; completion = output
    alpaca, chat       system; user, assistant of `history`; user = instruction, newline, input;
                       assistant = output: all assistant turns are trained, as LLaMA-Factory does
    sharegpt           one message per turn; human -> user, gpt -> assistant, observation -> tool;
                       a function_call is a turn of the assistant, with its text as it is

The prompt is that of Stanford's train.py (tatsu-lab/stanford_alpaca), which ends without a newline.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from memguard.data.format_ways import list_names
from memguard.data.formats import Layout
from memguard.data.rows import Document, Message, UnusableRow, make_conversation, read_text

_PREAMBLE = "Below is an instruction that describes a task"
_WITH_INPUT = ", paired with an input that provides further context"
_TASK = ". Write a response that appropriately completes the request.\n\n### Instruction:\n"
_INPUT = "\n\n### Input:\n"
_RESPONSE = "\n\n### Response:"
_CHAT_ONLY = ("system", "history")


def render_stanford(instruction: str, input: str) -> str:
    """Return Stanford's prompt; another one if ``input`` is empty."""
    if not input:
        return f"{_PREAMBLE}{_TASK}{instruction}{_RESPONSE}"
    return f"{_PREAMBLE}{_WITH_INPUT}{_TASK}{instruction}{_INPUT}{input}{_RESPONSE}"


_STANFORD = re.compile(
    f"{_PREAMBLE}({_WITH_INPUT})?{re.escape(_TASK)}"
    f"(?P<instruction>.*?)(?(1){_INPUT}(?P<input>.*)){_RESPONSE}\n?",
    re.DOTALL,
)


def strip_stanford(prompt: str) -> str:
    """Return instruction and input of Stanford's prompt; any other text unchanged.

    All prompts share the text around them, which makes no two documents near-duplicates.
    """
    match = _STANFORD.fullmatch(prompt)
    if match is None:
        return prompt
    return "\n".join(part for part in match.group("instruction", "input") if part)


def read_instruction_row(
    values: Sequence[Any], layout: Layout, named: Mapping[str, Any]
) -> Document | None:
    """Return the document of a row; None if it has no text to train on.

    Args:
        values: of the columns of ``layout``, in their order.
        layout: how the rows are read: alpaca with its template, or sharegpt with its tags.
        named: id and source.

    Raises:
        UnusableRow: a value has a wrong type; an unknown role; something has no place in the
            template.
    """
    cells = dict(zip(layout.columns, values, strict=True))
    if layout.format == "alpaca":
        return _read_alpaca(cells, layout, named)
    return make_conversation(_read_sharegpt(cells, layout), named)


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
        present = {"system": texts.get("system"), "history": history}
        for name in _CHAT_ONLY:
            if present[name]:
                raise UnusableRow(
                    f"whose '{layout.columns[name]}' has no place in the template stanford "
                    f"({layout.write(template='chat')}, or remove the column)"
                )
        return Document(
            **named,
            format="prompt_completion",
            prompt=render_stanford(instruction, input),
            completion=texts["output"],
        )
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
        way = layout.write(tags={"user": shown})
        raise UnusableRow(
            f"whose '{column}' has the unknown role {shown!r} (known: {', '.join(tags.roles)}; "
            f"name it, e.g. {way})"
        )
    for key, value in turn.items():
        if value is None or key in (tags.role, tags.content):
            continue
        # Weights 0 and 1 say what is trained here anyway: the assistant's turns.
        if key == "weight" and value == int(role == "assistant"):
            continue
        raise UnusableRow(f"whose '{column}' has turns with more than {pair}")
    return Message(role=role, content=read_text(content, column))
