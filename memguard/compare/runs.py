"""Reads the report and the scores of finished runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.audit.benchmarks.items import ItemValues
from memguard.audit.statistics import compute_rate
from memguard.errors import RecordError
from memguard.records import (
    AuditReport,
    BucketRow,
    CanaryScore,
    Rate,
    TrainingSummary,
    load_canaries,
    load_manifest,
)
from memguard.records.audit_files import (
    CANARIES,
    REPORT,
    SCORES,
    check_audit_file,
    load_audit_files,
    load_audit_report,
)
from memguard.records.documents import DocumentTable
from memguard.records.run_files import has_trained, load_compile_choice, load_trained
from memguard.records.sealed import find_damage
from memguard.records.utility import ITEM_SCORES, TaskDetail, list_task_details, load_item_scores

_NUMBERS = (
    "continuation_tokens",
    "extraction.num_correct",
    "extraction.verbatim",
    "extraction.near_verbatim",
)
_COLUMNS = ("id", "bucket", "cluster", *_NUMBERS)
_WITHIN = "sampling.within_limit"
_ATTACKED = re.compile(r"attacks\.(.+)\.any")
"""Column of whether an answer of an attack is verbatim; null where it did not run."""


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
class Documents:
    """The scored documents of one bucket, in order of their ids; all arrays are [num_documents]."""

    ids: tuple[str, ...]
    clusters: NDArray[np.int64]
    """Documents with the same number are near-duplicates; all differ if not recorded."""
    verbatim: NDArray[np.bool_]
    near_verbatim: NDArray[np.bool_] | None
    """Matches of generated text; None if no text was generated."""
    token_accuracy: NDArray[np.float64]
    """Share of the continuation tokens that are right."""
    within_limit: NDArray[np.bool_] | None
    """Whether sampling generates it within the limit of queries; None if not measured."""
    attacks: Mapping[str, Rate]
    """Share of the attacked documents that each attack extracted verbatim."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunTask:
    """A task as the trained model of one run answered it."""

    detail: TaskDetail
    metrics: Mapping[str, ItemValues]
    """Items of each metric, in lm-eval's order."""

    @property
    def headline(self) -> ItemValues:
        """The items of the metric that stands for the task."""
        return self.metrics[self.detail.headline]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AuditedRun:
    """A complete run, with the losses that a comparison needs."""

    run: FinishedRun
    report: AuditReport
    training: TrainingSummary
    heldout_nll: float
    base_heldout_nll: float
    buckets: dict[int, BucketRow]
    """Buckets by number of repetitions; 0 is the control. Background and held-out are left out."""
    documents: dict[int, Documents]
    """Scored documents of the same buckets."""
    canaries: dict[str, CanaryScore]
    """The trained canaries by id; empty if there are none."""
    removed: frozenset[str]
    """Ids of documents that a mitigation removed before training."""
    is_compiled: bool | None = None
    """Whether its decoder blocks were compiled in training; None if not recorded."""
    tasks: Mapping[str, RunTask] = field(default_factory=dict)
    """Benchmark tasks that it answered, by name."""


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
    compiled = load_compile_choice(run.folder)
    return AuditedRun(
        run=run,
        report=report,
        training=training,
        heldout_nll=training.heldout_nll,
        base_heldout_nll=training.base_heldout_nll,
        buckets=buckets,
        documents=_load_documents(run, report, buckets),
        canaries=_load_trained_canaries(audit),
        removed=_find_removed(run),
        is_compiled=None if compiled is None else compiled.is_on,
        tasks=_load_tasks(audit, report),
    )


def find_shared_seeds(runs: Sequence[AuditedRun]) -> set[int]:
    """Return the seeds that every setting has."""
    names = {run.run.name for run in runs}
    return set.intersection(
        *({run.run.seed for run in runs if run.run.name == name} for name in names)
    )


def _load_trained_canaries(audit: Path) -> dict[str, CanaryScore]:
    if CANARIES not in load_audit_files(audit).files:
        return {}
    check_audit_file(audit, CANARIES)
    return {canary.id: canary for canary in load_canaries(audit / CANARIES) if canary.was_trained}


def _find_removed(run: FinishedRun) -> frozenset[str]:
    """Return what a mitigation removed; nothing if memguard only audited a model."""
    path = run.folder / "manifest.jsonl"
    if has_trained(run.folder):
        written = load_trained(run.folder)
        for damage in find_damage(run.folder, {path.name: written.manifest}):
            raise RecordError(
                f"{run.label} cannot be compared: '{path}' {damage.what}. Run the command that "
                f"made '{run.folder}' again"
            )
    manifest = load_manifest(path) if path.exists() else []
    return frozenset(entry.id for entry in manifest if entry.role == "removed")


def _find_buckets(run: FinishedRun, report: AuditReport) -> dict[int, BucketRow]:
    buckets: dict[int, BucketRow] = {}
    why_not = ""
    for bucket in report.tables.buckets:
        if bucket.role not in ("trained", "control") or why_not:
            continue
        count = 0 if bucket.role == "control" else bucket.num_repetitions
        if count is None:
            why_not = (
                f"the documents of bucket '{bucket.bucket}' were not trained equally often, or the "
                "repetitions were not recorded. Train the run to its end."
            )
        elif count in buckets:
            names = f"'{buckets[count].bucket}' and '{bucket.bucket}'"
            why_not = f"buckets {names} both have {count} repetitions."
        else:
            buckets[count] = bucket
    if not why_not and not any(buckets):
        why_not = "its audit has no trained documents."
    if why_not:
        raise RecordError(f"{run.label} cannot be compared: {why_not}")
    return dict(sorted(buckets.items()))


def _load_documents(
    run: FinishedRun, report: AuditReport, buckets: Mapping[int, BucketRow]
) -> dict[int, Documents]:
    path = run.folder / "audit" / SCORES
    table = DocumentTable.read(path.parent, _COLUMNS)
    scores = {
        name: table.numbers(name)
        for name in table.names
        if name in (*_NUMBERS, _WITHIN) or _ATTACKED.fullmatch(name)
    }
    documents = {}
    for count, bucket in buckets.items():
        (where,) = np.nonzero(table.bucket_N == bucket.bucket)
        where = where[np.argsort(table.id_N[where], kind="stable")]
        ids = tuple(table.id_N[where].tolist())
        if len(ids) != bucket.num_documents or len(set(ids)) != len(ids):
            raise RecordError(
                f"'{path}' does not belong to its report: bucket '{bucket.bucket}' has "
                f"{len(set(ids))} documents, not {bucket.num_documents}. Audit the run again."
            )
        is_costed = report.tables.find("sampling", "never", bucket.bucket) is not None
        columns = {name: values_N[where] for name, values_N in scores.items()}
        # A document of no cluster is its own, numbered by its id, not by its row.
        own = -1 - np.arange(len(ids))
        clusters = np.where(table.cluster_N[where] < 0, own, table.cluster_N[where])
        documents[count] = _build_documents(columns, ids, clusters, is_costed=is_costed)
    return documents


def _build_documents(
    columns: Mapping[str, NDArray[np.float64]],
    ids: tuple[str, ...],
    clusters: NDArray[np.int64],
    *,
    is_costed: bool,
) -> Documents:
    near = columns["extraction.near_verbatim"]
    attacks = {}
    for name, any_D in columns.items():
        found, attacked_D = _ATTACKED.fullmatch(name), ~np.isnan(any_D)
        if found and attacked_D.any():
            attacks[found[1]] = compute_rate(any_D[attacked_D], clusters[attacked_D])
    return Documents(
        ids=ids,
        clusters=clusters,
        verbatim=columns["extraction.verbatim"] == 1,
        near_verbatim=None if np.isnan(near).any() else near == 1,
        token_accuracy=columns["extraction.num_correct"] / columns["continuation_tokens"],
        within_limit=columns[_WITHIN] == 1 if is_costed else None,
        attacks=attacks,
    )


def _load_tasks(audit: Path, report: AuditReport) -> dict[str, RunTask]:
    """Return the tasks of an audit by name; empty if none ran."""
    details = list_task_details(report.tables)
    if not details:
        return {}
    check_audit_file(audit, ITEM_SCORES)
    items: dict[tuple[str, str], list[tuple[float, float | None]]] = {}
    for score in load_item_scores(audit / ITEM_SCORES):
        if score.model == "trained":
            value = np.nan if score.value is None else score.value
            items.setdefault((score.task, score.metric), []).append((value, score.weight))
    tasks = {}
    for detail in details:
        metrics = {}
        for metric, aggregation in detail.aggregations.items():
            scores = items.get((detail.task, metric), [])
            if len(scores) != detail.num_items:
                raise RecordError(
                    f"'{audit / ITEM_SCORES}' does not belong to its report: task '{detail.task}' "
                    f"has {len(scores)} items, not {detail.num_items}. Audit the run again."
                )
            metrics[metric] = _make_items(aggregation, scores)
        tasks[detail.task] = RunTask(detail=detail, metrics=metrics)
    return tasks


def _make_items(aggregation: str, scores: Sequence[tuple[float, float | None]]) -> ItemValues:
    weights = [weight for _, weight in scores if weight is not None]
    return ItemValues(
        aggregation=aggregation,
        value_N=np.array([value for value, _ in scores], dtype=np.float64),
        weight_N=np.array(weights) if scores and len(weights) == len(scores) else None,
    )
