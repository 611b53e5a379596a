"""Reads the report and document scores of finished runs, and checks that they are comparable."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
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
)
from memguard.records.audit_files import REPORT, SCORES, check_audit_file, load_audit_report
from memguard.records.run_files import has_trained, load_trained
from memguard.records.sealed import find_damage

_COLUMNS = [
    "id",
    "bucket",
    "num_correct",
    "continuation_tokens",
    "verbatim",
    "near_verbatim",
    "attack_log10_queries",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """Folder and name of a finished run."""

    name: str
    """The setting's name; the same for each of its seeds."""
    seed: int
    folder: Path
    overrides: Mapping[str, Any]
    """Settings that differ from the common run, besides mitigations; for display only."""

    @property
    def label(self) -> str:
        """Name of the run in messages."""
        return f"'{self.name}' (seed {self.seed})"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BucketTable:
    """The documents of one bucket, in order of their ids; all arrays are [num_documents]."""

    ids: tuple[str, ...]
    clusters: NDArray[np.int64]
    """Documents with the same number are near-duplicates; all differ if not recorded."""
    verbatim: NDArray[np.bool_]
    near_verbatim: NDArray[np.bool_] | None
    """Matches of generated text; None if no text was generated."""
    token_accuracy: NDArray[np.float64]
    """Share of the continuation tokens that are right."""
    log10_queries: NDArray[np.float64] | None
    """Attack cost of each document by the cheapest sampling scheme; inf if none can generate it.
    None if not measured."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AuditedRun:
    """A complete run, with the losses that a comparison needs."""

    run: FinishedRun
    report: AuditReport
    training: TrainingSummary
    heldout_nll: float
    base_heldout_nll: float
    buckets: dict[int, BucketScores]
    """Buckets by number of repetitions; 0 is the control. Background and held-out are left out."""
    tables: dict[int, BucketTable]
    """Scores per document of the same buckets."""
    removed: frozenset[str]
    """Ids of documents that a mitigation removed before training."""

    @property
    def canaries(self) -> dict[str, CanaryScore]:
        """The trained canaries by id; empty if there are none."""
        canaries = self.report.canaries.canaries if self.report.canaries else []
        return {canary.id: canary for canary in canaries if canary.was_trained}


def load_audited_run(run: FinishedRun) -> AuditedRun:
    """Read the audit results of a run.

    Raises:
        RecordError: the run is not audited or unreadable, or has no held-out losses, or the
            documents of a bucket were not trained equally often.
    """
    audit = run.folder / "audit"
    path = audit / REPORT
    if not path.exists():
        raise RecordError(
            f"{run.label} cannot be compared: '{path}' does not exist. Run the command that made "
            f"'{run.folder}' again, it continues with the audit; or run 'memguard audit' on it"
        )
    report = load_audit_report(audit)
    training = report.training
    if training is None or training.heldout_nll is None or training.base_heldout_nll is None:
        raise RecordError(
            f"{run.label} cannot be compared: '{run.folder}' has no loss of two or more held-out "
            "documents before and after training. Set 'data.heldout_documents' or keep a control, "
            "and train again."
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
    """Return the documents of a run; empty if memguard only audited a model."""
    path = run.folder / "manifest.jsonl"
    if has_trained(run.folder):
        written = load_trained(run.folder)
        for damage in find_damage(run.folder, {path.name: written.manifest}):
            raise RecordError(
                f"{run.label} cannot be compared: '{path}' {damage.what}. Run the command that "
                f"made '{run.folder}' again"
            )
    return load_manifest(path) if path.exists() else []


def find_extracted(folder: Path) -> dict[str, bool]:
    """Return for each audited document, trained or to be forgotten, if greedy decoding extracts it.

    Extraction is verbatim or near-verbatim. If the audit scored a sample, other documents are
    missing.

    Args:
        folder: folder of a finished run.

    Raises:
        RecordError: document scores are missing or damaged.
    """
    columns = _read_scores(folder, ["id", "role", "verbatim", "near_verbatim"])
    (where,) = np.nonzero(np.isin(columns["role"].astype(str), ("trained", "forget")))
    # null (no text was generated) counts as no match.
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
                "not trained equally often, or the repetitions were not recorded. Train the run "
                "to its end."
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
    columns = _read_scores(run.folder, _COLUMNS)
    # null: no sampling scheme can generate it, or the cost was not measured.
    log10_queries = np.nan_to_num(columns["attack_log10_queries"], nan=math.inf, posinf=math.inf)
    tables = {}
    for count, bucket in buckets.items():
        (where,) = np.nonzero(columns["bucket"] == bucket.bucket)
        where = where[np.argsort(columns["id"][where].astype(str), kind="stable")]
        ids = tuple(columns["id"][where])
        if len(ids) != bucket.model.verbatim.num_documents or len(set(ids)) != len(ids):
            raise RecordError(
                f"'{path}' does not belong to its report: bucket '{bucket.bucket}' has "
                f"{len(set(ids))} documents, not {bucket.model.verbatim.num_documents}. "
                "Audit the run again."
            )
        tables[count] = BucketTable(
            ids=ids,
            # Negative numbers do not occur as cluster numbers: such a document is its own cluster.
            clusters=np.array(
                [clusters.get(identifier, -1 - n) for n, identifier in enumerate(ids)],
                dtype=np.int64,
            ),
            verbatim=columns["verbatim"][where].astype(bool),
            near_verbatim=None
            if bucket.model.near_verbatim is None
            else columns["near_verbatim"][where].astype(bool),
            token_accuracy=columns["num_correct"][where] / columns["continuation_tokens"][where],
            log10_queries=log10_queries[where] if bucket.bucket in costed else None,
        )
    return tables


def _read_scores(folder: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return columns by name."""
    path = folder / "audit" / SCORES
    check_audit_file(path.parent, SCORES)
    try:
        rows = pq.read_table(pa.BufferReader(path.read_bytes()), columns=[*names])
        return {name: rows.column(name).to_numpy() for name in names}
    except OSError as error:
        raise RecordError(
            f"'{path}' cannot be read: {error.strerror or 'not a parquet file'}"
        ) from error
    except (pa.ArrowException, KeyError) as error:
        raise RecordError(
            f"'{path}' does not contain document scores. Audit the run again."
        ) from error


# Properties that runs must share to be compared.

# The loss before training is measured once per run. With the same weights and documents it differs
# only by rounding (thread count, device); with other documents it differs by far more.
_BASE_NLL_TOLERANCE = 0.01


def check_comparable(runs: Sequence[AuditedRun]) -> None:
    """Check that the numbers of all runs are comparable.

    All runs must have been audited in the same way and share a source. Runs with the same seed must
    also share documents, control, starting weights and held-out documents; another seed draws
    different ones, possibly from fewer sources. Documents that 'deduplicate' removed still count as
    given: such runs are compared on the documents that all of them trained (see `keep_shared`).

    If no seed is shared by all settings, all runs must have the same documents.

    Raises:
        RecordError: two runs are not comparable; names both and all their differences.
    """
    seen: dict[tuple[str, int], AuditedRun] = {}
    first_of_seed: dict[int, AuditedRun] = {}
    for run in runs:
        name, seed = run.run.name, run.run.seed
        if (name, seed) in seen:
            raise RecordError(f"{run.run.label} is given twice; compare each setting and seed once")
        seen[name, seed] = run
        _refuse(runs[0], run, list(_find_audit_differences(runs[0], run)))
        first = first_of_seed.setdefault(seed, run)
        _refuse(first, run, list(_find_document_differences(first, run)))
    _check_seeds_meet(runs)


def _check_seeds_meet(runs: Sequence[AuditedRun]) -> None:
    seeds: dict[str, set[int]] = defaultdict(set)
    for run in runs:
        seeds[run.run.name].add(run.run.seed)
    if set.intersection(*seeds.values()):
        return
    for run in runs:
        _refuse(runs[0], run, list(_find_document_differences(runs[0], run)))


def keep_shared(runs: Sequence[AuditedRun]) -> tuple[list[AuditedRun], int]:
    """Return the runs with tables of only those documents that no run of that seed removed.

    Returns:
        The runs, and the number of documents left out, summed over seeds.
    """
    removed: dict[int, set[str]] = defaultdict(set)
    for run in runs:
        removed[run.run.seed] |= run.removed
    kept = [
        replace(
            run,
            tables={
                count: _leave_out(table, removed[run.run.seed])
                for count, table in run.tables.items()
            },
        )
        for run in runs
    ]
    return kept, sum(map(len, removed.values()))


def _leave_out(table: BucketTable, removed: AbstractSet[str]) -> BucketTable:
    (where,) = np.nonzero([identifier not in removed for identifier in table.ids])
    if len(where) == len(table.ids):
        return table
    costs, near = table.log10_queries, table.near_verbatim
    return BucketTable(
        ids=tuple(table.ids[n] for n in where),
        clusters=table.clusters[where],
        verbatim=table.verbatim[where],
        near_verbatim=None if near is None else near[where],
        token_accuracy=table.token_accuracy[where],
        log10_queries=None if costs is None else costs[where],
    )


def _refuse(first: AuditedRun, other: AuditedRun, differences: list[str]) -> None:
    if differences:
        raise RecordError(
            f"{other.run.label} cannot be compared with {first.run.label}: "
            f"{'; '.join(differences)}. Train and audit both in the same way."
        )


def _find_audit_differences(first: AuditedRun, other: AuditedRun) -> Iterator[str]:
    for name in (
        "suite",
        "suite_version",
        "continuation_tokens",
        "prefix_tokens",
        "window",
        "max_edit_share",
        "dtype",
    ):
        here, there = getattr(other.report.method, name), getattr(first.report.method, name)
        if here != there:
            yield f"'{name}' is {here}, not {there}"
    if other.report.method.probes != first.report.method.probes:
        yield "its suite has other probes"
    if not set(other.report.data.sources) & set(first.report.data.sources):
        yield "its documents come from other sources"


def _find_document_differences(first: AuditedRun, other: AuditedRun) -> Iterator[str]:
    if other.report.data.documents_sha256 != first.report.data.documents_sha256:
        yield "it has other documents ('documents_sha256')"
    for role in ("control", "trained"):
        removed = first.removed | other.removed
        if _list_ids(other, role, removed) != _list_ids(first, role, removed):
            yield f"its {role} documents differ"
    if other.report.model.base_weights_sha256 != first.report.model.base_weights_sha256:
        yield "it started from other weights ('base_weights_sha256')"
    here, there = _describe_heldout(other), _describe_heldout(first)
    if here != there:
        yield f"its held-out loss is over {here}, not {there}"
    elif not math.isclose(
        other.base_heldout_nll, first.base_heldout_nll, rel_tol=_BASE_NLL_TOLERANCE
    ):
        yield (
            f"its held-out loss before training is {other.base_heldout_nll:.4f}, "
            f"not {first.base_heldout_nll:.4f}"
        )


def _list_ids(run: AuditedRun, role: str, removed: AbstractSet[str]) -> dict[str, tuple[str, ...]]:
    """Return ids by bucket name, because a setting may change the number of repetitions."""
    ids = {
        bucket.bucket: tuple(
            identifier for identifier in run.tables[count].ids if identifier not in removed
        )
        for count, bucket in run.buckets.items()
        if bucket.role == role
    }
    return {bucket: kept for bucket, kept in ids.items() if kept}


def _describe_heldout(run: AuditedRun) -> str:
    training = run.training
    return f"{training.heldout_num_documents} documents ({training.heldout_num_tokens} tokens)"
