"""Reads documents from files, folders and hub ids into one form.

sources.py, source_files.py, table_files.py, parsers.py   source -> tables of rows
formats.py                   table -> how its rows are read, by `data.format` and its columns
rows.py                      row -> document
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard.config import DataConfig, FormatConfig
from memguard.data.formats import Layout, Style, choose_layout
from memguard.data.rows import (
    Document,
    Format,
    Message,
    UnusableRow,
    read_name,
    read_row,
    strip_stanford,
)
from memguard.data.sources import read_sources
from memguard.data.table_files import NamedFile, Table, wrap_dataset
from memguard.errors import MAX_PATH, DataError, shorten

__all__ = ["Document", "Format", "Message"]  # of rows.py; the others are defined here

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""
_NUM_IDS_SHOWN, _NUM_REASONS_SHOWN = 5, 5


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
    form: FormatConfig | None = None,
    has_chat_template: Callable[[], bool] = lambda: False,
    style: Style | None = None,
    beside: Sequence[str] = (),
    cache_dir: Path,
    say: Callable[[str], None] = lambda _: None,
) -> LoadedDocuments:
    """Read all documents of all sources.

    The id of a document is taken from the column `id`, else made of file name and row number; no
    two files give the same made ids, those of the sources ``beside`` included. Its source is taken
    from the column `source`, else it is the short name of the given source.

    ``sources`` are those of `sources.py`, or tables of documents in memory; their settings of the
    format are ``form``, None: all at their defaults. See `choose_layout` for setting, style and
    has_chat_template. ``say`` is called with one line for each table, which says how it is read.

    Raises:
        DataError: a source is missing, unreadable or invalid; it fits no format or several; there
            is no document; a row has values of the wrong type; two documents have the same id.
    """
    documents: list[Document] = []
    num_empty = 0
    unusable: dict[str, list[str]] = {}
    lines: set[str] = set()
    for table in read_sources(sources, beside=beside, setting=setting, cache_dir=cache_dir):
        if not table.columns:
            continue
        layout = choose_layout(
            table,
            FormatConfig() if form is None else form,
            setting=setting,
            has_chat_template=has_chat_template,
            style=style,
        )
        told = []
        if table.format is None:
            told.append(f"documents: {table.origin} is read as {layout.describe()}")
        if table.note:
            told.append(f"documents: not read in {table.origin}: {table.note}")
        for line in told:
            if line not in lines:
                lines.add(line)
                say(line)
        for document in _read_documents(table, layout, unusable):
            if document is None:
                num_empty += 1
            else:
                documents.append(document)
    if unusable:
        reasons = "; ".join(
            f"{len(ids)} row{'s' if len(ids) > 1 else ''} {reason} ({name_ids(ids)})"
            for reason, ids in list(unusable.items())[:_NUM_REASONS_SHOWN]
        )
        if (num_more := len(unusable) - _NUM_REASONS_SHOWN) > 0:
            reasons += f"; and rows with {num_more} more such problem{'s' if num_more > 1 else ''}"
        raise DataError(f"'{setting}' has {reasons}. Correct or remove them.")
    if not documents:
        skipped = f", only {say_empty(num_empty)}" if num_empty else ""
        names = ", ".join(s if isinstance(s, str) else s.name for s in sources)
        raise DataError(f"'{setting}' has no documents{skipped}: {shorten(names, MAX_PATH)}.")
    check_ids(documents, setting)
    return LoadedDocuments(documents=documents, num_empty=num_empty)


def say_empty(num_empty: int) -> str:
    """Write how many rows are left out because they have no text."""
    return f"{num_empty:,} row{'s' * (num_empty != 1)} without text"


def make_table(documents: Any, *, name: str) -> Table:
    """Return documents in memory, texts or a `datasets.Dataset`, as a table.

    ``name`` is the prefix of the ids of rows without an id, and their name in errors.

    Raises:
        DataError: another type, such as a `DatasetDict` or an `IterableDataset`.
    """
    kind = type(documents).__name__
    if kind == "Dataset" and hasattr(documents, "select_columns"):
        file = NamedFile(path=Path(name), name=name, origin=name, shown=name, setting=name)
        return wrap_dataset(documents, file)
    if isinstance(documents, Sequence) and all(isinstance(text, str) for text in documents):
        texts = tuple(documents)

        def read(columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
            return ((text,) * len(columns) for text in texts)

        return Table(name=name, origin=name, columns=("text",), read=read, format="text")
    hint = {
        "DatasetDict": ": choose one of its splits",
        "IterableDataset": ": load it without streaming",
    }.get(kind, "")
    raise DataError(
        f"'{name}' must be paths, a list of texts or a datasets.Dataset; got {kind}{hint}"
    )


def load_settings(
    data: DataConfig,
    cache_dir: Path,
    say: Callable[[str], None] = lambda _: None,
    *,
    has_chat_template: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[str, LoadedDocuments]]:
    """Yield the name and documents of each setting that names sources.

    See `load_documents`; ``say`` is also called before each setting is read.
    """
    given = data.list_sources()
    for setting, sources in given.items():
        if sources:
            say(f"documents: reading {shorten(', '.join(sources), MAX_PATH)}")
            loaded = load_documents(
                sources,
                setting=f"data.{setting}",
                form=data,
                beside=[one for name in given if name != setting for one in given[name]],
                has_chat_template=has_chat_template,
                cache_dir=cache_dir,
                say=say,
            )
            yield setting, loaded


def document_text(document: Document, decode: Decode | None = None) -> str:
    """Return the text of a document, in order and without markup of a template.

    Without ``decode`` each token id becomes a word of digits, so that documents that share a
    sequence of ids share a sequence of words.
    """
    if document.input_ids is not None:
        return decode(document.input_ids) if decode else " ".join(map(str, document.input_ids))
    prompt = document.prompt
    if isinstance(prompt, str):
        prompt = strip_stanford(prompt)
    parts = (document.text, document.messages, prompt, document.completion)
    return "\n".join(
        part if isinstance(part, str) else "\n".join(message.content for message in part)
        for part in parts
        if part is not None
    )


def name_ids(ids: Sequence[str]) -> str:
    """Format the first five ids for an error message, each cut at 60 characters."""
    shown = [ascii(name)[1:-1][:60] for name in ids[:_NUM_IDS_SHOWN]]
    return ", ".join(shown) + (", ..." if len(ids) > _NUM_IDS_SHOWN else "")


def _read_documents(
    table: Table, layout: Layout, unusable: dict[str, list[str]]
) -> Iterator[Document | None]:
    """Yield the table's documents, None for rows without text; collect ids of invalid rows."""
    columns = list(layout.columns.values())
    extra = [name for name in ("id", "source") if name in table.columns and name not in columns]
    for row, values in enumerate(table.read([*columns, *extra])):
        others = dict(zip(extra, values[len(columns) :], strict=True))
        name, origin = f"{table.name}-{row:06d}", table.origin
        try:
            own = read_name(others.get("id"), "id")
            has_own_id = own is not None and not table.has_made_ids
            name = own or name
            origin = read_name(others.get("source"), "source") or origin
            named = {"id": name, "source": origin, "has_own_id": has_own_id}
            yield read_row(values[: len(columns)], layout, named)
        except UnusableRow as fault:
            unusable.setdefault(str(fault), []).append(name)


def check_ids(documents: Sequence[Document], setting: str) -> None:
    """Refuse documents of which two have one id.

    Raises:
        DataError: names the ids.
    """
    count = Counter(document.id for document in documents)
    twice = [name for name, number in count.items() if number > 1]
    if twice:
        raise DataError(
            f"'{setting}' has {len(twice)} ids that more than one document uses "
            f"({name_ids(twice)}). Make the column 'id' unique, or remove it."
        )
