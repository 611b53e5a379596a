"""What runs must share to stand side by side."""

import math
from collections.abc import Iterator, Sequence

from memguard.compare.audited import AuditedRun
from memguard.errors import RecordError

# The loss before training is measured once a run; the same weights and documents differ by rounding
# only (thread count, device), other documents by far more.
_BASE_NLL_TOLERANCE = 0.01


def check_comparable(runs: Sequence[AuditedRun]) -> None:
    """Refuse runs whose numbers do not answer the same question.

    All runs must have been audited in the same way and share a source. Runs with the same seed must
    also share documents, control, starting weights and held-out documents; another seed draws
    others, maybe from fewer sources.

    Raises:
        RecordError: saying which two runs and all that differs between them.
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
        "near_verbatim_threshold",
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
        yield "it was given other documents ('documents_sha256')"
    for role in ("control", "trained"):
        if _list_ids(other, role) != _list_ids(first, role):
            yield f"its {role} documents are other ones"
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


def _list_ids(run: AuditedRun, role: str) -> dict[str, tuple[str, ...]]:
    """Return ids by bucket name: the number of repetitions may be what a setting changes."""
    return {
        bucket.bucket: run.tables[count].ids
        for count, bucket in run.buckets.items()
        if bucket.role == role
    }


def _describe_heldout(run: AuditedRun) -> str:
    training = run.training
    return f"{training.heldout_num_documents} documents ({training.heldout_num_tokens} tokens)"
