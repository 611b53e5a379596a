"""Scores of each document, as in records.parquet, and the findings: documents that are extracted.

    id, bucket, role, ..., cluster                 what each document is
    extraction.verbatim, membership.loss, ...      what the probes measured on the model
    base.extraction.verbatim, ...                  the same of the model before training
    extraction.extracted, ...                      whether a risk of the probe extracts it
    not_audited                                    why nothing was measured; null: it was audited

Numbers are float64 columns, 1 and 0 for true and false. A number that is NaN or infinite (no number
of queries is enough, edits were not counted) is null in the file, which only its owner can read.

Findings are the documents that greedy decoding extracts, worst first, without text: the first
`MAX_FINDINGS` in report.json, all of them in findings.csv, for their owner only.
"""

import csv
import io
import math
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
from memguard.records import PRIVATE_MODE, Finding, write_atomically
from memguard.records.documents import EXTRACTED, NOT_AUDITED
from memguard.records.texts import format_percent

SCHEMA_NAME = "memguard.scores/3"
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
        for model, matched_N in summary.matched.items():
            start = "" if model == "trained" else f"{model}."
            column = Column(values=np.asarray(matched_N, dtype=np.float64), kind="bool")
            columns[f"{start}{name}{EXTRACTED}"] = column
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


Severity = Literal["high", "medium", "low", "info"]
MAX_FINDINGS = 100
LONG_TOKENS = 50
"""Minimum continuation of a verbatim match of high severity: the length used in the literature."""
TEMPLATE_TYPE_TOKEN_RATIO = 0.4
"""Maximum of distinct tokens / tokens for a text that may be guessable as a template."""

FINDING_COLUMNS = ("finding_id", *Finding.model_fields)
"""Columns of `findings.csv`."""
_ORDER: tuple[Severity, ...] = ("high", "medium", "low", "info")
_WORDS_A_TOKEN = 0.7
"""Words of English text in one token of a usual vocabulary, for readers who count in words."""


def collect_findings(scores: DocumentScores) -> tuple[list[Finding], int]:
    """Return the worst findings, and the number of trained documents that were extracted.

    high: verbatim over at least `LONG_TOKENS`, and not by the base model as far as is known;
    medium: verbatim, but shorter or also by the base model; low: near-verbatim; info: template-like
    text, with any match.
    """
    order, place_N = _rank(scores)
    return _build_findings(scores, order[:MAX_FINDINGS], place_N), len(order)


def save_findings(scores: DocumentScores, path: Path) -> None:
    """Write every finding, with its id, as a row of a CSV file that only its owner can read."""
    order, place_N = _rank(scores)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FINDING_COLUMNS)
    for first in range(0, len(order), _ROWS_AT_ONCE):
        chunk = order[first : first + _ROWS_AT_ONCE]
        for finding in _build_findings(scores, chunk, place_N):
            writer.writerow(_escape(getattr(finding, name)) for name in FINDING_COLUMNS)
    content = text.getvalue().encode("utf-8", errors="surrogatepass")
    write_atomically(path, content, mode=0o600)


def _escape(value: object) -> object:
    """Return a text that no spreadsheet program takes for a formula."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value


def _rank(scores: DocumentScores) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of extracted documents, worst first; and ``[N]`` places in `_ORDER`."""
    verbatim_N = scores["extraction.verbatim"] == 1
    is_known_N = scores["base.extraction.verbatim"] == 1
    is_known_N |= scores["continuation_tokens"] < LONG_TOKENS
    is_template_N = scores["type_token_ratio"] <= TEMPLATE_TYPE_TOKEN_RATIO
    place_N = np.select([is_template_N, ~verbatim_N, is_known_N], [3, 2, 1], 0)
    correct_N = scores["extraction.num_correct"]
    base_correct_N = scores["base.extraction.num_correct"]
    edits_N = scores["extraction.num_edits"]
    is_fed_N = (scores["role"] != "control") & (scores["role"] != "heldout")
    extracted = np.flatnonzero((verbatim_N | (scores["extraction.near_verbatim"] == 1)) & is_fed_N)
    badness = (
        place_N,
        np.where(np.isfinite(edits_N), edits_N, 0),
        -correct_N,
        np.where(np.isnan(base_correct_N), 0, base_correct_N) - correct_N,
        -scores["extraction.logprob"],
        np.argsort(np.argsort(scores["id"], kind="stable"), kind="stable"),
    )
    # The last key of lexsort is the first criterion.
    order = np.lexsort([column_N[extracted] for column_N in reversed(badness)])
    return extracted[order], place_N


def _build_findings(
    scores: DocumentScores, indices: NDArray[np.int64], place_N: NDArray[np.int64]
) -> list[Finding]:
    return [_build_finding(scores, index, _ORDER[place_N[index]]) for index in indices.tolist()]


def _build_finding(scores: DocumentScores, index: int, severity: Severity) -> Finding:
    def count(name: str) -> int | None:
        column = scores.columns.get(name)
        value = math.nan if column is None else float(column.values[index])
        return int(value) if math.isfinite(value) else None

    def is_true(name: str) -> bool:
        return count(name) == 1

    size = count("continuation_tokens") or 0
    words = max(1, round(_WORDS_A_TOKEN * size))
    tokens = f"{_count(size, 'token')} (about {_count(words, 'word')})"
    if is_true("extraction.verbatim"):
        text = f"{tokens} exactly"
    else:
        text = f"{tokens} with {_count(count('extraction.num_edits') or 0, 'edit')}"
    if is_true("base.extraction.verbatim") or is_true("base.extraction.near_verbatim"):
        text += ", also by the base model"
    if severity == "info":
        ratio = float(scores["type_token_ratio"][index])
        text += f"; only {format_percent(ratio, 0)} of the tokens are distinct: a template?"
    return Finding(
        id=scores["id"][index],
        bucket=scores["bucket"][index],
        num_repetitions=count("num_repetitions"),
        severity=severity,
        sentence=text,
        num_correct=count("extraction.num_correct") or 0,
        continuation_tokens=size,
        first_divergence=count("extraction.first_divergence") or 0,
        base_num_correct=count("base.extraction.num_correct"),
        text_hmac=scores["text_hmac"][index],
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
