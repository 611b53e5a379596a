"""Rows of benchmark tasks: intervals and differences with SciPy, the power by simulation."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats
from task_examples import make_metric, make_task

from memguard.audit.benchmarks.items import NUM_DRAWS, ItemValues, subtract_items
from memguard.audit.benchmarks.rows import (
    NO_ITEM_NUMBERS,
    OTHER_ITEMS,
    find_smallest_mean_difference,
    find_smallest_rate_difference,
    tabulate_utility,
)
from memguard.records import ResultRow, Tables, merge_tables
from memguard.records.utility import (
    TaskResult,
    list_item_scores,
    list_task_details,
    load_item_scores,
    save_item_scores,
)

RIGHT = [1.0] * 20 + [0.0] * 10
BASE = [0.0] * 8 + [1.0] * 14 + [0.0] * 8
KEY: dict[str, Any] = {"parameters": "task=quiz"}


def tabulate(*results: TaskResult) -> Tables:
    return tabulate_utility(results, seed=3)


def find(tables: Tables, metric: str, task: str = "quiz", **key: Any) -> ResultRow:
    row = tables.find("utility", metric, "(items)", parameters=f"task={task}", **key)
    assert row is not None, f"no row of {metric} with {key}"
    return row


def test_a_rate_of_both_models() -> None:
    tables = tabulate(
        make_task("quiz", "trained", make_metric("acc", RIGHT), chance=0.25),
        make_task("quiz", "base", make_metric("acc", BASE), chance=0.25),
    )
    trained = find(tables, "acc")
    exact = stats.binomtest(20, 30).proportion_ci(method="exact")
    assert (trained.statistic, trained.num_documents, trained.num_matched) == ("rate", 30, 20)
    # Both solve the same equation, ours in closed form by the beta distribution.
    assert trained.ci == pytest.approx((exact.low, exact.high), rel=1e-9)
    assert find(tables, "acc", model="base").value == pytest.approx(14 / 30)
    change = find(tables, "acc", against="base")
    # 8 won, 2 lost.
    assert (change.value, change.interval) == (pytest.approx(6 / 30), "tango")
    # The ends are the differences that Tango's score test does not reject: z = 1.96 there.
    for end in change.ci:
        linear = (60 - 8 + 2) * end - 10
        q = (math.sqrt(linear**2 + 8 * 30 * 2 * end * (1 - end)) - linear) / (4 * 30)
        z = (6 - 30 * end) / math.sqrt(30 * (2 * q + end * (1 - end)))
        assert abs(z) == pytest.approx(stats.norm.ppf(0.975), rel=1e-6)
    assert {row.bucket for row in tables.results} == {"(items)"}
    (metric,) = tables.metrics
    assert metric.risk_rank is None
    assert metric.higher_is_better
    assert metric.unit == "share"
    assert tables.risks("(items)") == {}


def test_a_mean_has_students_interval() -> None:
    values = np.random.default_rng(0).normal(0.4, 0.2, size=(2, 25))
    tables = tabulate(
        make_task("quiz", "trained", make_metric("f1", list(values[0]))),
        make_task("quiz", "base", make_metric("f1", list(values[1]))),
    )
    row, change = find(tables, "f1"), find(tables, "f1", against="base")
    assert (row.statistic, row.interval, change.interval) == ("mean", "t", "t")
    own = stats.t.interval(0.95, 24, loc=values[0].mean(), scale=stats.sem(values[0]))
    # The same sums in another order.
    assert row.ci == pytest.approx(own, rel=1e-9)
    paired = stats.ttest_rel(values[0], values[1]).confidence_interval()
    assert change.ci == pytest.approx((paired.low, paired.high), rel=1e-9)


def test_a_perplexity_is_a_score_whose_items_are_drawn() -> None:
    generator = np.random.default_rng(1)
    logprobs, words = generator.normal(-30, 5, size=(2, 40)), generator.integers(5, 9, 40)
    results = [
        make_task(
            "texts",
            model,
            make_metric(
                "word_perplexity",
                list(own),
                aggregation="weighted_perplexity",
                weights=list(words),
                higher=False,
            ),
        )
        for model, own in zip(("trained", "base"), logprobs, strict=True)
    ]
    tables = tabulate(*results)
    row, change = (
        find(tables, "word_perplexity", "texts", **key) for key in ({}, {"against": "base"})
    )
    assert (row.statistic, row.interval, change.interval) == ("score", "bootstrap", "bootstrap")
    assert row.value == pytest.approx(np.exp(-logprobs[0].sum() / words.sum()))

    def compute(values: np.ndarray, weights: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.exp(-values.sum(axis=axis) / weights.sum(axis=axis))

    drawn = stats.bootstrap(
        (logprobs[0], words), compute, paired=True, method="percentile", n_resamples=5000, rng=2
    ).confidence_interval
    # Quantiles of 5,000 other draws differ by about 3 % of the interval's width.
    assert row.ci == pytest.approx((drawn.low, drawn.high), abs=0.06 * (drawn.high - drawn.low))
    assert tabulate(*results).results == tables.results, "the draws are seeded"
    assert not tables.metrics[0].higher_is_better


def test_a_paired_bootstrap_is_narrower_than_an_unpaired_one_and_symmetric() -> None:
    logprobs = np.random.default_rng(2).normal(-30, 5, 40)
    one, other = (
        ItemValues(aggregation="perplexity", value_N=logprobs + shift) for shift in (0.0, 0.01)
    )
    found = subtract_items([(one, other)], "score", seed=0)
    assert found.interval.ci[0] > 0
    assert found.p_value == 2 / (NUM_DRAWS + 1), "no draw is on the other side of 0"
    back = subtract_items([(other, one)], "score", seed=0)
    assert back.interval.value == pytest.approx(-found.interval.value)
    same = subtract_items([(one, one)], "score", seed=0)
    assert (same.interval.ci, same.p_value) == (None, 1.0)


@pytest.mark.parametrize(("base", "why"), [({"samples": "bb"}, OTHER_ITEMS), ({}, NO_ITEM_NUMBERS)])
def test_a_difference_that_cannot_be_had_says_why(base: dict[str, str], why: str) -> None:
    metric = make_metric("bleu", [math.nan] * 5, aggregation="bleu", stderr=2.0)
    tables = tabulate(make_task("mt", "trained", metric), make_task("mt", "base", metric, **base))
    change = find(tables, "bleu", "mt", against="base")
    assert (change.value, change.missing_because) == (None, why)
    row = find(tables, "bleu", "mt")
    assert row.value == 31.5
    # By lm-eval's standard error.
    assert row.ci == pytest.approx((31.5 - 1.96 * 2, 31.5 + 1.96 * 2), rel=1e-4)
    assert list_task_details(tables)[0].smallest_difference is None


def test_a_value_that_the_items_do_not_give_is_not_subtracted() -> None:
    # lm-eval's value is what is reported; another way to join the items must not be guessed.
    odd = make_metric("acc", RIGHT, value=0.9)
    tables = tabulate(make_task("quiz", "trained", odd), make_task("quiz", "base", odd))
    assert find(tables, "acc").value == 0.9
    assert find(tables, "acc", against="base").missing_because == NO_ITEM_NUMBERS


@pytest.mark.parametrize(
    ("trained", "base", "chance", "is_at_chance"),
    [
        (10, 9, 0.25, True),
        (30, 9, 0.25, False),
        (10, 30, 0.25, False),
        (10, None, 0.25, True),
        (10, 9, None, False),
    ],
)
def test_at_chance(
    trained: int, base: int | None, chance: float | None, is_at_chance: bool
) -> None:
    results = [
        make_task(
            "quiz", model, make_metric("acc", [1.0] * count + [0.0] * (40 - count)), chance=chance
        )
        for model, count in (("trained", trained), ("base", base))
        if count is not None
    ]
    (detail,) = list_task_details(tabulate(*results))
    assert detail.is_at_chance == is_at_chance
    assert detail.is_smallest_paired == (base is not None)


def test_the_detail_says_how_a_task_was_answered() -> None:
    trained = make_task(
        "quiz", "trained", make_metric("acc", RIGHT), num_fewshot=2, num_truncated=3, limit=30
    )
    base = make_task("quiz", "base", make_metric("acc", BASE), is_cached=True)
    (detail,) = list_task_details(tabulate(trained, base))
    assert (detail.num_items, detail.num_fewshot, detail.limit) == (30, 2, 30)
    assert detail.num_truncated == {"trained": 3, "base": 0}
    assert detail.is_cached == {"trained": False, "base": True}
    assert detail.num_forwards == {"trained": 120, "base": 120}
    assert detail.samples_sha256 == {"trained": "aa", "base": "aa"}
    # 10 of 30 items differ between the models.
    assert detail.smallest_difference == find_smallest_rate_difference(30, 10 / 30)


@pytest.mark.parametrize(("count", "share"), [(60, 0.0), (60, 0.3), (200, 0.1), (200, 0.5)])
def test_the_smallest_rate_difference_is_shown_in_eight_of_ten(count: int, share: float) -> None:
    smallest = find_smallest_rate_difference(count, share)
    differing = max(share, smallest)
    generator = np.random.default_rng(0)
    num_differing = generator.binomial(count, differing, 4000)
    won = generator.binomial(num_differing, (differing + smallest) / (2 * differing))
    drawn = list(zip(won.tolist(), num_differing.tolist(), strict=True))
    rejects = {(k, n): n > 0 and stats.binomtest(k, n).pvalue <= 0.05 for k, n in set(drawn)}
    # The standard error of 4,000 draws is 0.0063.
    assert np.mean([rejects[pair] for pair in drawn]) == pytest.approx(0.8, abs=0.025)


def test_few_items_show_nothing() -> None:
    # Five of five in one direction: p = 0.06.
    assert find_smallest_rate_difference(5, 0.5) is None
    assert find_smallest_rate_difference(6, 0.0) == pytest.approx(0.8 ** (1 / 6), rel=1e-6)
    assert find_smallest_mean_difference(1, 1.0) is None
    assert find_smallest_mean_difference(30, 0.0) is None


def test_the_smallest_mean_difference_has_the_power_of_the_t_test() -> None:
    smallest = find_smallest_mean_difference(40, 2.0)
    shift = smallest / (2.0 / math.sqrt(40))
    reach = stats.t.ppf(0.975, 39)
    power = stats.nct.sf(reach, 39, shift) + stats.nct.cdf(-reach, 39, shift)
    # The quantile of the noncentral t is replaced by that of the normal distribution.
    assert power == pytest.approx(0.8, abs=0.01)


def test_nothing_of_no_task() -> None:
    assert tabulate() == Tables()
    assert list_task_details(merge_tables([Tables(), tabulate()])) == []


def test_scores_of_items_are_read_again(tmp_path: Any) -> None:
    scores = list_item_scores(
        [make_task("mt", "base", make_metric("bleu", [math.nan, 1.0], aggregation="bleu"))]
    )
    assert [score.value for score in scores] == [None, 1.0]
    path = tmp_path / "utility.parquet"
    save_item_scores(scores, path)
    assert load_item_scores(path) == scores
    assert path.stat().st_mode & 0o777 == 0o600
