"""Finished runs into one comparison record."""

from collections.abc import Sequence

from memguard import __version__
from memguard.compare.audited import AuditedRun, FinishedRun, load_audited_run
from memguard.compare.comparability import check_comparable, keep_shared
from memguard.compare.paired import pair_settings
from memguard.compare.pareto import build_front
from memguard.compare.recommendation import recommend
from memguard.compare.state import is_finished
from memguard.compare.sweep import Sweep
from memguard.errors import RecordError
from memguard.records import (
    AttackCostScores,
    AttackedBucket,
    Comparison,
    ComparisonCell,
    Cost,
    Interval,
    MatchedShare,
    ModelScores,
    Rate,
    SettingResult,
    Utility,
)


def build_comparison(sweep: Sweep, *, command: str) -> Comparison:
    """Put the finished runs of a sweep side by side.

    Args:
        sweep: with every run finished.
        command: what the user typed; shown in the record.

    Raises:
        RecordError: a run is not finished, unreadable or not comparable.
    """
    unfinished = [run.name for run in sweep.runs if not is_finished(run)]
    if unfinished:
        raise RecordError(
            f"'{sweep.name}' is not finished: {', '.join(unfinished)} left. Run the same command "
            "again; what is finished is kept."
        )
    runs = [
        FinishedRun(name=run.setting, seed=run.seed, folder=run.folder, overrides=run.overrides)
        for run in sweep.runs
    ]
    return compare_runs(runs, name=sweep.name, command=command)


def compare_runs(runs: Sequence[FinishedRun], *, name: str, command: str) -> Comparison:
    """Put finished runs side by side; the first is what the others are tested against.

    Args:
        runs: at least one; each pair of name and seed once.
        name: what to call the comparison.
        command: what the user typed; shown in the record.

    Raises:
        RecordError: a run is unreadable or not comparable; says which one and why.
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
        command=command,
        documents_sha256=first.report.data.documents_sha256,
        continuation_tokens=first.report.method.continuation_tokens,
        settings=[_build_setting(run) for run in audited],
        base_extraction={
            str(count): _build_cell(bucket.base, _find_base_cost(first, bucket.bucket))
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
        mitigations=training.mitigations,
        overrides=dict(run.run.overrides),
        utility=Utility(
            heldout_nll=run.heldout_nll,
            base_heldout_nll=run.base_heldout_nll,
            num_documents=training.heldout_num_documents,
            num_tokens=training.heldout_num_tokens,
        ),
        extraction={
            str(count): _build_cell(
                bucket.model,
                _find_cost(run, bucket.bucket),
                [attack for attack in run.report.attacks if attack.bucket == bucket.bucket],
                _find_gain(run, bucket.bucket),
            )
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


def _find_cost(run: AuditedRun, bucket: str) -> AttackCostScores | None:
    return next((one.model for one in run.report.attack_cost if one.bucket == bucket), None)


def _find_gain(run: AuditedRun, bucket: str) -> Interval | None:
    """Return what training added to token accuracy beyond the control's gain, where that is sound.

    Where the texts alone tell trained documents and control apart, the control says nothing of
    what other training would have added; and where accuracy did not rise, the control's fall is no
    gain.
    """
    if not run.report.is_blind_at_chance:
        return None
    measure = next(
        (
            one
            for one in run.report.measures
            if (one.probe, one.metric) == ("extraction", "token_accuracy")
        ),
        None,
    )
    if measure is None:
        return None
    found = next((one for one in measure.buckets if one.bucket == bucket), None)
    if found is None or found.counterfactual is None or found.counterfactual.ci is None:
        return None
    return found.counterfactual_minus_control if found.counterfactual.ci[0] > 0 else None


def _find_base_cost(run: AuditedRun, bucket: str) -> AttackCostScores | None:
    return next((one.base for one in run.report.attack_cost if one.bucket == bucket), None)


def _build_cell(
    scores: ModelScores,
    attack_cost: AttackCostScores | None,
    attacks: Sequence[AttackedBucket] = (),
    gain_minus_control: Interval | None = None,
) -> ComparisonCell:
    accuracy, near = scores.mean_token_accuracy, scores.near_verbatim
    return ComparisonCell(
        num_documents=scores.verbatim.num_documents,
        num_matched=scores.verbatim.num_matched,
        rate=scores.verbatim.rate,
        ci=scores.verbatim.ci,
        near_verbatim=None if near is None else _share(near),
        teacher_forced_90=_share(scores.teacher_forced_90),
        mean_token_accuracy=None if accuracy is None else accuracy.value,
        attack_cost=attack_cost,
        attacks=list(attacks),
        gain_minus_control=gain_minus_control,
    )


def _share(rate: Rate) -> MatchedShare:
    return MatchedShare(num_matched=rate.num_matched, rate=rate.rate, ci=rate.ci)


def _merge_environments(runs: Sequence[AuditedRun]) -> dict[str, str]:
    """Return what the runs ran on; where they differ, every value, since costs then differ too."""
    merged: dict[str, list[str]] = {}
    for run in runs:
        for key, value in run.report.environment.items():
            values = merged.setdefault(key, [])
            if value not in values:
                values.append(value)
    return {key: " | ".join(values) for key, values in merged.items()}
