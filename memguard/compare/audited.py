"""A run's report and document scores, read back."""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memguard.errors import RecordError
from memguard.records import AuditReport, BucketScores, TrainingSummary, load_record

_COST = "attack_log10_queries"
_COLUMNS = ["id", "bucket", "num_correct", "continuation_tokens", "verbatim", "near_verbatim"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """Where a finished run is and what to call it."""

    name: str
    """The setting's name; the same for each of its seeds."""
    seed: int
    folder: Path
    overrides: Mapping[str, Any]
    """What the setting changes beside its mitigations; shown, not used."""

    @property
    def label(self) -> str:
        """What messages call the run."""
        return f"'{self.name}' (seed {self.seed})"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BucketTable:
    """The documents of one bucket, in order of their ids; all arrays are [num_documents]."""

    ids: tuple[str, ...]
    verbatim: NDArray[np.bool_]
    near_verbatim: NDArray[np.bool_]
    token_accuracy: NDArray[np.float64]
    """Share of the continuation tokens that are right."""
    log10_queries: NDArray[np.float64] | None
    """What it takes to draw each by the cheapest way; inf: none can. None where nobody asked."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AuditedRun:
    """A run that can be put beside others: complete, with the losses a comparison needs."""

    run: FinishedRun
    report: AuditReport
    training: TrainingSummary
    heldout_nll: float
    base_heldout_nll: float
    buckets: dict[int, BucketScores]
    """By number of repetitions; 0 is the control. Background and held-out are left out."""
    tables: dict[int, BucketTable]
    """The same buckets, document by document."""


def load_audited_run(run: FinishedRun) -> AuditedRun:
    """Read what a run's audit found.

    Raises:
        RecordError: unreadable, partial, without held-out losses or one dose a bucket.
    """
    report = load_record(AuditReport, run.folder / "audit" / "report.json")
    if report.status != "complete":
        raise RecordError(
            f"{run.label} cannot be compared: its audit is partial. Audit '{run.folder}' again."
        )
    training = report.training
    if training is None or training.heldout_nll is None or training.base_heldout_nll is None:
        raise RecordError(
            f"{run.label} cannot be compared: '{run.folder}' has no held-out loss before and after "
            "training. Set 'data.heldout_documents' or keep a control, and train again."
        )
    buckets = _find_buckets(run, report)
    return AuditedRun(
        run=run,
        report=report,
        training=training,
        heldout_nll=training.heldout_nll,
        base_heldout_nll=training.base_heldout_nll,
        buckets=buckets,
        tables=_load_tables(run, buckets, {cost.bucket for cost in report.attack_cost}),
    )


def _find_buckets(run: FinishedRun, report: AuditReport) -> dict[int, BucketScores]:
    buckets: dict[int, BucketScores] = {}
    for bucket in report.buckets:
        if bucket.role not in ("trained", "control"):
            continue
        count = 0 if bucket.role == "control" else bucket.num_repetitions
        if count is None:
            raise RecordError(
                f"{run.label} cannot be compared: the documents of bucket '{bucket.bucket}' were "
                "not trained equally often, or nobody counted. Train the run to its end."
            )
        if count in buckets:
            raise RecordError(
                f"{run.label} cannot be compared: buckets '{buckets[count].bucket}' and "
                f"'{bucket.bucket}' both have {count} repetitions."
            )
        buckets[count] = bucket
    if not any(buckets):
        raise RecordError(f"{run.label} cannot be compared: its audit has no trained documents.")
    return dict(sorted(buckets.items()))


def _load_tables(
    run: FinishedRun, buckets: dict[int, BucketScores], costed: Set[str]
) -> dict[int, BucketTable]:
    path = run.folder / "audit" / "records.parquet"
    # Older records have no such column.
    wanted = [*_COLUMNS, _COST] if costed else _COLUMNS
    try:
        rows = pq.read_table(pa.BufferReader(path.read_bytes()), columns=wanted)
        columns = {name: rows.column(name).to_numpy() for name in _COLUMNS}
        costs = rows.column(_COST).to_pylist() if costed else []
    except OSError as error:
        raise RecordError(
            f"'{path}' cannot be read: {error.strerror or 'not a parquet file'}"
        ) from error
    except (pa.ArrowException, KeyError) as error:
        raise RecordError(
            f"'{path}' does not hold document scores. Audit the run again."
        ) from error
    tables = {}
    for count, bucket in buckets.items():
        (where,) = np.nonzero(columns["bucket"] == bucket.bucket)
        where = where[np.argsort(columns["id"][where].astype(str), kind="stable")]
        ids = tuple(columns["id"][where])
        if len(ids) != bucket.model.verbatim.num_documents or len(set(ids)) != len(ids):
            raise RecordError(
                f"'{path}' does not belong to the report beside it: bucket '{bucket.bucket}' has "
                f"{len(set(ids))} documents, not {bucket.model.verbatim.num_documents}. "
                "Audit the run again."
            )
        tables[count] = BucketTable(
            ids=ids,
            verbatim=columns["verbatim"][where].astype(bool),
            near_verbatim=columns["near_verbatim"][where].astype(bool),
            token_accuracy=columns["num_correct"][where] / columns["continuation_tokens"][where],
            log10_queries=np.array([math.inf if costs[i] is None else costs[i] for i in where])
            if bucket.bucket in costed
            else None,
        )
    return tables
