"""Document scores to records.parquet."""

import io
import typing
from collections.abc import Sequence
from pathlib import Path

import pyarrow
from pyarrow import parquet

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
