"""Scores of each document: one column per number, named by probe, as in records.parquet.

    id, bucket, role, ..., cluster                 what each document is
    extraction.verbatim, membership.loss, ...      what the probes measured on the model
    base.extraction.verbatim, ...                  the same of the model before training
    extraction.extracted, ...                      whether a risk of the probe extracts it

Numbers are float64 columns, 1 and 0 for true and false. A number that is NaN or infinite (no number
of queries is enough, edits were not counted) is null in the file, which only its owner can read.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import parquet

from memguard.audit.probe import Column, Summary
from memguard.audit.windows import Window, compute_type_token_ratio
from memguard.records import PRIVATE_MODE, write_atomically
from memguard.records.documents import EXTRACTED

SCHEMA_NAME = "memguard.scores/3"
_ROWS_AT_ONCE = 8192
_TYPES = {
    "text": pyarrow.string(),
    "int": pyarrow.int64(),
    "float": pyarrow.float64(),
    "bool": pyarrow.bool_(),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DocumentScores:
    """The scores of N documents as columns, because a million record objects take gigabytes."""

    columns: Mapping[str, Column]

    def __len__(self) -> int:
        return len(self.columns["id"].values)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return [N]; NaN if nothing of this name was measured."""
        column = self.columns.get(name)
        return np.full(len(self), np.nan) if column is None else column.values

    def to_arrow(self, where: slice) -> pyarrow.Table:
        """Return the selected rows as a table of the file's schema."""
        schema = pyarrow.schema(
            [(name, _TYPES[column.kind]) for name, column in self.columns.items()],
            metadata={"schema": SCHEMA_NAME},
        )
        return pyarrow.Table.from_arrays(
            [
                _to_arrow(column.values[where], _TYPES[column.kind])
                for column in self.columns.values()
            ],
            schema=schema,
        )


def build_scores(windows: Sequence[Window], summaries: Mapping[str, Summary]) -> DocumentScores:
    """Return the columns of an audit.

    Args:
        windows: ``[N]`` main windows.
        summaries: what each probe adds, by its name.
    """
    documents = [window.document for window in windows]

    def collect(name: str, kind: Any = object) -> NDArray[Any]:
        return np.array([getattr(document, name) for document in documents], dtype=kind)

    ratios = [compute_type_token_ratio(window.continuation_ids) for window in windows]
    columns = {
        **{
            name: Column(values=collect(name), kind="text")
            for name in ("id", "text_hmac", "bucket", "role", "source")
        },
        "has_own_id": Column(values=collect("has_own_id", np.float64), kind="bool"),
        **{
            name: Column(values=collect(name, np.float64), kind="int")
            for name in ("num_repetitions", "num_tokens")
        },
        **{
            name: Column(values=np.array([getattr(w, name) for w in windows], float), kind="int")
            for name in ("prefix_tokens", "continuation_tokens")
        },
        **{
            name: Column(values=collect(name, np.float64), kind="int")
            for name in ("num_copies", "cluster")
        },
        "type_token_ratio": Column(values=np.array(ratios, dtype=np.float64)),
    }
    for name, summary in summaries.items():
        columns |= summary.columns
        for model, matched_N in summary.matched.items():
            start = "" if model == "trained" else f"{model}."
            column = Column(values=np.asarray(matched_N, dtype=np.float64), kind="bool")
            columns[f"{start}{name}{EXTRACTED}"] = column
    return DocumentScores(columns=columns)


def _to_arrow(values: NDArray[Any], kind: pyarrow.DataType) -> pyarrow.Array:
    if values.dtype == object:
        return pyarrow.array(values.tolist(), kind)
    is_missing = ~np.isfinite(values)
    filled = np.where(is_missing, 0, values).astype(kind.to_pandas_dtype())
    return pyarrow.array(filled, kind, mask=is_missing)


def save_scores(scores: DocumentScores, path: Path) -> None:
    """Write one row per document, atomically; equal scores give equal bytes.

    Only the owner can read the file: a guessed text can be scored and compared with its rows.
    """
    buffer = io.BytesIO()
    schema = scores.to_arrow(slice(0)).schema
    with parquet.ParquetWriter(buffer, schema, compression="zstd") as writer:
        for first in range(0, max(len(scores), 1), _ROWS_AT_ONCE):
            writer.write_table(scores.to_arrow(slice(first, first + _ROWS_AT_ONCE)))
    write_atomically(path, buffer.getvalue(), mode=PRIVATE_MODE)
