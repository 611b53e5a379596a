"""Checks that the numbers of runs are comparable, and keeps the documents that they share."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np

from memguard.compare.audited import AuditedRun, Documents
from memguard.errors import RecordError

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
    """Return the runs with only those documents that no run of that seed removed.

    Shares by attacks stay those of the runs' own reports.

    Returns:
        The runs, and the number of documents left out, summed over seeds.
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
    costs, near = documents.log10_queries, documents.near_verbatim
    return replace(
        documents,
        ids=tuple(documents.ids[n] for n in where),
        clusters=documents.clusters[where],
        verbatim=documents.verbatim[where],
        near_verbatim=None if near is None else near[where],
        token_accuracy=documents.token_accuracy[where],
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
            identifier for identifier in run.documents[count].ids if identifier not in removed
        )
        for count, bucket in run.buckets.items()
        if bucket.role == role
    }
    return {bucket: kept for bucket, kept in ids.items() if kept}


def _describe_heldout(run: AuditedRun) -> str:
    training = run.training
    return f"{training.heldout_num_documents} documents ({training.heldout_num_tokens} tokens)"
