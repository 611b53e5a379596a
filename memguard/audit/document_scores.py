"""Scores of each document, as in records.parquet.

    id, bucket, role, ..., cluster                 what each document is
    extraction.verbatim, membership.loss, ...      what the probes measured on the model
    base.extraction.verbatim, ...                  the same of the model before training
    extraction.extracted, ...                      whether the probe extracts it in any way
    extraction.other_window, ...                   whether it extracts own text in another window
    not_audited                                    why nothing was measured; null: it was audited

Numbers are float64 columns, 1 and 0 for true and false. A number that is NaN or infinite (no number
of queries is enough, edits were not counted) is null in the file, which only its owner can read.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import parquet

from memguard.audit.probe import Column, Summary
from memguard.audit.selection import NotAudited
from memguard.audit.windows import AuditDocument, Window, compute_type_token_ratio
from memguard.records import PRIVATE_MODE, write_atomically
from memguard.records.documents import EXTRACTED, NOT_AUDITED, OTHER_WINDOW

SCHEMA_NAME = "memguard.scores/4"
_ROWS_AT_ONCE = 8192
_TYPES = {
    "text": pyarrow.string(),
    "int": pyarrow.int64(),
    "float": pyarrow.float64(),
    "bool": pyarrow.bool_(),
}
_OF_WINDOW = ("prefix_tokens", "continuation_tokens")
_COUNTS = ("num_repetitions", "num_tokens", *_OF_WINDOW, "num_copies", "cluster")
_OF_DOCUMENT: Mapping[str, Literal["text", "bool", "int"]] = {
    **dict.fromkeys(("id", "text_hmac", "bucket", "role", "source"), "text"),
    "has_own_id": "bool",
    **dict.fromkeys(_COUNTS, "int"),
    NOT_AUDITED: "text",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DocumentScores:
    """The scores of N documents as columns, because a million record objects take gigabytes."""

    columns: Mapping[str, Column]
    unaudited: Mapping[str, Column] = field(default_factory=dict)
    """What the documents are that could not be audited; rows of the file alone."""

    def __len__(self) -> int:
        return len(self.columns["id"].values)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return [N]; NaN if nothing of this name was measured."""
        column = self.columns.get(name)
        return np.full(len(self), np.nan) if column is None else column.values

    def list_unaudited(self) -> "DocumentScores":
        """Return the documents that could not be audited, with null in what is measured."""
        missing = np.full(len(self.unaudited["id"].values) if self.unaudited else 0, None)
        nothing = {n: Column(values=missing, kind=c.kind) for n, c in self.columns.items()}
        return DocumentScores(columns={**nothing, **self.unaudited})

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


def build_scores(
    windows: Sequence[Window],
    summaries: Mapping[str, Summary],
    not_audited: Sequence[tuple[AuditDocument, NotAudited]] = (),
) -> DocumentScores:
    """Return the columns of an audit."""
    columns = _describe([window.document for window in windows], windows)
    ratios = [compute_type_token_ratio(window.continuation_ids) for window in windows]
    columns["type_token_ratio"] = Column(values=np.array(ratios, dtype=np.float64))
    for name, summary in summaries.items():
        columns |= summary.columns
        for model in dict.fromkeys((*summary.matched, *summary.windows)):
            start = f"{'' if model == 'trained' else f'{model}.'}{name}"
            windows_N = summary.windows.get(model)
            if windows_N is not None:
                columns[f"{start}{OTHER_WINDOW}"] = Column(values=windows_N, kind="bool")
            # Another window shows that a document is extracted, not that it is not.
            extracted_N = np.asarray(summary.matched.get(model, windows_N), dtype=np.float64)
            if windows_N is not None:
                extracted_N = np.where(windows_N == 1, 1.0, extracted_N)
            columns[f"{start}{EXTRACTED}"] = Column(values=extracted_N, kind="bool")
    unaudited = _describe([document for document, _ in not_audited], [None] * len(not_audited))
    reasons = np.array([reason for _, reason in not_audited], dtype=object)
    unaudited[NOT_AUDITED] = Column(values=reasons, kind="text")
    return DocumentScores(columns=columns, unaudited=unaudited)


def _describe(documents: Sequence[AuditDocument], windows: Sequence[Any]) -> dict[str, Column]:
    """Return the columns that tell what documents are; those without a window have None."""
    columns: dict[str, Column] = {}
    for name, kind in _OF_DOCUMENT.items():
        holders = windows if name in _OF_WINDOW else documents
        dtype = object if kind == "text" else np.float64
        values = np.array([getattr(holder, name, None) for holder in holders], dtype=dtype)
        columns[name] = Column(values=values, kind=kind)
    return columns


def _to_arrow(values: NDArray[Any], kind: pyarrow.DataType) -> pyarrow.Array:
    if values.dtype == object:
        return pyarrow.array(values.tolist(), kind)
    is_missing = ~np.isfinite(values)
    filled = np.where(is_missing, 0, values).astype(kind.to_pandas_dtype())
    return pyarrow.array(filled, kind, mask=is_missing)


def save_scores(scores: DocumentScores, path: Path) -> None:
    """Write one row per document, atomically; equal scores give equal bytes.

    Documents that could not be audited follow, with null in what is measured.
    Only the owner can read the file: a guessed text can be scored and compared with its rows.
    """
    buffer = io.BytesIO()
    schema = scores.to_arrow(slice(0)).schema
    with parquet.ParquetWriter(buffer, schema, compression="zstd") as writer:
        for part in (scores, scores.list_unaudited()):
            for first in range(0, len(part), _ROWS_AT_ONCE):
                writer.write_table(part.to_arrow(slice(first, first + _ROWS_AT_ONCE)))
    write_atomically(path, buffer.getvalue(), mode=PRIVATE_MODE)
