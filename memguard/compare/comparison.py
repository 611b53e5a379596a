"""Builds the comparison record from finished runs, and lists all their numbers as rows."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, replace
from typing import Any

import numpy as np

from memguard import __version__
from memguard.compare.front import build_front
from memguard.compare.paired import pair_settings
from memguard.compare.recommendation import recommend
from memguard.compare.runs import (
    AuditedRun,
    Documents,
    FinishedRun,
    find_shared_seeds,
    load_audited_run,
)
from memguard.compare.sweep import Sweep, is_finished
from memguard.compare.utility import find_shared_tasks
from memguard.errors import RecordError, list_first
from memguard.records import ComparedRun, Comparison, Cost, MetricRow, ResultRow, Tables, format_now
from memguard.records.audit_files import RESULTS, check_audit_file
from memguard.records.comparison import HELDOUT_LOSS
from memguard.records.results import load_results
from memguard.records.utility import UTILITY

_SHOWN = {
    "extraction": {"verbatim", "near_verbatim", "teacher_forced_90", "token_accuracy"},
    "sampling": {
        *("never", "log10_queries", "within_queries", "within_limit", "log10_floor", "beyond_limit")
    },
    "attacks": {"best_any_answer"},
    "membership": {"auc"},
    "canaries": {"verbatim", "exposure_bits"},
    "heldout": {"nll"},
}
"""Metrics of a run that the comparison's page needs, by probe; also every attack's `any_answer`
and all metrics of benchmark tasks."""
_NAMED = 4
# The loss before training is measured once per run. With the same weights and documents it differs
# only by rounding (thread count, device); with other documents it differs by far more.
_BASE_NLL_TOLERANCE = 0.01
_SAME_METHOD = (
    *("suite", "suite_version", "continuation_tokens", "prefix_tokens", "window"),
    *("max_edit_share", "dtype"),
)
"""Fields of a report's method that are equal in comparable runs."""


def list_finished(sweep: Sweep) -> list[FinishedRun]:
    """Return the runs of a sweep; RecordError if one is not finished."""
    unfinished = [run.name for run in sweep.runs if not is_finished(run)]
    if unfinished:
        raise RecordError(
            f"'{sweep.name}' is not finished; missing: {', '.join(unfinished)}. Run the same "
            "command again; finished runs are kept."
        )
    return [
        FinishedRun(name=run.setting, seed=run.seed, folder=run.folder, overrides=run.overrides)
        for run in sweep.runs
    ]


def compare_runs(
    runs: Sequence[FinishedRun], *, name: str, command: str, utility: str = HELDOUT_LOSS
) -> Comparison:
    """Compare finished runs, each pair of name and seed once; all are tested against the first.

    ``utility`` is what front and recommendation take as such: ``heldout_nll`` or a task.
    RecordError names a run that is unreadable or not comparable, or lacks the task.
    """
    if not runs:
        raise RecordError("a comparison needs at least one run; name their folders")
    audited = [load_audited_run(run) for run in runs]
    _check_comparable(audited)
    shared, num_removed = _keep_shared(audited)
    tasks = find_shared_tasks(shared)
    chosen = tasks.choose_utility(utility)
    front, over_seeds = build_front(shared, tasks.shared, chosen)
    differences, tests = pair_settings(shared, tasks.shared)
    first, differ = audited[0], {False, True} <= {run.is_compiled for run in audited}
    metrics: dict[tuple[str, str, str], MetricRow] = {}
    for metric in (metric for run in audited for metric in run.report.tables.metrics):
        if metric.is_foreign or _is_shown(metric):
            metrics.setdefault((metric.probe, metric.metric, metric.parameters), metric)
    tables = Tables(
        results=(*(row for run in audited for row in _list_shown(run)), *differences, *over_seeds),
        metrics=tuple(metrics.values()),
        buckets=tuple(first.buckets.values()),
        tests=tuple(tests),
    )
    return Comparison(
        name=name,
        tool_version=__version__,
        created=format_now(),
        command=command,
        documents_sha256=first.report.data.documents_sha256,
        continuation_tokens=first.report.method.continuation_tokens,
        answers=first.report.method.answers,
        runs=[_build_run(run, differ=differ) for run in audited],
        heldout_num_tokens=first.training.heldout_num_tokens,
        num_removed=num_removed,
        utility=chosen,
        tasks=tasks.shared,
        tasks_left_out=list(tasks.left_out.values()),
        front=front,
        recommendation=recommend(front, tables, chosen),
        environment=_merge_environments(audited),
        tables=tables,
    )


def _is_shown(row: ResultRow | MetricRow) -> bool:
    is_named = row.metric == "any_answer" or row.metric in _SHOWN.get(row.probe, ())
    return is_named or row.probe == UTILITY


def _list_shown(run: AuditedRun) -> Iterator[ResultRow]:
    """Yield the rows of a run that the page needs, with its setting and seed."""
    others = {bucket.bucket for bucket in run.report.tables.buckets}
    others -= {bucket.bucket for bucket in run.buckets.values()}
    foreign = {metric.probe for metric in run.report.tables.metrics if metric.is_foreign}
    for row in run.report.tables.results:
        is_there = row.probe == "heldout" or row.bucket not in others
        is_shown = row.probe in foreign or _is_shown(row)
        if is_there and row.step is None and is_shown:
            yield replace(row, setting=run.run.name, seed=run.run.seed)


COMPILE = "train.compile"
"""The setting by which runs differ that were compiled and that were not."""


def describe_compiled(runs: Sequence[ComparedRun]) -> str | None:
    """Return a sentence that names the settings whose runs were compiled, if others were not."""
    names: dict[bool, list[str]] = {True: [], False: []}
    for run in runs:
        if isinstance(run.overrides.get(COMPILE), bool):
            names[run.overrides[COMPILE]].append(f"'{run.setting}' (seed {run.seed})")
    if not (names[True] and names[False]):
        return None
    return (
        f"settings differ in '{COMPILE}': {list_first(names[True], _NAMED)} were compiled, "
        f"{list_first(names[False], _NAMED)} were not. Compiled kernels round in other places; set "
        f"'{COMPILE}' for all runs to exclude that"
    )


def _build_run(run: AuditedRun, *, differ: bool) -> ComparedRun:
    """Return the record of a run; ``differ``: `auto` compiled some of the runs and not others."""
    training = run.training
    chosen = {COMPILE: run.is_compiled} if differ and run.is_compiled is not None else {}
    return ComparedRun(
        setting=run.run.name,
        seed=run.run.seed,
        run=run.run.folder.name,
        doses={bucket.bucket: count for count, bucket in run.buckets.items()},
        verdict=run.report.verdict,
        mitigations=training.mitigations,
        overrides={**run.run.overrides, **chosen},
        cost=Cost(
            train_s=training.train_s,
            num_steps=training.num_steps,
            num_supervised_tokens=training.num_supervised_tokens,
            dropped_fraction=training.dropped_fraction,
        ),
    )


def list_comparison_rows(comparison: Comparison, runs: Sequence[FinishedRun]) -> list[ResultRow]:
    """Return every row of every run with its setting and seed, and those that compare settings."""
    rows: list[ResultRow] = []
    for run in runs:
        audit = run.folder / "audit"
        check_audit_file(audit, RESULTS)
        rows += [
            replace(row, setting=run.name, seed=run.seed) for row in load_results(audit / RESULTS)
        ]
    return rows + [
        row
        for row in comparison.tables.results
        if row.seed is None or (row.against or "").startswith("setting:")
    ]


def _merge_environments(runs: Sequence[AuditedRun]) -> dict[str, str]:
    """Return versions and hardware of the runs; all values where runs differ."""
    merged: dict[str, dict[str, None]] = {}
    for run in runs:
        for key, value in run.report.environment.items():
            merged.setdefault(key, {})[value] = None
    return {key: " | ".join(values) for key, values in merged.items()}


# -- what runs must share --------------------------------------------------------------------------


def _check_comparable(runs: Sequence[AuditedRun]) -> None:
    """Check that the numbers of all runs are comparable; an error names two and what differs.

    All runs must have been audited in the same way and share a source. Runs with the same seed must
    also share documents, control, starting weights and held-out documents; another seed draws
    different ones, possibly from fewer sources. Documents that 'deduplicate' removed still count as
    given: such runs are compared on the documents that all of them trained (see `_keep_shared`). If
    no seed is shared by all settings, all runs must have the same documents.
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
    for run in () if find_shared_seeds(runs) else runs:
        _refuse(runs[0], run, list(_find_document_differences(runs[0], run)))


def _keep_shared(runs: Sequence[AuditedRun]) -> tuple[list[AuditedRun], int]:
    """Return runs with the documents that no run of that seed removed; how many others, over seeds.

    Shares by attacks stay those of the runs' own reports.
    """
    removed: dict[int, set[str]] = defaultdict(set)
    for run in runs:
        removed[run.run.seed] |= run.removed
    kept = [
        replace(
            run,
            documents={
                count: _leave_out(documents, removed[run.run.seed])
                for count, documents in run.documents.items()
            },
        )
        for run in runs
    ]
    return kept, sum(map(len, removed.values()))


def _leave_out(documents: Documents, removed: AbstractSet[str]) -> Documents:
    (where,) = np.nonzero([identifier not in removed for identifier in documents.ids])
    names = [each.name for each in fields(documents)]
    arrays: dict[str, Any] = {
        name: value[where]
        for name in names
        if isinstance(value := getattr(documents, name), np.ndarray)
    }
    return replace(documents, ids=tuple(documents.ids[n] for n in where), **arrays)


def _refuse(first: AuditedRun, other: AuditedRun, differences: list[str]) -> None:
    if differences:
        raise RecordError(
            f"{other.run.label} cannot be compared with {first.run.label}: "
            f"{'; '.join(differences)}. Train and audit both in the same way."
        )


def _find_audit_differences(first: AuditedRun, other: AuditedRun) -> Iterator[str]:
    for name in _SAME_METHOD:
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
            identifier for identifier in run.documents[count].ids if identifier not in removed
        )
        for count, bucket in run.buckets.items()
        if bucket.role == role
    }
    return {bucket: kept for bucket, kept in ids.items() if kept}


def _describe_heldout(run: AuditedRun) -> str:
    training = run.training
    return f"{training.heldout_num_documents} documents ({training.heldout_num_tokens} tokens)"
