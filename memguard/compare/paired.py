"""Paired tests: two settings on the same documents and canaries."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memguard.audit.statistics import compute_mcnemar, compute_paired_difference, correct_holm
from memguard.compare.audited import AuditedRun
from memguard.records import CanaryScore, PairedCanaries, PairedCounts, PairedResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Every setting against the first one."""

    documents: list[PairedResult]
    canaries: list[PairedCanaries]


def pair_settings(runs: Sequence[AuditedRun]) -> Pairs:
    """Test every setting against the first one, seed by seed, on what both have trained.

    That is each trained bucket both have, and the canaries. The control is left out: nobody trained
    it, so a setting cannot prevent its memorisation. Seeds are not pooled: the same document under
    two seeds is not two independent documents. Holm's correction is over all tests together.

    Args:
        runs: comparable runs (see `check_comparable`); the first one's name is the first setting.
    """
    first_name = runs[0].run.name
    firsts = {run.run.seed: run for run in runs if run.run.name == first_name}
    pairs = [
        (firsts[run.run.seed], run)
        for run in runs
        if run.run.name != first_name and run.run.seed in firsts
    ]
    documents = [result for pair in pairs for result in _pair_documents(*pair)]
    canaries = [result for pair in pairs for result in _pair_canaries(*pair)]
    tests = [one.verbatim for one in documents]
    tests += [one.near_verbatim for one in documents if one.near_verbatim is not None]
    tests += [one.verbatim for one in canaries]
    corrected = iter(correct_holm([test.p_value for test in tests]))
    verbatim = [_correct(one.verbatim, next(corrected)) for one in documents]
    near_verbatim = [
        None if one.near_verbatim is None else _correct(one.near_verbatim, next(corrected))
        for one in documents
    ]
    return Pairs(
        documents=[
            one.model_copy(update={"verbatim": equal, "near_verbatim": near})
            for one, equal, near in zip(documents, verbatim, near_verbatim, strict=True)
        ],
        canaries=[
            one.model_copy(update={"verbatim": _correct(one.verbatim, next(corrected))})
            for one in canaries
        ],
    )


def _pair_documents(against: AuditedRun, setting: AuditedRun) -> Iterator[PairedResult]:
    """Compare bucket by bucket: how often its documents were trained may be what differs."""
    counts = {bucket.bucket: count for count, bucket in setting.buckets.items() if count}
    for count, bucket in against.buckets.items():
        if bucket.bucket not in counts or not count:
            continue
        other, table = against.tables[count], setting.tables[counts[bucket.bucket]]
        if not table.ids:
            continue
        yield PairedResult(
            setting=setting.run.name,
            against=against.run.name,
            seed=setting.run.seed,
            num_repetitions=count,
            num_documents=len(table.ids),
            verbatim=_count(other.verbatim, table.verbatim),
            near_verbatim=None
            if other.near_verbatim is None or table.near_verbatim is None
            else _count(other.near_verbatim, table.near_verbatim),
            token_accuracy_difference=compute_paired_difference(
                table.token_accuracy,
                other.token_accuracy,
                clusters=table.clusters,
            ),
        )


def _pair_canaries(against: AuditedRun, setting: AuditedRun) -> Iterator[PairedCanaries]:
    """Compare the trained secrets of both; nothing where either has none."""
    mine, theirs = setting.canaries, against.canaries
    ids = sorted(mine.keys() & theirs.keys())
    if not ids:
        return
    bits = [_list_bits([scores[one] for one in ids]) for scores in (mine, theirs)]
    yield PairedCanaries(
        setting=setting.run.name,
        against=against.run.name,
        seed=setting.run.seed,
        num_canaries=len(ids),
        verbatim=_count(
            np.array([theirs[one].verbatim for one in ids]),
            np.array([mine[one].verbatim for one in ids]),
        ),
        exposure_bits_difference=None
        if bits[0] is None or bits[1] is None
        else compute_paired_difference(bits[0], bits[1]),
    )


def _list_bits(canaries: Sequence[CanaryScore]) -> list[float] | None:
    """Return the exposure of each; None where there were no references to rank one among."""
    bits = [one.exposure_bits for one in canaries if one.exposure_bits is not None]
    return bits if len(bits) == len(canaries) else None


def _count(against: NDArray[np.bool_], setting: NDArray[np.bool_]) -> PairedCounts:
    """Count and test; not corrected yet."""
    num_only_against = int((against & ~setting).sum())
    num_only_setting = int((setting & ~against).sum())
    p_value = compute_mcnemar(num_only_against, num_only_setting)
    return PairedCounts(
        num_only_against=num_only_against,
        num_only_setting=num_only_setting,
        p_value=p_value,
        p_holm=p_value,
    )


def _correct(counts: PairedCounts, p_holm: float) -> PairedCounts:
    return counts.model_copy(update={"p_holm": p_holm})
