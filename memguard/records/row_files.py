"""Rows of one dataclass as a parquet file, written whole or not at all, read without pandas.

A file has a column for each field, whatever its rows are: text, unless its type is named. The name
of the schema is in its metadata. Equal rows give equal bytes.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from memguard.errors import RecordError
from memguard.records.record import write_atomically

if TYPE_CHECKING:
    import pyarrow

Row = TypeVar("Row")
ColumnTypes = Mapping[str, Literal["int64", "float64", "bool"]]
"""Types of the columns that are no text, by field."""


def build_table(
    rows: Sequence[Row], kind: type[Any], types: ColumnTypes, *, schema: str
) -> "pyarrow.Table":
    """Return rows as columns.

    Args:
        rows: of one dataclass.
        kind: the dataclass.
        types: of its fields.
        schema: name of the schema.
    """
    import pyarrow

    names = [field.name for field in fields(kind)]
    arrow = pyarrow.schema(
        [(name, pyarrow.type_for_alias(types.get(name, "string"))) for name in names],
        metadata={"schema": schema},
    )
    arrays = [
        pyarrow.array([getattr(row, name) for row in rows], of_column)
        for name, of_column in zip(names, arrow.types, strict=True)
    ]
    return pyarrow.Table.from_arrays(arrays, schema=arrow)


def save_table(table: "pyarrow.Table", path: Path, *, mode: int = 0o644) -> None:
    """Write a table of `build_table`; ``mode`` is that of a new file, before the umask."""
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    write_atomically(path, buffer.getvalue(), mode=mode)


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Return the rows of a file; errors are those of pyarrow and of the dataclass."""
    from pyarrow import parquet

    # Not read_table, which imports pandas: the gate has two seconds.
    with parquet.ParquetFile(path) as file:
        return [kind(**row) for row in file.read().to_pylist()]


def load_rows(path: Path, kind: type[Row], *, of: str) -> list[Row]:
    """Return the rows of a file.

    Args:
        path: of the file.
        kind: dataclass of its rows.
        of: what the rows are, in the message.

    Raises:
        RecordError: it is no such file.
    """
    import pyarrow

    try:
        return read_rows(path, kind)
    except (pyarrow.ArrowException, TypeError, OSError) as error:
        raise RecordError(f"'{path}' holds no {of}. Audit the run again.") from error
