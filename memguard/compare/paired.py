"""Paired tests: two settings on the same documents."""

from collections.abc import Sequence
from dataclasses import dataclass

from memguard.audit.statistics import compute_mcnemar, compute_mean, correct_holm
from memguard.compare.audited import AuditedRun, BucketTable
from memguard.records import PairedCounts, PairedResult


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """One setting beside the first one, in one bucket and with one seed."""

    setting: AuditedRun
    against: AuditedRun
    num_repetitions: int

    @property
    def tables(self) -> tuple[BucketTable, BucketTable]:
        """The bucket with the setting compared with, and with the setting."""
        return self.against.tables[self.num_repetitions], self.setting.tables[self.num_repetitions]


def pair_settings(runs: Sequence[AuditedRun]) -> list[PairedResult]:
    """Test every setting against the first one, seed by seed, on each trained bucket both have.

    The control is left out: nobody trained it, so a setting cannot prevent its memorisation.
    Seeds are not pooled: the same document under two seeds is not two independent documents.

    Args:
        runs: comparable runs (see `check_comparable`); the first one's name is the first setting.
    """
    first_name = runs[0].run.name
    firsts = {run.run.seed: run for run in runs if run.run.name == first_name}
    pairs = [
        _Pair(setting=run, against=firsts[run.run.seed], num_repetitions=count)
        for run in runs
        if run.run.name != first_name and run.run.seed in firsts
        for count in run.tables
        if count > 0 and count in firsts[run.run.seed].tables
    ]
    metrics = ("verbatim", "near_verbatim")
    tests = [_count(pair, metric) for pair in pairs for metric in metrics]
    corrected = correct_holm([test.p_value for test in tests])
    tests = [t.model_copy(update={"p_holm": p}) for t, p in zip(tests, corrected, strict=True)]
    return [
        _build_result(pair, verbatim=verbatim, near_verbatim=near_verbatim)
        for pair, verbatim, near_verbatim in zip(pairs, tests[::2], tests[1::2], strict=True)
    ]


def _count(pair: _Pair, metric: str) -> PairedCounts:
    """Count and test one metric; not corrected yet."""
    against, setting = (getattr(table, metric) for table in pair.tables)
    num_only_against = int((against & ~setting).sum())
    num_only_setting = int((setting & ~against).sum())
    p_value = compute_mcnemar(num_only_against, num_only_setting)
    return PairedCounts(
        num_only_against=num_only_against,
        num_only_setting=num_only_setting,
        p_value=p_value,
        p_holm=p_value,
    )


def _build_result(
    pair: _Pair, *, verbatim: PairedCounts, near_verbatim: PairedCounts
) -> PairedResult:
    against, setting = pair.tables
    return PairedResult(
        setting=pair.setting.run.name,
        against=pair.against.run.name,
        seed=pair.setting.run.seed,
        num_repetitions=pair.num_repetitions,
        num_documents=len(setting.ids),
        verbatim=verbatim,
        near_verbatim=near_verbatim,
        token_accuracy_difference=compute_mean(
            setting.token_accuracy - against.token_accuracy, bounds=(-1, 1)
        ),
    )
