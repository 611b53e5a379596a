"""Paired tests: two settings on the same documents, canaries and items of benchmark tasks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.audit.benchmarks.items import find_kind, subtract_items
from memguard.audit.benchmarks.rows import DIFFERENCE_METHODS, NO_ITEM_NUMBERS
from memguard.audit.metrics import count_clusters
from memguard.audit.statistics import compute_mcnemar, compute_paired_difference, correct_holm
from memguard.compare.runs import AuditedRun
from memguard.records import SECRETS, CanaryScore, ComparedTask, ResultRow, TestRow, fill_row
from memguard.records.utility import ITEMS, UTILITY


def pair_settings(
    runs: Sequence[AuditedRun], tasks: Sequence[ComparedTask] = ()
) -> tuple[list[ResultRow], list[TestRow]]:
    """Test each setting against the first one, seed by seed, on what both have trained.

    These are the trained buckets that both have, the canaries, and the items of tasks. The control
    is left out: it was never trained, so a setting cannot prevent its memorization. Seeds are not
    pooled: the same document under two seeds is not two independent documents. Holm's correction is
    over all tests together. Tasks are tested by their headline metric alone: others repeat it.

    Returns:
        Differences of setting minus first setting, and McNemar's tests of those of rates; of other
        values of tasks a paired t test, or one by a paired bootstrap.
    """
    first_name = runs[0].run.name
    firsts = {run.run.seed: run for run in runs if run.run.name == first_name}
    pairs = [
        (firsts[run.run.seed], run)
        for run in runs
        if run.run.name != first_name and run.run.seed in firsts
    ]
    found = [one for pair in pairs for one in _pair_documents(*pair)]
    found += [one for pair in pairs for one in _pair_canaries(*pair)]
    found += [one for pair in pairs for task in tasks for one in _pair_items(*pair, task)]
    tests = [test for _, test in found if test is not None and test.p_value is not None]
    corrected = correct_holm([test.p_value or 0.0 for test in tests])
    return [row for row, _ in found], [
        replace(test, p_holm=p_holm) for test, p_holm in zip(tests, corrected, strict=True)
    ]


_PLACE = (
    *("setting", "seed", "against", "probe", "metric", "parameters", "bucket"),
    "num_documents",
)
_Paired = Iterator[tuple[ResultRow, TestRow | None]]
"""Differences, those of rates with their test; p values are not corrected yet."""


def _pair_documents(against: AuditedRun, setting: AuditedRun) -> _Paired:
    """Compare bucket by bucket; a bucket's number of repetitions may differ between settings."""
    counts = {bucket.bucket: count for count, bucket in setting.buckets.items() if count}
    for count, bucket in against.buckets.items():
        if bucket.bucket not in counts or not count:
            continue
        other, mine = against.documents[count], setting.documents[counts[bucket.bucket]]
        if not mine.ids:
            continue
        row = _start_row(against, setting, "extraction", f"(trained {count} times)", len(mine.ids))
        yield _compare(row, other.verbatim, mine.verbatim)
        near = replace(row, metric="near_verbatim")
        if other.near_verbatim is None or mine.near_verbatim is None:
            yield fill_row(near, None, "", why_not="one of the two runs generated no text"), None
        else:
            yield _compare(near, other.near_verbatim, mine.near_verbatim)
        difference = compute_paired_difference(
            mine.token_accuracy, other.token_accuracy, bounds=(0, 1), clusters=mine.clusters
        )
        num_clusters = count_clusters(mine.clusters)
        accuracy = replace(row, metric="token_accuracy", num_clusters=num_clusters)
        yield fill_row(accuracy, difference, "jackknife"), None


def _start_row(
    against: AuditedRun, setting: AuditedRun, probe: str, bucket: str, num_documents: int
) -> ResultRow:
    return ResultRow(
        setting=setting.run.name,
        seed=setting.run.seed,
        against=f"setting:{against.run.name}",
        probe=probe,
        metric="verbatim",
        statistic="difference",
        bucket=bucket,
        num_documents=num_documents,
    )


def _pair_canaries(against: AuditedRun, setting: AuditedRun) -> _Paired:
    """Compare the trained canaries that both have; yields nothing if there are none."""
    mine, theirs = setting.canaries, against.canaries
    ids = sorted(mine.keys() & theirs.keys())
    if not ids:
        return
    row = _start_row(against, setting, "canaries", SECRETS, len(ids))
    verbatim = [np.array([scores[one].verbatim for one in ids]) for scores in (theirs, mine)]
    yield _compare(row, *verbatim)
    bits = [_list_bits([scores[one] for one in ids]) for scores in (mine, theirs)]
    difference = None
    if bits[0] is not None and bits[1] is not None:
        bounds = _find_bit_bounds(setting, against)
        difference = compute_paired_difference(bits[0], bits[1], bounds=bounds)
    why_not = "too few references of the same length in one of the runs"
    exposure = replace(row, metric="exposure_bits")
    yield fill_row(exposure, difference, "jackknife", why_not=why_not), None


def _list_bits(canaries: Sequence[CanaryScore]) -> list[float] | None:
    """Return the exposure of each canary; None if one of them has no references to rank among."""
    bits = [canary.exposure_bits for canary in canaries if canary.exposure_bits is not None]
    return bits if len(bits) == len(canaries) else None


def _find_bit_bounds(*runs: AuditedRun) -> tuple[float, float]:
    """Return the lowest and highest exposure by rank among the references of any of the runs."""
    details = [run.report.tables.find_detail("canaries") for run in runs]
    counts = [detail["num_ranked_references"] for detail in details if detail is not None]
    return (
        min(math.log2(count) - math.log2(count + 1) for count in counts),
        max(math.log2(count) for count in counts),
    )


def _pair_items(against: AuditedRun, setting: AuditedRun, task: ComparedTask) -> _Paired:
    """Compare all metrics of a task item by item; the headline metric is tested."""
    detail = task.detail
    items, other = (run.tasks[detail.task].metrics for run in (setting, against))
    for metric in detail.aggregations:
        row = replace(
            _start_row(against, setting, UTILITY, ITEMS, detail.num_items),
            metric=metric,
            parameters=detail.parameters,
        )
        kind = find_kind([items[metric], other[metric]])
        difference = None
        if all(_is_of_report(run, task, metric) for run in (setting, against)):
            seed = setting.run.seed
            difference = subtract_items([(items[metric], other[metric])], kind, seed=seed)
        interval = None if difference is None else difference.interval
        filled = fill_row(row, interval, DIFFERENCE_METHODS[kind], why_not=NO_ITEM_NUMBERS)
        test = None
        if difference is not None and metric == detail.headline:
            test = _make_test(
                row,
                test=difference.test,
                num_only_here=difference.num_only_first,
                num_only_against=difference.num_only_second,
                statistic=difference.statistic,
                p_value=difference.p_value,
            )
        yield filled, test


def _is_of_report(run: AuditedRun, task: ComparedTask, metric: str) -> bool:
    """Return whether the items give the value of the report, which lm-eval computed."""
    row = task.detail.find(run.report.tables, metric=metric)
    items = run.tasks[task.detail.task].metrics[metric]
    return row is not None and row.value is not None and items.is_as(row.value)


def _make_test(row: ResultRow, **values: Any) -> TestRow:
    """Return the test of a row's difference, in the same place."""
    return TestRow(**{name: getattr(row, name) for name in _PLACE}, **values)


def _compare(
    row: ResultRow, against: NDArray[np.bool_], setting: NDArray[np.bool_]
) -> tuple[ResultRow, TestRow]:
    """Return the difference of two rates on the same documents, and its test."""
    num_only_against = int((against & ~setting).sum())
    num_only_here = int((setting & ~against).sum())
    test = _make_test(
        row,
        test="mcnemar",
        num_only_here=num_only_here,
        num_only_against=num_only_against,
        p_value=compute_mcnemar(num_only_against, num_only_here),
    )
    return fill_row(row, (num_only_here - num_only_against) / row.num_documents, ""), test
