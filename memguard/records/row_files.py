"""Rows of one dataclass as a parquet file, written whole or not at all, read without pandas.

A file has a column for each field, whatever its rows are: text, unless its type is named. The name
of the schema is in its metadata. Equal rows give equal bytes.

`audit/canaries.parquet` has the score of each canary, and only the owner of the audit can read it:
a guessed secret can be scored and compared with these numbers, so the report has none of them.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from memguard.errors import RecordError
from memguard.records.record import PRIVATE_MODE, write_atomically

if TYPE_CHECKING:
    import pyarrow

Row = TypeVar("Row")
ColumnTypes = Mapping[str, Literal["int64", "float64", "bool"]]
"""Types of the columns that are no text, by field."""


def build_table(
    rows: Sequence[Row], kind: type[Any], types: ColumnTypes, *, schema: str
) -> "pyarrow.Table":
    """Return rows as columns."""
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
    """Return the rows of a file; RecordError names what they are if it is no such file."""
    import pyarrow

    try:
        return read_rows(path, kind)
    except (pyarrow.ArrowException, TypeError, OSError) as error:
        raise RecordError(f"'{path}' holds no {of}. Audit the run again.") from error


# -- canaries --------------------------------------------------------------------------------------

_CANARIES_SCHEMA = "memguard.canaries/2"


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryScore:
    """One canary: a random secret that was trained or kept as a reference."""

    id: str
    was_trained: bool
    nll: float
    """Sum over the secret's tokens (nats)."""
    base_nll: float | None
    num_secret_tokens: int
    num_repetitions: int
    num_loss_tokens: int | None
    """Tokens of it that received loss at least once; None if not recorded."""
    exposure_bits: float | None
    verbatim: bool


_TYPES: ColumnTypes = {
    **dict.fromkeys(("was_trained", "verbatim"), "bool"),
    **dict.fromkeys(("num_secret_tokens", "num_repetitions", "num_loss_tokens"), "int64"),
    **dict.fromkeys(("nll", "base_nll", "exposure_bits"), "float64"),
}


def save_canaries(canaries: Sequence[CanaryScore], path: Path) -> None:
    """Write one row for each canary, readable by the owner only; equal scores give equal bytes."""
    table = build_table(canaries, CanaryScore, _TYPES, schema=_CANARIES_SCHEMA)
    save_table(table, path, mode=PRIVATE_MODE)


def load_canaries(path: Path) -> list[CanaryScore]:
    """Return the canaries of a file that `save_canaries` wrote."""
    return load_rows(path, CanaryScore, of="scores of canaries")
