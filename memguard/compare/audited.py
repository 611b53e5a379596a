"""A run's report and document scores, read back."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memguard.errors import RecordError
from memguard.records import (
    AuditReport,
    BucketScores,
    CanaryScore,
    ManifestEntry,
    TrainingSummary,
    load_manifest,
    load_record,
)

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
    clusters: NDArray[np.int64]
    """Documents with the same number are near-duplicates; each its own where nobody looked."""
    verbatim: NDArray[np.bool_]
    near_verbatim: NDArray[np.bool_] | None
    """Of generated text; None where nothing was generated."""
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
    removed: frozenset[str]
    """Ids of documents that were given and that a mitigation took out of training."""

    @property
    def canaries(self) -> dict[str, CanaryScore]:
        """The trained secrets by id; empty where there are none."""
        found = self.report.canaries.canaries if self.report.canaries else []
        return {canary.id: canary for canary in found if canary.was_trained}


def load_audited_run(run: FinishedRun) -> AuditedRun:
    """Read what a run's audit found.

    Raises:
        RecordError: not audited, unreadable, without held-out losses or one dose a bucket.
    """
    path = run.folder / "audit" / "report.json"
    if not path.exists():
        raise RecordError(
            f"{run.label} cannot be compared: there is no '{path}'. Run what made '{run.folder}' "
            "again, it goes on to its audit; or run 'memguard audit' on it"
        )
    report = load_record(AuditReport, path)
    training = report.training
    if training is None or training.heldout_nll is None or training.base_heldout_nll is None:
        raise RecordError(
            f"{run.label} cannot be compared: '{run.folder}' has no held-out loss before and after "
            "training. Set 'data.heldout_documents' or keep a control, and train again."
        )
    buckets = _find_buckets(run, report)
    manifest = _load_manifest(run)
    return AuditedRun(
        run=run,
        report=report,
        training=training,
        heldout_nll=training.heldout_nll,
        base_heldout_nll=training.base_heldout_nll,
        buckets=buckets,
        tables=_load_tables(
            run,
            buckets,
            costed={cost.bucket for cost in report.attack_cost},
            clusters={entry.id: entry.cluster for entry in manifest},
        ),
        removed=frozenset(entry.id for entry in manifest if entry.role == "removed"),
    )


def _load_manifest(run: FinishedRun) -> list[ManifestEntry]:
    """Return the documents of a run; none where memguard only audited a model."""
    path = run.folder / "manifest.jsonl"
    return load_manifest(path) if path.exists() else []


def find_recited(folder: Path) -> dict[str, bool]:
    """Return for each audited document, trained or to be forgotten, if greedy decoding extracts it.

    Verbatim or near-verbatim. An audit of a sample leaves out the rest.

    Args:
        folder: of a finished run.

    Raises:
        RecordError: it has no document scores.
    """
    columns, _ = _read_scores(folder, ["id", "role", "verbatim", "near_verbatim"])
    (where,) = np.nonzero(np.isin(columns["role"].astype(str), ("trained", "forget")))
    # null, where nothing was generated, counts as no match.
    extracted = columns["verbatim"].astype(bool) | (columns["near_verbatim"] == True)  # noqa: E712
    return {str(columns["id"][n]): bool(extracted[n]) for n in where}


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
    run: FinishedRun,
    buckets: dict[int, BucketScores],
    *,
    costed: Set[str],
    clusters: Mapping[str, int],
) -> dict[int, BucketTable]:
    path = run.folder / "audit" / "records.parquet"
    columns, costs = _read_scores(run.folder, _COLUMNS, costed=bool(costed))
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
            # Numbers of clusters are not negative.
            clusters=np.array(
                [clusters.get(one, -1 - n) for n, one in enumerate(ids)], dtype=np.int64
            ),
            verbatim=columns["verbatim"][where].astype(bool),
            near_verbatim=None
            if bucket.model.near_verbatim is None
            else columns["near_verbatim"][where].astype(bool),
            token_accuracy=columns["num_correct"][where] / columns["continuation_tokens"][where],
            log10_queries=np.array([math.inf if costs[i] is None else costs[i] for i in where])
            if bucket.bucket in costed
            else None,
        )
    return tables


def _read_scores(
    folder: Path, names: Sequence[str], *, costed: bool = False
) -> tuple[dict[str, NDArray[Any]], list[Any]]:
    """Return columns by name, and what drawing each document costs; empty unless asked."""
    path = folder / "audit" / "records.parquet"
    # Older records have no such column.
    wanted = [*names, _COST] if costed else [*names]
    try:
        rows = pq.read_table(pa.BufferReader(path.read_bytes()), columns=wanted)
        columns = {name: rows.column(name).to_numpy() for name in names}
        return columns, rows.column(_COST).to_pylist() if costed else []
    except OSError as error:
        raise RecordError(
            f"'{path}' cannot be read: {error.strerror or 'not a parquet file'}"
        ) from error
    except (pa.ArrowException, KeyError) as error:
        raise RecordError(
            f"'{path}' does not hold document scores. Audit the run again."
        ) from error
