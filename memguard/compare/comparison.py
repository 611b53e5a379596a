"""Builds the comparison record from finished runs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memguard import __version__
from memguard.audit.statistics import compute_mcnemar, compute_paired_difference, correct_holm
from memguard.compare.audited import (
    AuditedRun,
    FinishedRun,
    check_comparable,
    keep_shared,
    load_audited_run,
)
from memguard.compare.front import build_front, recommend
from memguard.compare.sweep import Sweep, is_finished
from memguard.errors import RecordError
from memguard.records import (
    AuditReport,
    BucketScores,
    CanaryScore,
    Comparison,
    ComparisonCell,
    Cost,
    MatchedShare,
    ModelScores,
    PairedCanaries,
    PairedCounts,
    PairedResult,
    Rate,
    SettingResult,
    Utility,
    format_now,
)

# Paired tests: two settings on the same documents and canaries.


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Paired tests of each setting against the first one."""

    documents: list[PairedResult]
    canaries: list[PairedCanaries]


def pair_settings(runs: Sequence[AuditedRun]) -> Pairs:
    """Test each setting against the first one, seed by seed, on what both have trained.

    These are the trained buckets that both have, and the canaries. The control is left out: it was
    never trained, so a setting cannot prevent its memorization. Seeds are not pooled: the same
    document under two seeds is not two independent documents. Holm's correction is over all tests
    together.

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
    tests = [result.verbatim for result in documents]
    tests += [result.near_verbatim for result in documents if result.near_verbatim is not None]
    tests += [result.verbatim for result in canaries]
    corrected = iter(correct_holm([test.p_value for test in tests]))
    verbatim = [_correct(result.verbatim, next(corrected)) for result in documents]
    near_verbatim = [
        None if result.near_verbatim is None else _correct(result.near_verbatim, next(corrected))
        for result in documents
    ]
    return Pairs(
        documents=[
            result.model_copy(update={"verbatim": equal, "near_verbatim": near})
            for result, equal, near in zip(documents, verbatim, near_verbatim, strict=True)
        ],
        canaries=[
            result.model_copy(update={"verbatim": _correct(result.verbatim, next(corrected))})
            for result in canaries
        ],
    )


def _pair_documents(against: AuditedRun, setting: AuditedRun) -> Iterator[PairedResult]:
    """Compare bucket by bucket; a bucket's number of repetitions may differ between settings."""
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
                bounds=(0, 1),
                clusters=table.clusters,
            ),
        )


def _pair_canaries(against: AuditedRun, setting: AuditedRun) -> Iterator[PairedCanaries]:
    """Compare the trained canaries that both have; yields nothing if there are none."""
    mine, theirs = setting.canaries, against.canaries
    ids = sorted(mine.keys() & theirs.keys())
    if not ids:
        return
    bits = [_list_bits([scores[canary] for canary in ids]) for scores in (mine, theirs)]
    yield PairedCanaries(
        setting=setting.run.name,
        against=against.run.name,
        seed=setting.run.seed,
        num_canaries=len(ids),
        verbatim=_count(
            np.array([theirs[canary].verbatim for canary in ids]),
            np.array([mine[canary].verbatim for canary in ids]),
        ),
        exposure_bits_difference=None
        if bits[0] is None or bits[1] is None
        else compute_paired_difference(bits[0], bits[1], bounds=_find_bit_bounds(setting, against)),
    )


def _list_bits(canaries: Sequence[CanaryScore]) -> list[float] | None:
    """Return the exposure of each canary; None if one of them has no references to rank among."""
    bits = [canary.exposure_bits for canary in canaries if canary.exposure_bits is not None]
    return bits if len(bits) == len(canaries) else None


def _find_bit_bounds(*runs: AuditedRun) -> tuple[float, float]:
    """Return the lowest and highest exposure by rank among the references of any of the runs."""
    canaries = [run.report.canaries for run in runs]
    counts = [scores.num_ranked_references for scores in canaries if scores is not None]
    return (
        min(math.log2(count) - math.log2(count + 1) for count in counts),
        max(math.log2(count) for count in counts),
    )


def _count(against: NDArray[np.bool_], setting: NDArray[np.bool_]) -> PairedCounts:
    """Count the differences and test them; p values are not corrected yet."""
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


def build_comparison(sweep: Sweep, *, command: str) -> Comparison:
    """Compare the finished runs of a sweep.

    Args:
        sweep: a sweep whose runs are all finished.
        command: the command line, for the record.

    Raises:
        RecordError: a run is not finished, unreadable or not comparable.
    """
    return compare_runs(list_finished(sweep), name=sweep.name, command=command)


def list_finished(sweep: Sweep) -> list[FinishedRun]:
    """Return the runs of a sweep.

    Raises:
        RecordError: a run is not finished.
    """
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


def compare_runs(runs: Sequence[FinishedRun], *, name: str, command: str) -> Comparison:
    """Compare finished runs; the others are tested against the first.

    Args:
        runs: at least one; each pair of name and seed once.
        name: name of the comparison.
        command: the command line, for the record.

    Raises:
        RecordError: a run is unreadable or not comparable; the message names it and the reason.
    """
    if not runs:
        raise RecordError("a comparison needs at least one run; name their folders")
    audited = [load_audited_run(run) for run in runs]
    check_comparable(audited)
    shared, num_removed = keep_shared(audited)
    first, front, pairs = audited[0], build_front(shared), pair_settings(shared)
    return Comparison(
        name=name,
        tool_version=__version__,
        created=format_now(),
        command=command,
        documents_sha256=first.report.data.documents_sha256,
        continuation_tokens=first.report.method.continuation_tokens,
        settings=[_build_setting(run) for run in audited],
        base_extraction={
            str(count): _build_cell(first.report, bucket, bucket.base)
            for count, bucket in first.buckets.items()
            if bucket.base is not None
        },
        paired=pairs.documents,
        paired_canaries=pairs.canaries,
        num_removed=num_removed,
        front=front,
        recommendation=recommend(front),
        environment=_merge_environments(audited),
    )


def _build_setting(run: AuditedRun) -> SettingResult:
    training = run.training
    return SettingResult(
        name=run.run.name,
        seed=run.run.seed,
        run=run.run.folder.name,
        verdict=run.report.verdict,
        mitigations=training.mitigations,
        overrides=dict(run.run.overrides),
        utility=Utility(
            heldout_nll=run.heldout_nll,
            base_heldout_nll=run.base_heldout_nll,
            num_documents=training.heldout_num_documents,
            num_tokens=training.heldout_num_tokens,
        ),
        extraction={
            str(count): _build_cell(run.report, bucket, bucket.model)
            for count, bucket in run.buckets.items()
        },
        cost=Cost(
            train_s=training.train_s,
            num_steps=training.num_steps,
            num_supervised_tokens=training.num_supervised_tokens,
            dropped_fraction=training.dropped_fraction,
        ),
        membership=run.report.membership,
    )


def _build_cell(report: AuditReport, bucket: BucketScores, scores: ModelScores) -> ComparisonCell:
    """Return the results of a bucket by the scores of the model or of the base model."""
    cost, near, accuracy = None, scores.near_verbatim, scores.mean_token_accuracy
    is_base, costs = scores is bucket.base, report.find_cost(bucket.bucket)
    if costs is not None:
        cost = costs.base if is_base else costs.model
    gain = None if is_base else report.find_gain(bucket.bucket)
    attacks = [] if is_base else [row for row in report.attacks if row.bucket == bucket.bucket]
    return ComparisonCell(
        num_documents=scores.verbatim.num_documents,
        num_matched=scores.verbatim.num_matched,
        rate=scores.verbatim.rate,
        ci=scores.verbatim.ci,
        texts=scores.verbatim.texts,
        near_verbatim=None if near is None else _share(near),
        teacher_forced_90=_share(scores.teacher_forced_90),
        mean_token_accuracy=None if accuracy is None else accuracy.value,
        gain_minus_control=None if gain is None else gain.change_from_base_minus_control,
        attack_cost=cost,
        attacks=attacks,
    )


def _share(rate: Rate) -> MatchedShare:
    return MatchedShare(num_matched=rate.num_matched, rate=rate.rate, ci=rate.ci, texts=rate.texts)


def _merge_environments(runs: Sequence[AuditedRun]) -> dict[str, str]:
    """Return versions and hardware of the runs; all values where runs differ."""
    merged: dict[str, list[str]] = {}
    for run in runs:
        for key, value in run.report.environment.items():
            values = merged.setdefault(key, [])
            if value not in values:
                values.append(value)
    return {key: " | ".join(values) for key, values in merged.items()}
