"""Rules that derive new settings from an audit's verdict.

    rule           applies if                                       changes
    remove copies  half of the extracted documents have a copy      deduplicate
    k of a slice   extraction starts at some number of repetitions  goldfish: k_by_dose from there
    lower k        documents of all doses are extracted             goldfish: k 4, then 3, then 2
    fewer epochs   documents are extracted at k = 2                 half the epochs, at least one

The first rule that applies is used. Only one change is made at a time, so that its effect can be
measured. Nothing is changed if nothing was extracted, or if the control or the base model shows the
same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memguard.config import GoldfishConfig, MitigationConfig, RunConfig
from memguard.config.mitigations import DeduplicateConfig, find_mitigation
from memguard.records import AuditReport, ResultRow

_LADDER = (8, 4, 3, 2)
"""Values of k, in order of increasing share of dropped labels."""
_FIRST_K = 4
_LOWEST_K = _LADDER[-1]
_GENTLE_K = 32
"""k of documents that are not extracted, if others need goldfish loss: drops 3 in 100 labels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """Changed settings for a new training."""

    settings: Mapping[str, Any]
    """Dotted settings and their new values."""
    change: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """Copies that 'deduplicate' would remove from a run."""

    similarity: float | Literal["exact"]
    num_copies: int
    num_extracted: int
    """Documents that any probe extracted."""
    num_extracted_with_copy: int
    """Extracted documents that are a copy or have one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Input of the rules."""

    config: RunConfig
    report: AuditReport
    copies: Copies | None = None
    """None if 'deduplicate' was on or cannot be used."""


def find_fix(found: Findings) -> Fix | None:
    """Return the change to make to a run; None if none is needed or no rule applies."""
    if not found.report.verdict.may_be_fixed:
        return None
    fixes = (rule(found) for rule in _RULES)
    return next((fix for fix in fixes if fix), None)


def _remove_copies(found: Findings) -> Fix | None:
    """Train one document of each group of copies, without cost in utility."""
    copies = found.copies
    if copies is None or not copies.num_copies:
        return None
    if 2 * copies.num_extracted_with_copy < copies.num_extracted:
        return None
    entry = DeduplicateConfig(name="deduplicate", similarity=copies.similarity)
    return _change_mitigations(
        [*found.config.mitigations, entry],
        f"deduplicate: {copies.num_copies:,} copies are not trained",
        f"{copies.num_extracted_with_copy:,} of the {copies.num_extracted:,} documents that are "
        "extracted were trained in several copies",
    )


def _change_mitigations(after: Sequence[MitigationConfig], change: str, why: str) -> Fix:
    settings = {"mitigations": [mitigation.model_dump(mode="json") for mitigation in after]}
    return Fix(settings=settings, change=change, why=why)


def _lower_k_of_slice(found: Findings) -> Fix | None:
    """Lower k for the doses at which documents are extracted, and keep it for the others."""
    before, dose = found.config.mitigations, _find_extracted_dose(found.report)
    if dose is None:
        return None
    is_new = _find_goldfish(found.config) is None
    goldfish = _find_goldfish(found.config) or GoldfishConfig(name="goldfish", k=_GENTLE_K)
    by_dose = goldfish.k_by_dose
    below = {other: k for other, k in by_dose.items() if other < dose}
    now = by_dose.get(dose, min(below.values(), default=goldfish.k))
    lower = [_FIRST_K] if is_new else [k for k in _LADDER if k < now]
    if not lower:
        return None
    above = {other: k for other, k in by_dose.items() if other > dose and k < lower[0]}
    changed = goldfish.model_copy(update={"k_by_dose": {**below, dose: lower[0], **above}})
    after = [changed if isinstance(each, GoldfishConfig) else each for each in before]
    after += [changed] if is_new else []
    return _change_mitigations(
        after,
        f"goldfish k of documents trained {dose} times or more: "
        f"{'none' if is_new else now} -> {lower[0]}{f', of others {_GENTLE_K}' if is_new else ''}",
        "from that dose on, documents are extracted beyond the control; below it they are not",
    )


def _find_extracted_dose(report: AuditReport) -> int | None:
    """Return the lowest dose with extraction above the control; None if all doses have it or none.

    A dose is a number of repetitions.
    """
    control = report.tables.control
    ceiling = None if control is None else _find_greedy_rate(report, control.bucket)
    if ceiling is None or ceiling.high is None or not report.dose_response:
        return None
    rates = {
        bucket.num_repetitions: _find_greedy_rate(report, bucket.bucket)
        for bucket in report.tables.buckets
        if bucket.role == "trained" and bucket.num_repetitions
    }
    doses = sorted(
        dose
        for dose, rate in rates.items()
        if rate is not None and rate.low is not None and rate.low > ceiling.high
    )
    return doses[0] if doses and len(doses) < len(rates) else None


def _find_greedy_rate(report: AuditReport, bucket: str) -> ResultRow | None:
    """Return the near-verbatim rate of a bucket; the verbatim one if no text was generated."""
    near = report.tables.find("extraction", "near_verbatim", bucket)
    if near is not None and near.is_known:
        return near
    return report.tables.find("extraction", "verbatim", bucket)


def _lower_k(found: Findings) -> Fix | None:
    if _find_extracted_dose(found.report) is not None:
        return None  # k of that slice is at its lowest, and a lower k does not help the others
    before, goldfish = found.config.mitigations, _find_goldfish(found.config)
    if goldfish is None:
        k, was, why = _FIRST_K, "none", "a label that is never learned interrupts the greedy text"
        after = [*before, GoldfishConfig(name="goldfish", k=k)]
    else:
        lower = [k for k in _LADDER if k < goldfish.k]
        if not lower:
            return None
        k, was = lower[0], str(goldfish.k)
        why = f"with k {was}, documents are still extracted; a lower k drops more labels"
        by_dose = {dose: other for dose, other in goldfish.k_by_dose.items() if other < k}
        changed = goldfish.model_copy(update={"k": k, "k_by_dose": by_dose})
        after = [changed if mitigation is goldfish else mitigation for mitigation in before]
    return _change_mitigations(after, f"goldfish k: {was} -> {k}", why)


def _halve_epochs(found: Findings) -> Fix | None:
    config = found.config
    goldfish, epochs = _find_goldfish(config), config.train.epochs
    # In a study the numbers of repetitions define the experiment and must not change.
    if goldfish is None or goldfish.k > _LOWEST_K or epochs == 1 or config.data.study is not None:
        return None
    if config.train.max_steps is not None:
        return None  # 'max_steps' may end the training before fewer epochs would
    return Fix(
        settings={"train.epochs": epochs // 2},
        change=f"train.epochs: {epochs} -> {epochs // 2}",
        why=f"goldfish already drops every second label (k {_LOWEST_K}); the remaining option is "
        "to train the documents less often",
    )


def _find_goldfish(config: RunConfig) -> GoldfishConfig | None:
    return find_mitigation(config.mitigations, GoldfishConfig)


_RULES: tuple[Callable[[Findings], Fix | None], ...] = (
    _remove_copies,
    _lower_k_of_slice,
    _lower_k,
    _halve_epochs,
)
