"""Writes how to describe a table, as settings, options or arguments, and finds the nearest ways.

settings    data.format=alpaca data.columns.instruction=question
options     --format '{"format": "alpaca", "columns": {"instruction": "question"}}'
arguments   format={'format': 'alpaca', 'columns': {'instruction': 'question'}}
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from memguard.config import ColumnsConfig
from memguard.config.formats import FORMAT_COLUMNS, FormatName

Style = Literal["settings", "options", "arguments"]

_NAME = re.compile(r"(?=.{1,40}$)[\w.-]+( [\w.-]+){0,2}")
"""Names that messages quote. The first row of a CSV file without a header is read as the header,
and the text in it must not be quoted."""
_MOST_NAMES = 20
_NUM_WAYS = 3
_UNKNOWN = "COLUMN"
_QUESTION = ("question", "query", "prompt", "instruction", "problem", "task")
_ANSWER = ("answer", "response", "output", "completion", "solution", "target", "reply", "chosen")
_TURNS = ("conversations", "conversation", "messages", "dialogue", "dialog", "chat", "turns")
_USUAL: Mapping[str, Sequence[str]] = {
    "text": ("content", "body", "document", "raw_content", "article", "code", "story"),
    "prompt": (*_QUESTION, "input", "source"),
    "completion": _ANSWER,
    "instruction": _QUESTION,
    "input": ("context",),
    "output": _ANSWER,
    "messages": _TURNS,
    "conversations": _TURNS,
}
"""Names of columns in published datasets, the most common first."""
_ORDER: tuple[FormatName, ...] = (*("prompt_completion", "alpaca", "text", "messages", "sharegpt"),)


def choose_style(setting: str) -> Style:
    """Return the style of what a user wrote, by how the documents are named in errors."""
    if setting.startswith("--"):
        return "options"
    return "settings" if setting.partition(".")[0] == "data" else "arguments"


def write_way(
    style: Style,
    *,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    template: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> str:
    """Write settings of a format so that they can be copied.

    Args:
        style: of the command or call that the user wrote.
        format: value of the setting ``format``; None leaves it out, as for the others.
        columns: usual name -> column of the file.
        template: value of the setting ``template``.
        tags: name of the setting in ``tags`` -> tag.
    """
    values: dict[str, Any] = {"format": format, "template": template}
    values |= {"columns": dict(columns or {}), "tags": dict(tags or {})}
    given = {name: value for name, value in values.items() if value}
    if style == "settings":
        pairs = [
            (f"{name}.{key}" if key else name, one)
            for name, value in given.items()
            for key, one in (value.items() if isinstance(value, dict) else [("", value)])
        ]
        return " ".join(shlex.quote(f"data.{name}={value}") for name, value in pairs)
    whole = format if given == {"format": format} else given
    if style == "arguments":
        return f"format={whole!r}"
    return f"--format {whole if whole is format else shlex.quote(json.dumps(whole))}"


def list_names(names: Sequence[str]) -> str:
    """List names of columns, roles or tags for a message; of a long one only its length."""
    shown = [
        name if _NAME.fullmatch(name) else f"({len(name)} characters)"
        for name in names[:_MOST_NAMES]
    ]
    return ", ".join(shown) + (", ..." if len(names) > _MOST_NAMES else "")


def suggest_ways(
    columns: Sequence[str],
    given: ColumnsConfig,
    style: Style,
    *,
    format: FormatName | None = None,
) -> str:
    """Return the three nearest ways to describe a table, separated by semicolons.

    The formats whose columns have a usual name in the table come first.

    Args:
        columns: of the table.
        given: columns that the user named; kept where the table has them.
        style: how the ways are written.
        format: the format that the user chose, which comes first; None: not chosen.
    """
    ranked = []
    for name in _ORDER:
        named, num_guessed = _match(name, columns, given)
        ranked.append((name != format, num_guessed, name, named))
    ranked.sort(key=lambda way: way[:2])
    ways = [
        write_way(
            style, format=name, columns={key: value for key, value in named.items() if key != value}
        )
        for _, _, name, named in ranked[:_NUM_WAYS]
    ]
    return "; ".join(ways)


def _match(
    format: FormatName, columns: Sequence[str], given: ColumnsConfig
) -> tuple[dict[str, str], int]:
    """Choose a column for each thing of a format; also count those chosen without a reason."""
    free = [name for name in columns if _NAME.fullmatch(name) and name not in ("id", "source")]
    by_lower = {name.lower(): name for name in reversed(free)}
    known = FORMAT_COLUMNS[format]
    chosen: dict[str, str] = {}
    num_guessed = 0
    for thing in known.all:
        names = (given.given.get(thing, thing), thing, *_USUAL.get(thing, ()))
        usual = [by_lower[name.lower()] for name in names if name.lower() in by_lower]
        usual = [name for name in usual if name not in chosen.values()]
        if usual:
            chosen[thing] = usual[0]
        elif thing in known.required:
            num_guessed += 1
            left = [name for name in free if name not in chosen.values()]
            chosen[thing] = left[0] if left else _UNKNOWN
            num_guessed += not left
    # Turns are a list, which few columns hold: other ways are likelier.
    return chosen, num_guessed + (num_guessed > 0 and format in ("messages", "sharegpt"))
