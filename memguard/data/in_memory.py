"""Documents in memory, as a table: a list of texts or a `datasets.Dataset`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memguard.data.sources import NamedFile, Table, wrap_dataset
from memguard.errors import DataError


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
