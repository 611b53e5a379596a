"""Document scores to records.parquet and back."""

import io
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet
from pydantic import ValidationError

from memguard.errors import RecordError
from memguard.records import DocumentScore, write_atomically

SCHEMA_NAME = "memguard.scores/1"
_ROWS_AT_ONCE = 8192
_TYPES = {
    str: pyarrow.string(),
    int: pyarrow.int64(),
    float: pyarrow.float64(),
    bool: pyarrow.bool_(),
}


def build_schema() -> pyarrow.Schema:
    """Return the columns: the fields of `DocumentScore`, null only where it may be None."""
    fields = []
    for name, info in DocumentScore.model_fields.items():
        options = typing.get_args(info.annotation) or (info.annotation,)
        kinds = [option for option in options if option is not type(None)]
        # A Literal's arguments are its values, all of one type.
        kind = kinds[0] if isinstance(kinds[0], type) else type(kinds[0])
        fields.append(pyarrow.field(name, _TYPES[kind], nullable=type(None) in options))
    return pyarrow.schema(fields, metadata={"schema": SCHEMA_NAME})


def save_scores(scores: Sequence[DocumentScore], path: Path) -> None:
    """Write one row a document, whole or not at all; same scores, same bytes."""
    buffer, schema = io.BytesIO(), build_schema()
    with parquet.ParquetWriter(buffer, schema, compression="zstd") as writer:
        for first in range(0, max(len(scores), 1), _ROWS_AT_ONCE):
            rows = [score.model_dump() for score in scores[first : first + _ROWS_AT_ONCE]]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
    write_atomically(path, buffer.getvalue())


def load_scores(path: Path) -> list[DocumentScore]:
    """Read document scores back.

    Raises:
        RecordError: missing, not parquet, or not of this schema.
    """
    try:
        table = parquet.read_table(io.BytesIO(path.read_bytes()))
    except OSError as error:
        reason = error.strerror or "not a parquet file"
        raise RecordError(f"'{path}' cannot be read: {reason}") from error
    except pyarrow.ArrowException as error:
        raise RecordError(f"'{path}' cannot be read: not a parquet file") from error
    rows: list[dict[str, Any]] = table.to_pylist()
    try:
        return [DocumentScore.model_validate(row) for row in rows]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RecordError(
            f"'{path}' holds no document scores this version reads ({place}: {first['msg']}). "
            "Audit again, or use the version that wrote it."
        ) from error
