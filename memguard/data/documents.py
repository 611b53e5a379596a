"""Reads documents from files, folders and hub ids into one form.

The columns of a row decide its format:

    messages               a conversation: list of {role, content}
    prompt, completion     two strings, or two lists of messages
    `data.text_column`     plain text
    input_ids              token ids instead of text, used unchanged
"""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memguard.config import DataConfig
from memguard.data.sources import read_source
from memguard.data.tables import IDS_COLUMN, NamedFile, Table, wrap_dataset
from memguard.errors import MAX_PATH, DataError, shorten

Format = Literal["text", "messages", "prompt_completion"]
_Kind = Literal["text", "messages", "prompt_completion", "input_ids"]
Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""
_LARGEST_ID = 2**31 - 1
_NUM_IDS_SHOWN, _NUM_COLUMNS_SHOWN = 5, 20
MADE_ID = "id_was_made"
"""Column of files that memguard writes: whether the id was made of file name and row number."""
_COLUMN = re.compile(r"(?=.{1,40}$)[\w.-]+( [\w.-]+){0,2}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text, conversation, or prompt with completion; only the fields of its format are set."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedDocuments:
    """Documents in the order of their sources."""

    documents: list[Document]
    num_empty: int
    """Number of rows without text, which are left out."""


def load_documents(
    sources: Sequence[str | Table],
    *,
    setting: str,
    text_column: str = "text",
    cache_dir: Path,
) -> LoadedDocuments:
    """Read all documents of all sources.

    The id of a document is taken from the column `id`, else made of file name and row number. Its
    source is taken from the column `source`, else it is the short name of the given source.

    Args:
        sources: files, folders, hub ids or `docstrings:PACKAGE[,PACKAGE]`, see `sources.py`; or
            tables of documents in memory.
        setting: name of the documents in errors, e.g. ``"data.train"``.
        text_column: column that contains the text of plain documents.
        cache_dir: folder for derived sources.

    Raises:
        DataError: a source is missing, unreadable or invalid; there is no document; a row has
            values of the wrong type; two documents have the same id.
    """
    documents: list[Document] = []
    num_empty = 0
    unusable: dict[str, list[str]] = {}
    for source in sources:
        tables = (
            read_source(source, setting=setting, text_column=text_column, cache_dir=cache_dir)
            if isinstance(source, str)
            else (source,)
        )
        for table in tables:
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
        skipped = f", only {num_empty} {rows} without text" if num_empty else ""
        names = ", ".join(s if isinstance(s, str) else s.name for s in sources)
        raise DataError(f"'{setting}' has no documents{skipped}: {shorten(names, MAX_PATH)}.")
    _check_ids(documents, setting)
    return LoadedDocuments(documents=documents, num_empty=num_empty)


def make_table(documents: Any, *, name: str, text_column: str) -> Table:
    """Return documents in memory as a table.

    Args:
        documents: a sequence of texts, or a `datasets.Dataset` with the columns of a file.
        name: prefix of the ids of rows without an id, and name of the documents in errors.
        text_column: name of the column for a list of texts.

    Raises:
        DataError: another type, such as a `DatasetDict` or an `IterableDataset`.
    """
    kind = type(documents).__name__
    if kind == "Dataset" and hasattr(documents, "select_columns"):
        file = NamedFile(path=Path(name), name=name, shown=name)
        return wrap_dataset(documents, file=file, origin=name, setting=name)
    if isinstance(documents, Sequence) and all(isinstance(text, str) for text in documents):
        return _list_texts(tuple(documents), name, text_column)
    hint = {
        "DatasetDict": ": choose one of its splits",
        "IterableDataset": ": load it without streaming",
    }.get(kind, "")
    raise DataError(
        f"'{name}' must be paths, a list of texts or a datasets.Dataset; got {kind}{hint}"
    )


def _list_texts(texts: Sequence[str], name: str, text_column: str) -> Table:
    def read(columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        return ((text,) * len(columns) for text in texts)

    return Table(name=name, origin=name, columns=(text_column,), read=read)


def load_settings(
    data: DataConfig, cache_dir: Path, say: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[str, LoadedDocuments]]:
    """Yield the name and documents of each setting that names sources.

    Args:
        data: the settings.
        cache_dir: folder for derived sources.
        say: called with a message before each setting is read.

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
    """Return the text of a document, in order and without template markup.

    Args:
        document: of any format.
        decode: turns token ids into text; without it each id becomes a word of digits, so that
            documents that share a sequence of ids share a sequence of words.
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
    """Format the first five ids for an error message, each cut at 60 characters."""
    shown = [ascii(name)[1:-1][:60] for name in ids[:_NUM_IDS_SHOWN]]
    return ", ".join(shown) + (", ..." if len(ids) > _NUM_IDS_SHOWN else "")


class _UnusableRow(Exception):
    """A row is invalid; the message is the reason, by which rows are counted."""


def _read_documents(
    table: Table, text_column: str, setting: str, unusable: dict[str, list[str]]
) -> Iterator[Document | None]:
    """Yield the table's documents, None for rows without text; collect ids of invalid rows."""
    if not table.columns:
        return
    kind, columns = _choose_columns(table, text_column, setting)
    names = ("id", "source", MADE_ID)
    extra = [name for name in names if name in table.columns and name not in columns]
    for row, values in enumerate(table.read([*columns, *extra])):
        others = dict(zip(extra, values[len(columns) :], strict=True))
        name, origin = f"{table.name}-{row:06d}", table.origin
        try:
            own = _read_name(others.get("id"), "id")
            has_own_id = own is not None and not (table.has_made_ids or others.get(MADE_ID))
            name = own or name
            origin = _read_name(others.get("source"), "source") or origin
            contents = [
                _read_content(value, column, kind)
                for column, value in zip(columns, values, strict=False)
            ]
            named = {"id": name, "source": origin, "has_own_id": has_own_id}
            yield _build_document(kind, contents, named)
        except _UnusableRow as fault:
            unusable.setdefault(str(fault), []).append(name)


def _choose_columns(table: Table, text_column: str, setting: str) -> tuple[_Kind, list[str]]:
    present = table.columns
    if IDS_COLUMN in present:
        others = [name for name in (text_column, "messages", "prompt") if name in present]
        if others and text_column != IDS_COLUMN:
            where = "--text-column" if setting.startswith("--") else "'data.text_column'"
            raise DataError(
                f"'{setting}': '{table.origin}' has the columns '{others[0]}' and '{IDS_COLUMN}': "
                f"either could be the document. Remove one, or set {where} to {IDS_COLUMN}."
            )
        return "input_ids", [IDS_COLUMN]
    # A text column that the user named takes precedence over recognised columns.
    if text_column != "text" and text_column in present:
        return "text", [text_column]
    if "messages" in present:
        return "messages", ["messages"]
    if "prompt" in present and "completion" in present:
        return "prompt_completion", ["prompt", "completion"]
    if text_column in present:
        return "text", [text_column]
    # In a CSV file without a header the first row is read as the header: do not quote its text.
    names = [name if _COLUMN.fullmatch(name) else f"({len(name)} characters)" for name in present]
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
    """Check the value of a cell; null becomes empty."""
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
        # Dropping e.g. tool calls would train on a different conversation than the user's.
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
    kind: _Kind,
    contents: "Sequence[str | tuple[Message, ...] | array[int]]",
    named: Mapping[str, Any],
) -> Document | None:
    """Return a document, or None if the row has no text to train on.

    Args:
        kind: of its contents.
        contents: values of its columns.
        named: id and source.
    """
    last = contents[-1]
    if kind == "input_ids":
        assert isinstance(last, array), "checked when read"
        return Document(**named, format="text", input_ids=last) if last else None
    assert not isinstance(last, array), "of another kind"
    text = last if isinstance(last, str) else "".join(message.content for message in last)
    if not text.strip():
        return None
    if kind == "text":
        assert isinstance(last, str), "checked when read"
        return Document(**named, format=kind, text=last)
    if kind == "messages":
        assert isinstance(last, tuple), "checked when read"
        return Document(**named, format=kind, messages=last)
    prompt = contents[0]
    assert not isinstance(prompt, array), "of another kind"
    if not prompt and isinstance(last, str):
        prompt = ""
    if isinstance(prompt, str) != isinstance(last, str):
        raise _UnusableRow("where only one of 'prompt' and 'completion' is a string")
    if not prompt and not isinstance(prompt, str):
        raise _UnusableRow("whose 'prompt' has no message")
    return Document(**named, format=kind, prompt=prompt, completion=last)


def _check_ids(documents: Sequence[Document], setting: str) -> None:
    count = Counter(document.id for document in documents)
    twice = [name for name, number in count.items() if number > 1]
    if twice:
        raise DataError(
            f"'{setting}' has {len(twice)} ids that more than one document uses "
            f"({name_ids(twice)}). Make the column 'id' unique, or remove it: without it ids are "
            "made of file name and row number."
        )
