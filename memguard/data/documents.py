"""Documents from files, folders and hub ids, as one form.

Columns decide what a row is:

    messages               a conversation: list of {role, content}
    prompt, completion     two strings, or two lists of messages
    `data.text_column`     plain text
    input_ids              token ids in place of a text, used as they are
"""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memguard.config import DataConfig
from memguard.data.sources import IDS_COLUMN, Table, read_source
from memguard.errors import MAX_PATH, DataError, shorten

Format = Literal["text", "messages", "prompt_completion"]
_Kind = Literal["text", "messages", "prompt_completion", "input_ids"]
Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""
_LARGEST_ID = 2**31 - 1
_NUM_IDS_SHOWN, _NUM_COLUMNS_SHOWN = 5, 20
_COLUMN = re.compile(r"(?=.{1,40}$)[\w.-]+( [\w.-]+){0,2}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text, conversation, or prompt with its completion; the fields of its format are set."""

    id: str
    source: str
    """Short name of where it came from."""
    format: Format
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    prompt: str | tuple[Message, ...] | None = None
    completion: str | tuple[Message, ...] | None = None
    """Of the same kind as `prompt`."""
    input_ids: "array[int] | None" = None
    """Of format text, in its place: token ids, which no tokenizer adds to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedDocuments:
    """Documents in the order of their sources."""

    documents: list[Document]
    num_empty: int
    """Rows without text, left out."""


def load_documents(
    sources: Sequence[str],
    *,
    setting: str,
    text_column: str = "text",
    cache_dir: Path,
) -> LoadedDocuments:
    """Read all documents of all sources.

    A document's id is its column `id`, else the name of its file and its row; its source the column
    `source`, else the short name of what was named.

    Args:
        sources: files, folders, hub ids or `docstrings:PACKAGE[,PACKAGE]`; see `sources.py`.
        setting: what to call them in errors, e.g. ``"data.train"``.
        text_column: column that holds the text of plain documents.
        cache_dir: where derived sources are kept.

    Raises:
        DataError: a source is missing, unreadable or broken; there is no document; rows are not
            what their columns say; an id stands for two documents.
    """
    documents: list[Document] = []
    num_empty = 0
    unusable: dict[str, list[str]] = {}
    for source in sources:
        for table in read_source(
            source, setting=setting, text_column=text_column, cache_dir=cache_dir
        ):
            for document in _read_documents(table, text_column, setting, unusable):
                if document is None:
                    num_empty += 1
                else:
                    documents.append(document)
    if unusable:
        reasons = "; ".join(
            f"{len(ids)} row{'s' if len(ids) > 1 else ''} {reason} ({name_ids(ids)})"
            for reason, ids in unusable.items()
        )
        raise DataError(f"'{setting}' has {reasons}. Correct or remove them.")
    if not documents:
        rows = "row" if num_empty == 1 else "rows"
        skipped = f" but {num_empty} {rows} without text" if num_empty else ""
        raise DataError(
            f"'{setting}' holds no document{skipped}: {shorten(', '.join(sources), MAX_PATH)}."
        )
    _check_ids(documents, setting)
    return LoadedDocuments(documents=documents, num_empty=num_empty)


def load_settings(
    data: DataConfig, cache_dir: Path, say: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[str, LoadedDocuments]]:
    """Yield the documents of each setting that names any, with its name.

    Args:
        data: the settings.
        cache_dir: where derived sources are kept.
        say: called with what is read next.

    Raises:
        DataError: see `load_documents`.
    """
    for setting, sources in data.list_sources().items():
        if sources:
            say(f"documents: reading {shorten(', '.join(sources), MAX_PATH)}")
            loaded = load_documents(
                sources,
                setting=f"data.{setting}",
                text_column=data.text_column,
                cache_dir=cache_dir,
            )
            yield setting, loaded


def document_text(document: Document, decode: Decode | None = None) -> str:
    """Return all a document says, in order, without the marks of any template.

    Args:
        document: any.
        decode: makes text of token ids; without it they are words of digits, so that documents
            that share a run of ids share a run of words.
    """
    if document.input_ids is not None:
        return decode(document.input_ids) if decode else " ".join(map(str, document.input_ids))
    parts = (document.text, document.messages, document.prompt, document.completion)
    return "\n".join(
        part if isinstance(part, str) else "\n".join(message.content for message in part)
        for part in parts
        if part is not None
    )


def name_ids(ids: Sequence[str]) -> str:
    """Write the first five ids for an error, each on one line and cut at 60 characters."""
    shown = [ascii(name)[1:-1][:60] for name in ids[:_NUM_IDS_SHOWN]]
    return ", ".join(shown) + (", ..." if len(ids) > _NUM_IDS_SHOWN else "")


class _UnusableRow(Exception):
    """Says what is wrong, so that rows with the same fault can be counted."""


def _read_documents(
    table: Table, text_column: str, setting: str, unusable: dict[str, list[str]]
) -> Iterator[Document | None]:
    """Yield the table's documents, None for rows without text; collect ids of unusable rows."""
    if not table.columns:
        return
    kind, columns = _choose_columns(table, text_column, setting)
    extra = [name for name in ("id", "source") if name in table.columns and name not in columns]
    for row, values in enumerate(table.read([*columns, *extra])):
        others = dict(zip(extra, values[len(columns) :], strict=True))
        name, origin = f"{table.name}-{row:06d}", table.origin
        try:
            name = _read_name(others.get("id"), "id") or name
            origin = _read_name(others.get("source"), "source") or origin
            contents = [
                _read_content(value, column, kind)
                for column, value in zip(columns, values, strict=False)
            ]
            yield _build_document(name, origin, kind, contents)
        except _UnusableRow as fault:
            unusable.setdefault(str(fault), []).append(name)


def _choose_columns(table: Table, text_column: str, setting: str) -> tuple[_Kind, list[str]]:
    found = table.columns
    if IDS_COLUMN in found:
        others = [name for name in (text_column, "messages", "prompt") if name in found]
        if others and text_column != IDS_COLUMN:
            where = "--text-column" if setting.startswith("--") else "'data.text_column'"
            raise DataError(
                f"'{setting}': '{table.origin}' has the columns '{others[0]}' and '{IDS_COLUMN}': "
                f"either could be the document. Remove one, or set {where} to {IDS_COLUMN}."
            )
        return "input_ids", [IDS_COLUMN]
    # A text column that was named on purpose goes before what would be recognised.
    if text_column != "text" and text_column in found:
        return "text", [text_column]
    if "messages" in found:
        return "messages", ["messages"]
    if "prompt" in found and "completion" in found:
        return "prompt_completion", ["prompt", "completion"]
    if text_column in found:
        return "text", [text_column]
    # Of a CSV file without a header the first row is taken for one: do not quote that.
    names = [name if _COLUMN.fullmatch(name) else f"({len(name)} characters)" for name in found]
    listed = ", ".join(names[:_NUM_COLUMNS_SHOWN])
    listed += ", ..." if len(names) > _NUM_COLUMNS_SHOWN else ""
    where = "--text-column" if setting.startswith("--") else "'data.text_column'"
    raise DataError(
        f"'{setting}': '{table.origin}' needs the column '{text_column}', 'messages', 'prompt' "
        f"and 'completion', or '{IDS_COLUMN}'; its columns are {listed}. Name the one that holds "
        f"the text in {where}."
    )


def _read_name(value: Any, column: str) -> str | None:
    if value is None or value == "":
        return None
    if isinstance(value, (dict, list, bytes, bool)):
        raise _UnusableRow(f"whose '{column}' is neither a string nor a number")
    return _check_unicode(str(value), column)


def _read_content(value: Any, column: str, kind: _Kind) -> "str | tuple[Message, ...] | array[int]":
    """Check a cell; null reads as empty."""
    if kind == "input_ids":
        return _read_ids(value, column)
    if isinstance(value, str) and kind != "messages":
        return _check_unicode(value, column)
    if isinstance(value, list) and kind != "text":
        return tuple(_read_message(entry, column) for entry in value)
    if value is None:
        return "" if kind == "text" else ()
    wanted = {"text": "a string", "messages": "a list of messages"}
    raise _UnusableRow(f"whose '{column}' is not {wanted.get(kind, 'a string or messages')}")


def _read_ids(value: Any, column: str) -> "array[int]":
    if value is None:
        return array("i")
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise _UnusableRow(f"whose '{column}' is not a list of whole numbers")
    if value and min(value) < 0:
        raise _UnusableRow(f"whose '{column}' holds a number below 0, which is no token id")
    if value and max(value) > _LARGEST_ID:
        raise _UnusableRow(f"whose '{column}' holds a number above {_LARGEST_ID}")
    return array("i", value)


def _read_message(entry: Any, column: str) -> Message:
    if not isinstance(entry, dict):
        raise _UnusableRow(f"whose '{column}' holds something other than {{role, content}}")
    role, content = entry.get("role"), entry.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise _UnusableRow(f"whose '{column}' has a role or content that is not a string")
    others = sorted(key for key, value in entry.items() if value is not None)
    if others != ["content", "role"]:
        # Dropping tool calls and the like would train another conversation than the user has.
        raise _UnusableRow(f"whose '{column}' have more than role and content")
    return Message(role=_check_unicode(role, column), content=_check_unicode(content, column))


def _check_unicode(text: str, column: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _UnusableRow(f"whose '{column}' is not Unicode (half a surrogate pair)") from None
    return text


def _build_document(
    name: str,
    origin: str,
    kind: _Kind,
    contents: "Sequence[str | tuple[Message, ...] | array[int]]",
) -> Document | None:
    """Return a document, or None where there is nothing to train on."""
    last = contents[-1]
    if kind == "input_ids":
        assert isinstance(last, array), "checked when read"
        return Document(id=name, source=origin, format="text", input_ids=last) if last else None
    assert not isinstance(last, array), "of another kind"
    said = last if isinstance(last, str) else "".join(message.content for message in last)
    if not said.strip():
        return None
    if kind == "text":
        assert isinstance(last, str), "checked when read"
        return Document(id=name, source=origin, format=kind, text=last)
    if kind == "messages":
        assert isinstance(last, tuple), "checked when read"
        return Document(id=name, source=origin, format=kind, messages=last)
    prompt = contents[0]
    assert not isinstance(prompt, array), "of another kind"
    if not prompt and isinstance(last, str):
        prompt = ""
    if isinstance(prompt, str) != isinstance(last, str):
        raise _UnusableRow("where only one of 'prompt' and 'completion' is a string")
    if not prompt and not isinstance(prompt, str):
        raise _UnusableRow("whose 'prompt' has no message")
    return Document(id=name, source=origin, format=kind, prompt=prompt, completion=last)


def _check_ids(documents: Sequence[Document], setting: str) -> None:
    count = Counter(document.id for document in documents)
    twice = [name for name, number in count.items() if number > 1]
    if twice:
        raise DataError(
            f"'{setting}' has {len(twice)} ids that stand for more than one document "
            f"({name_ids(twice)}). Make the column 'id' unique, or remove it: without it ids are "
            "made of file name and row."
        )
