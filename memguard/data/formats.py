"""Decides how the rows of a table are read: its format, columns and template.

    data.format names one   it is taken; all columns that it needs must be there
    auto                    a format with a column that the user named; else of those that fit:
                            messages, prompt_completion, text; else alpaca or sharegpt
    refused                 token ids beside another format; alpaca beside sharegpt; none fits

Text files, arrays and lists of texts have one format only. Everything that reads documents calls
`choose_layout`: runs, audits of other models, the Python interface and the callback. A refusal
names the nearest ways to describe the table, in the style of what the user wrote:

    settings    data.format=alpaca data.columns.instruction=question data.columns.output=answer
    options     --format alpaca --columns instruction=question,output=answer
    arguments   format='alpaca', columns={'instruction': 'question', 'output': 'answer'}
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memguard.config import ColumnsConfig, FormatConfig, TagsConfig
from memguard.config.formats import FORMAT_COLUMNS, FormatName, TemplateName
from memguard.data.table_files import IDS_COLUMN, Table
from memguard.errors import DataError

Style = Literal["settings", "options", "arguments"]
_FIRST: tuple[FormatName, ...] = ("messages", "prompt_completion", "text")
"""Formats in the order in which a table that fits several is read."""
_BESIDE_IDS = ("text", "messages", "prompt")
"""Columns beside token ids that leave it open which is the document."""
_NOT_TEXT = ("id", "source")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the rows of one table are read."""

    format: FormatName
    columns: Mapping[str, str]
    """Column of the table, by its usual name; only columns that the table has."""
    template: TemplateName | None = None
    """Of alpaca."""
    tags: TagsConfig = field(default_factory=TagsConfig)
    style: Style = "settings"
    """How errors write settings."""
    also: tuple[FormatName, ...] = ()
    """Formats that the table fits too."""
    unread: tuple[str, ...] = ()
    """Columns that are not read."""
    unused: str = ""
    """Setting of another format that the user gave."""

    def describe(self) -> str:
        """Return how the rows are read, as the end of a sentence: ``alpaca: columns ...``."""
        shown = {name: list_names([column]) for name, column in self.columns.items()}
        names = [name if name == column else f"{name}={column}" for name, column in shown.items()]
        text = f"{self.format}: column{'s' if len(names) > 1 else ''} {', '.join(names)}"
        if self.template is not None:
            text += f"; template {self.template}"
        if self.also:
            ways = (self.write(format=name) for name in self.also)
            text += f"; it also fits {', '.join(self.also)} ({' or '.join(ways)})"
        unread = [name for name in self.unread if not self.also or name == "tools"]
        if unread:
            text += f"; not read: {list_names(unread)}"
        if "tools" in unread and self.format not in ("text", "input_ids"):
            text += " (no template gets tools)"
        if self.unused:
            text += f"; '{self.unused}' is not used: it is for another format"
        return text

    def write(self, **settings: Any) -> str:
        """Write settings of a format so that they can be copied; see `write_way`."""
        return write_way(self.style, **settings)


def choose_layout(
    table: Table,
    form: FormatConfig,
    *,
    setting: str,
    has_chat_template: Callable[[], bool],
    style: Style | None = None,
) -> Layout:
    """Decide how a table with at least one column is read.

    ``setting`` is the name of the documents in errors, e.g. ``"data.train"``. Errors write settings
    in ``style``; None: as ``setting`` is written. ``has_chat_template`` is called for alpaca
    without a template in the settings.

    Raises:
        DataError: the table fits no format, or two; it lacks a column that was named.
    """
    if style is None:  # By how the documents are named in errors.
        named: Style = "settings" if setting.partition(".")[0] == "data" else "arguments"
        style = "options" if setting.startswith("--") else named
    if table.format is not None:
        (column,) = FORMAT_COLUMNS[table.format].required
        return Layout(format=table.format, columns={column: column}, style=style)
    place = f"'{setting}': '{table.origin}'"
    fitting = [name for name in FORMAT_COLUMNS if _fits(name, table.columns, form)]
    also: list[FormatName] = []
    if form.format == "auto":
        taken = _choose(table, form, fitting, place, style)
        also = [name for name in fitting if name != taken and not _is_named(taken, table, form)]
    elif form.format in fitting:
        taken = form.format
    else:
        raise _explain_no_fit(table, form, place, style)
    assigned = form.columns.assign(taken) or {}
    columns = {name: column for name, column in assigned.items() if column in table.columns}
    if not columns.keys() >= form.columns.given.keys() & set(FORMAT_COLUMNS[taken].all):
        raise _explain_no_fit(table, form, place, style)
    template = form.template
    if taken == "alpaca" and template is None:
        template = "chat" if has_chat_template() else "stanford"
    return Layout(
        format=taken,
        columns=columns,
        template=template if taken == "alpaca" else None,
        tags=form.tags,
        style=style,
        also=tuple(also),
        unread=tuple(
            name for name in table.columns if name not in columns.values() and name not in _NOT_TEXT
        ),
        unused="tags"
        if taken != "sharegpt" and form.tags != TagsConfig()
        else "template" * (taken != "alpaca" and form.template is not None),
    )


def _column(name: str, form: FormatConfig) -> str:
    return form.columns.given.get(name, name)


def _fits(name: FormatName, columns: Sequence[str], form: FormatConfig) -> bool:
    assigned = form.columns.assign(name)
    required = FORMAT_COLUMNS[name].required
    return assigned is not None and all(assigned[thing] in columns for thing in required)


def _is_named(name: FormatName, table: Table, form: FormatConfig) -> bool:
    """Return whether the user named a column of a format that the table has."""
    given = form.columns.given
    return any(given.get(thing) in table.columns for thing in FORMAT_COLUMNS[name].all)


def _choose(
    table: Table, form: FormatConfig, fitting: Sequence[FormatName], place: str, style: Style
) -> FormatName:
    """Choose one of the formats that fit a table."""
    named = [name for name in fitting if _is_named(name, table, form)]
    pool = named or fitting
    if "input_ids" in pool and len(named) != 1:
        beside = [_column(name, form) for name in _BESIDE_IDS]
        others = [name for name in beside if name in table.columns]
        if others:
            formats = [name for name in pool if name in _FIRST][:1]
            ways = [write_way(style, format=name) for name in (*formats, "input_ids")]
            raise DataError(
                f"{place} has the columns '{others[0]}' and '{_column(IDS_COLUMN, form)}': either "
                f"could be the document. Remove one, or set {' or '.join(ways)}."
            )
        return "input_ids"
    by_order = [name for name in _FIRST if name in pool]
    if len(pool) > 1 and (len(named) > 1 or not by_order):
        one, other = pool[:2]
        ways = [write_way(style, format=name) for name in (one, other)]
        raise DataError(
            f"{place} can be read in two ways: as {_describe_columns(one, form)}, or as "
            f"{_describe_columns(other, form)}. Set {' or '.join(ways)}."
        )
    if not pool:
        raise _explain_no_fit(table, form, place, style)
    return by_order[0] if by_order else pool[0]


def _describe_columns(name: FormatName, form: FormatConfig) -> str:
    columns = [list_names([_column(thing, form)]) for thing in FORMAT_COLUMNS[name].required]
    return f"{name} (column{'s' if len(columns) > 1 else ''} {', '.join(columns)})"


def _explain_no_fit(table: Table, form: FormatConfig, place: str, style: Style) -> DataError:
    """Return the error of a table without the columns of the format, or of any."""
    wanted = None if form.format == "auto" else form.format
    lacking = [column for column in form.columns.given.values() if column not in table.columns]
    if not lacking and wanted is not None:
        columns = (_column(name, form) for name in FORMAT_COLUMNS[wanted].required)
        lacking = [column for column in columns if column not in table.columns]
    of = "fits no format" if wanted is None else f"is not {wanted}"
    if lacking:
        of = f"needs the column '{lacking[0]}'" + ("" if wanted is None else f" to be {wanted}")
    # The format that the user chose comes first, then those whose columns have a usual name in the
    # table. Columns that the user named are kept where the table has them.
    quoted, ranked = _list_quotable(table, form), []
    for name in _ORDER[: 3 if table.may_lack_header else None]:  # CSV holds no lists of turns
        named, num_guessed = _match(name, quoted, form.columns)
        ranked.append((name != wanted, num_guessed, name, named))
    ranked.sort(key=lambda way: way[:2])
    ways = "; ".join(
        write_way(style, format=name, columns={k: v for k, v in named.items() if k != v})
        for _, _, name, named in ranked[:_NUM_WAYS]
    )
    num = len(table.columns)
    held = f"its columns are {list_names(table.columns)}"
    if not quoted:
        held = f"its {num} column{'s have' if num > 1 else ' has'} no usual name"
        if table.may_lack_header:
            held += ", which must be in the first line"
    return DataError(f"{place} {of}; {held}. The nearest ways to describe it: {ways}")


def _list_quotable(table: Table, form: FormatConfig) -> list[str]:
    """Return the columns that messages may quote.

    The first row of a CSV file without a header is read as the header: nothing of it is quoted if
    it has no name that is usual, or that the user gave.
    """
    names = [name for name in table.columns if _NAME.fullmatch(name)]
    usual = {*form.columns.given.values(), *_NOT_TEXT}.union(
        *_USUAL.values(), *(known.all for known in FORMAT_COLUMNS.values())
    )
    return names if not table.may_lack_header or usual & {*names, *map(str.lower, names)} else []


_NAME = re.compile(r"(?=.{1,40}$)[^\W\d][\w.-]*")
"""Names that messages quote: what is no single word may be a person's text."""
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


def write_way(
    style: Style,
    *,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    template: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> str:
    """Write settings of a format so that they can be copied; None leaves one out.

    ``columns`` are by usual name, ``tags`` by the name of the setting in ``tags``.
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


def _match(
    format: FormatName, columns: Sequence[str], given: ColumnsConfig
) -> tuple[dict[str, str], int]:
    """Choose a column for each thing of a format; also count those chosen without a reason."""
    free = [name for name in columns if name not in _NOT_TEXT]
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
