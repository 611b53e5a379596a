"""Scores of each document under the model and its base: a column per field of `DocumentScore`.

    score matrix of the model and of its base, near-verbatim matches  ->  columns [N]
    columns                                                           ->  records.parquet

Numbers are float64 columns, 1 and 0 for true and false. A number that is NaN or infinite (no number
of queries is enough, edits were not counted) is null in the file, which only its owner can read.
"""

import io
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import parquet

from memguard.audit.cache import ScoreMatrix
from memguard.audit.extraction import Window, compute_type_token_ratio, count_needed_90
from memguard.audit.near_verbatim import NearVerbatim, NotGenerated
from memguard.audit.probabilistic import NEVER, attack_cost
from memguard.audit.probe import Measured, join
from memguard.audit.probes.extraction import MAIN
from memguard.config.settings import SamplingScheme
from memguard.records import PRIVATE_MODE, DocumentScore, write_atomically

SCHEMA_NAME = "memguard.scores/1"
_ROWS_AT_ONCE = 8192
_TYPES = {
    str: pyarrow.string(),
    int: pyarrow.int64(),
    float: pyarrow.float64(),
    bool: pyarrow.bool_(),
}
# Columns copied from the score matrix; the greedy margin is that of the whole greedy text instead.
_MEASURED = [name for name in MAIN if name in DocumentScore.model_fields]
_OF_BASE = [
    name.removeprefix("base_") for name in DocumentScore.model_fields if name.startswith("base_")
]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DocumentScores:
    """The scores of N documents as columns, because a million record objects take gigabytes."""

    columns: Mapping[str, NDArray[Any]]
    """[N] by field of `DocumentScore`: float64, or objects if the field is a string."""

    def __len__(self) -> int:
        return len(self.columns["id"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return [N]."""
        return self.columns[name]

    def to_arrow(self, where: slice | Sequence[int]) -> pyarrow.Table:
        """Return the selected rows as a table of the file's schema."""
        schema = build_schema()
        return pyarrow.Table.from_arrays(
            [_to_arrow(self.columns[field.name][where], field) for field in schema], schema=schema
        )

    def build_records(self, indices: Sequence[int]) -> list[DocumentScore]:
        """Return the records of the selected documents."""
        rows = self.to_arrow(indices).to_pylist()
        return [DocumentScore.model_validate(row) for row in rows]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelResults:
    """Results of the probes that run on the model and on its base, for [N] documents each."""

    teacher_forced: ScoreMatrix
    """Numbers of one teacher-forced pass: those of the extraction probe, and those of other probes
    as ``sampled.0``, ``membership.loss``, ``grid.0.num_correct``, ..."""
    near_verbatim: NearVerbatim | NotGenerated
    canaries: ScoreMatrix | None = None
    """One row per secret; None without the probe or without secrets."""
    written: ScoreMatrix | None = None
    """Overlap of generated text with the true text; None without the probe."""
    attacked: ScoreMatrix | None = None
    """Results of the attacks; None without the probe."""

    @classmethod
    def collect(cls, measured: Mapping[str, Measured]) -> "ModelResults":
        """Return the results from those of each probe."""

        def find(name: str) -> ScoreMatrix | None:
            return measured[name].columns if name in measured else None

        parts = {"": "extraction", "sampled.": "sampling", "membership.": "membership"}
        parts["grid."] = "grid"
        present = {
            place: matrix for place, name in parts.items() if (matrix := find(name)) is not None
        }
        return cls(
            teacher_forced=join(present),
            near_verbatim=measured["extraction"].detail,
            canaries=find("canaries"),
            written=find("generation"),
            attacked=find("attacks"),
        )

    @property
    def near_verbatim_N(self) -> NDArray[np.float64]:
        """1 if a document is extracted near-verbatim; NaN if nothing was generated."""
        if isinstance(self.near_verbatim, NearVerbatim):
            return self.near_verbatim.matched_N.astype(np.float64)
        return np.full(len(self.teacher_forced.rows), np.nan)


def build_scores(
    windows: Sequence[Window],
    schemes: Sequence[SamplingScheme],
    model: ModelResults,
    base: ModelResults | None,
) -> DocumentScores:
    """Return the columns of an audit.

    Args:
        windows: ``[N]`` main windows.
        schemes: sampling schemes of the suite; none if it has no sampling probe.
        model: results of the model.
        base: results of the model before training; None leaves its columns null.
    """
    documents = [window.document for window in windows]
    missing_N = np.full(len(windows), np.nan)
    of_model = _judge(windows, schemes, model)
    of_base = {} if base is None else _judge(windows, schemes, base)
    ratios = [compute_type_token_ratio(window.continuation_ids) for window in windows]
    columns: dict[str, NDArray[Any]] = {
        name: np.array([getattr(document, name) for document in documents], dtype=kind)
        for kind, names in (
            (object, ("id", "bucket", "role", "source")),
            (np.float64, ("num_repetitions", "num_tokens", "num_copies")),
        )
        for name in names
    }
    columns["prefix_tokens"] = np.array([w.prefix_tokens for w in windows], dtype=np.float64)
    columns["continuation_tokens"] = _list_sizes(windows).astype(np.float64)
    columns["type_token_ratio"] = np.array(ratios, dtype=np.float64)
    columns |= of_model
    columns |= {f"base_{name}": of_base.get(name, missing_N) for name in _OF_BASE}
    return DocumentScores(columns=columns)


def describe_window(
    numbers: ScoreMatrix, size_N: NDArray[np.int64], place: str = ""
) -> dict[str, NDArray[np.float64]]:
    """Return the metrics of one window of each document; NaN if the document is too short.

    Args:
        numbers: a model's score matrix.
        size_N: tokens of the continuation.
        place: the window, given by the prefix of its names in the matrix.
    """
    correct_N = numbers[f"{place}num_correct"]
    missing_N = np.isnan(correct_N)
    return {
        "verbatim": np.where(missing_N, np.nan, correct_N == size_N),
        "teacher_forced_90": np.where(missing_N, np.nan, correct_N >= count_needed_90(size_N)),
        "token_accuracy": correct_N / size_N,
        "extraction_strength": numbers[f"{place}extraction_strength"],
        "first_divergence": numbers[f"{place}first_divergence"],
        "longest_run": numbers[f"{place}longest_run"],
        "logprob": numbers[f"{place}logprob"] / size_N,
    }


def _judge(
    windows: Sequence[Window], schemes: Sequence[SamplingScheme], results: ModelResults
) -> dict[str, NDArray[Any]]:
    """Return the columns of one model: matches, margins and attack cost."""
    numbers, near = results.teacher_forced, results.near_verbatim
    missing_N = np.full(len(windows), np.nan)
    measured = describe_window(numbers, _list_sizes(windows))
    columns: dict[str, NDArray[Any]] = {
        **{name: numbers[name] for name in _MEASURED},
        **{name: measured[name] for name in ("verbatim", "teacher_forced_90")},
        "near_verbatim": results.near_verbatim_N,
        "num_edits": near.num_edits_N if isinstance(near, NearVerbatim) else missing_N,
        "greedy_margin": near.min_gap_N if isinstance(near, NearVerbatim) else missing_N,
        "attack_log10_queries": missing_N,
        "attack_scheme": np.full(len(windows), None, dtype=object),
    }
    if schemes:
        logprob_SN = np.stack([numbers[f"sampled.{i}"] for i in range(len(schemes))])
        cost = attack_cost(logprob_SN, measured["verbatim"] == 1)
        labels = [None, "greedy", *(scheme.label for scheme in schemes)]
        columns["attack_log10_queries"] = cost.log10_queries_N
        columns["attack_scheme"] = np.array(labels, dtype=object)[cost.scheme_N - NEVER]
    return columns


def _list_sizes(windows: Sequence[Window]) -> NDArray[np.int64]:
    return np.array([window.continuation_tokens for window in windows], dtype=np.int64)


def build_schema() -> pyarrow.Schema:
    """Return the file's schema: the fields of `DocumentScore`, nullable if they may be None."""
    fields = []
    for name, info in DocumentScore.model_fields.items():
        options = typing.get_args(info.annotation) or (info.annotation,)
        kinds = [option for option in options if option is not type(None)]
        # A Literal's arguments are its values, which all have the same type.
        kind = kinds[0] if isinstance(kinds[0], type) else type(kinds[0])
        fields.append(pyarrow.field(name, _TYPES[kind], nullable=type(None) in options))
    return pyarrow.schema(fields, metadata={"schema": SCHEMA_NAME})


def _to_arrow(values: NDArray[Any], field: pyarrow.Field) -> pyarrow.Array:
    if values.dtype == object:
        return pyarrow.array(values.tolist(), field.type)
    is_missing = ~np.isfinite(values)
    assert field.nullable or not is_missing.any(), f"every document has {field.name}"
    filled = np.where(is_missing, 0, values).astype(field.type.to_pandas_dtype())
    return pyarrow.array(filled, field.type, mask=is_missing)


def save_scores(scores: DocumentScores, path: Path) -> None:
    """Write one row per document, atomically; equal scores give equal bytes.

    Only the owner can read the file: a guessed text can be scored and compared with its rows.
    """
    buffer = io.BytesIO()
    with parquet.ParquetWriter(buffer, build_schema(), compression="zstd") as writer:
        for first in range(0, max(len(scores), 1), _ROWS_AT_ONCE):
            writer.write_table(scores.to_arrow(slice(first, first + _ROWS_AT_ONCE)))
    write_atomically(path, buffer.getvalue(), mode=PRIVATE_MODE)
