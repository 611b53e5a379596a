"""Tasks as utility: items paired by hand with SciPy, Holm over all tests, the choice of the axis.

The numbers are recomputed from `utility.parquet`, not from what the comparison read.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from answered_examples import make_answers, write_answered_run, write_quiz, write_three
from compare_examples import write_run
from numpy.typing import NDArray
from scipy import stats
from task_examples import make_metric, make_task

from memguard.compare import FinishedRun, compare_runs
from memguard.errors import RecordError
from memguard.records import Comparison
from memguard.records.comparison import find_change

Scores = dict[tuple[str, str], NDArray[np.float64]]
"""Values of the items by setting and task."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[FinishedRun]:
    return write_three(tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def comparison(runs: list[FinishedRun]) -> Comparison:
    return compare_runs(runs, name="x", command="", utility="quiz")


def read_scores(runs: list[FinishedRun], column: str = "value") -> Scores:
    scores: Scores = {}
    for run in runs:
        rows = pq.read_table(run.folder / "audit" / "utility.parquet").to_pylist()
        for task in ("quiz", "texts", "overlap"):
            own = [row for row in rows if (row["task"], row["model"]) == (task, "trained")]
            own.sort(key=lambda row: row["index"])
            scores[run.name, task] = np.array([row[column] for row in own], dtype=np.float64)
    return scores


def adjust(p_values: list[float]) -> list[float]:
    """Return Holm's adjusted p values, by his definition: each is held to all that are smaller."""
    order = sorted(p_values)
    return [
        max(min(1.0, (len(order) - k) * order[k]) for k in range(order.index(p) + 1))
        for p in p_values
    ]


def test_differences_intervals_and_holm_follow_from_the_items(
    runs: list[FinishedRun], comparison: Comparison
) -> None:
    scores, weights = read_scores(runs), read_scores(runs, "weight")
    tests = {
        (test.setting, test.probe, test.parameters, test.metric, test.bucket): test
        for test in comparison.tables.tests
    }
    for name in ("k4", "k2"):
        key = {"setting": name, "seed": 0, "against": "setting:plain"}
        # A rate: McNemar's exact test is the binomial one; Tango's interval is checked elsewhere.
        mine, first = scores[name, "quiz"], scores["plain", "quiz"]
        won, lost = int((mine > first).sum()), int((mine < first).sum())
        test = tests[name, "utility", "task=quiz", "acc", "(items)"]
        assert (test.test, test.num_only_here, test.num_only_against) == ("mcnemar", won, lost)
        assert test.p_value == pytest.approx(stats.binomtest(won, won + lost).pvalue, rel=1e-9)
        row = comparison.tables.find("utility", "acc", "(items)", parameters="task=quiz", **key)
        assert row.value == pytest.approx((won - lost) / 40)
        assert row.num_documents == 40
        assert row.low < row.value < row.high
        # A mean: the paired t test; both sum the same numbers in another order.
        mine, first = scores[name, "overlap"], scores["plain", "overlap"]
        paired = stats.ttest_rel(mine, first)
        test = tests[name, "utility", "task=overlap", "f1", "(items)"]
        assert test.test == "paired-t"
        assert test.p_value == pytest.approx(paired.pvalue, rel=1e-6)
        row = comparison.tables.find("utility", "f1", "(items)", parameters="task=overlap", **key)
        assert row.value == pytest.approx((mine - first).mean())
        assert row.ci == pytest.approx(tuple(paired.confidence_interval()), rel=1e-6)
        # A perplexity: SciPy's paired bootstrap draws other items, so that quantiles of 5,000
        # draws differ by about 3 % of the interval's width.
        arrays = (scores[name, "texts"], scores["plain", "texts"], weights["plain", "texts"])

        def subtract(a: NDArray, b: NDArray, w: NDArray, axis: int = -1) -> NDArray:
            total = w.sum(axis=axis)
            return np.exp(-a.sum(axis=axis) / total) - np.exp(-b.sum(axis=axis) / total)

        drawn = stats.bootstrap(
            arrays, subtract, paired=True, method="percentile", n_resamples=5000, rng=1
        )
        row = comparison.tables.find(
            "utility", "word_perplexity", "(items)", parameters="task=texts", **key
        )
        assert row.value == pytest.approx(float(subtract(*arrays)))
        width = drawn.confidence_interval.high - drawn.confidence_interval.low
        assert row.ci == pytest.approx(tuple(drawn.confidence_interval), abs=0.06 * width)
        test = tests[name, "utility", "task=texts", "word_perplexity", "(items)"]
        below = float((drawn.bootstrap_distribution <= 0).mean())
        assert test.test == "paired-bootstrap"
        assert test.p_value == pytest.approx(2 * min(below, 1 - below), abs=0.03)
    assert len(tests) == len(comparison.tables.tests) == 10
    p_values = [test.p_value for test in comparison.tables.tests]
    adjusted = [test.p_holm for test in comparison.tables.tests]
    assert adjusted == pytest.approx(adjust(p_values))
    # Holm is over documents and tasks together: without the tasks there are fewer tests.
    alone = [test.p_value for test in comparison.tables.tests if test.probe == "extraction"]
    assert adjust(alone) != pytest.approx(
        [test.p_holm for test in comparison.tables.tests if test.probe == "extraction"]
    )


def test_the_front_takes_the_task_and_higher_is_better(comparison: Comparison) -> None:
    utility = comparison.utility
    assert (utility.name, utility.metric, utility.unit) == ("quiz", "acc", "share")
    assert (utility.higher_is_better, utility.chance, utility.num_items) == (True, 0.25, 40)
    plain, k4, k2 = comparison.front
    assert (plain.utility, k4.utility, k2.utility) == (28 / 40, 27 / 40, 18 / 40)
    exact = stats.binomtest(27, 40).proportion_ci(method="exact")
    # Both solve the same equation, ours in closed form by the beta distribution.
    assert (k4.utility_low, k4.utility_high) == pytest.approx((exact.low, exact.high), rel=1e-9)
    # Each answers less than the one before, and is safer.
    assert [point.dominated_by for point in comparison.front] == [[], [], []]
    change = find_change(comparison.tables, "k4", utility)
    assert change.value == pytest.approx(-1 / 40)
    assert comparison.find_mean(comparison.utility, "plain", "base") == pytest.approx(16 / 40)
    found = comparison.recommendation
    assert found.setting == "k4"
    assert ", acc of task 'quiz' 67.5 % (-2.5 pp, " in found.sentence
    assert " The 40 items of the task do not exclude a loss beyond the 5 % limit." in found.sentence
    (k2,) = found.ruled_out
    assert ", acc of task 'quiz' 45.0 % (-25.0 pp, " in k2.sentence
    assert k2.sentence.endswith("), beyond the 5 % limit.")
    assert "held-out" not in found.sentence + found.rule


def test_a_setting_that_answers_worse_at_equal_risk_is_dominated(tmp_path: Path) -> None:
    runs = [
        write_answered_run(tmp_path / name, make_answers(name), name=name, nll=nll)
        for name, nll in (("plain", 2.0), ("k2", 1.0))
    ]
    by_task = compare_runs(runs, name="x", command="", utility="quiz")
    assert [point.dominated_by for point in by_task.front] == [[], ["plain"]]
    # 18 against 28 of 40, none of them won back: beyond the interval.
    assert by_task.front[1].dominated_beyond_ci_by == ["plain"]
    by_loss = compare_runs(runs, name="x", command="")
    assert by_loss.utility.name == "heldout_nll"
    assert [point.dominated_by for point in by_loss.front] == [["k2"], []]
    # A perplexity is better when lower.
    by_texts = compare_runs(runs, name="x", command="", utility="texts")
    assert not by_texts.utility.higher_is_better
    assert [point.dominated_by for point in by_texts.front] == [[], ["plain"]]


def test_several_seeds_share_the_items(tmp_path: Path) -> None:
    runs = write_three(tmp_path, seed=0) + write_three(tmp_path, seed=1)
    comparison = compare_runs(runs, name="x", command="", utility="quiz")
    change = find_change(comparison.tables, "k2", comparison.utility)
    assert change.value == pytest.approx(-10 / 40)
    # Two seeds with equal answers are no more evidence than one: the interval of 40 differences
    # by the jackknife, not that of 80, which is narrower by 1 / sqrt 2.
    scores = read_scores(runs[:3])
    difference = scores["k2", "quiz"] - scores["plain", "quiz"]
    centre = np.arctanh(difference.mean())
    without = np.arctanh([np.delete(difference, n).mean() for n in range(40)])
    reach = stats.t.ppf(0.975, 39) * np.sqrt(39 / 40 * ((without - centre) ** 2).sum())
    assert change.ci == pytest.approx((np.tanh(centre - reach), np.tanh(centre + reach)))
    assert len([t for t in comparison.tables.tests if t.parameters == "task=quiz"]) == 4


def test_a_task_at_chance_recommends_nothing(tmp_path: Path) -> None:
    correct = {"plain": [50] * 40, "safe": [1] * 40}
    answers = dict.fromkeys(correct, [1.0, 0.0, 0.0, 0.0] * 10)
    runs = write_quiz(tmp_path, answers, correct=correct)
    comparison = compare_runs(runs, name="x", command="", utility="quiz")
    assert all(point.is_at_chance for point in comparison.front)
    assert comparison.recommendation.setting is None
    assert "task 'quiz' cannot tell whether utility is kept" in comparison.recommendation.sentence
    # The held-out loss still tells.
    assert compare_runs(runs, name="x", command="").recommendation.setting == "safe"


@pytest.mark.parametrize(
    ("right", "items", "chance"),
    # The second is less than 5 % worse: chance alone is against it.
    [({"plain": 15, "safe": 14}, 40, 0.22), ({"plain": 76, "safe": 73}, 200, 0.305)],
)
def test_a_setting_at_chance_is_not_recommended(
    tmp_path: Path, right: dict[str, int], items: int, chance: float
) -> None:
    answers = {name: [1.0] * many + [0.0] * (items - many) for name, many in right.items()}
    correct = {"plain": [50] * 40, "safe": [1] * 40}
    runs = write_quiz(tmp_path, answers, chance=chance, correct=correct)
    comparison = compare_runs(runs, name="x", command="", utility="quiz")
    assert [point.is_at_chance for point in comparison.front] == [False, True]
    assert comparison.recommendation.setting is None
    assert "not shown to differ from a random choice" in comparison.recommendation.sentence


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"samples": "bb"}, "'k4' (seed 0) answered other items than 'plain' (seed 0)"),
        ({"num_fewshot": 2}, "of 'k4' (seed 0), 'num_fewshot' is 2, not 0 as of 'plain' (seed 0)"),
        ({"is_chat": True}, "'is_chat' is True, not False"),
        ({"version": "2.0"}, "'version' is 2.0, not 1.0"),
        (None, "'k4' (seed 0) did not answer it"),
    ],
)
def test_a_task_that_runs_do_not_share_is_left_out_and_refused(
    changes: dict[str, object] | None, why: str, tmp_path: Path
) -> None:
    flags = make_metric("acc", [1.0, 0.0, 1.0, 1.0])
    plain = write_answered_run(tmp_path / "plain", [make_task("quiz", "trained", flags)])
    others = [] if changes is None else [make_task("quiz", "trained", flags, **changes)]
    k4 = (
        write_answered_run(tmp_path / "k4", others, name="k4")
        if others
        else write_run(tmp_path / "k4", name="k4")
    )
    comparison = compare_runs([plain, k4], name="x", command="")
    assert comparison.tasks == []
    (sentence,) = comparison.tasks_left_out
    assert sentence.startswith("Task 'quiz' is left out of the comparison: ")
    assert why in sentence
    assert not [test for test in comparison.tables.tests if test.probe == "utility"]
    with pytest.raises(
        RecordError, match="'utility' is 'quiz', which the runs do not share"
    ) as told:
        compare_runs([plain, k4], name="x", command="", utility="quiz")
    assert why in str(told.value)


def test_a_task_that_no_run_answered_names_those_there_are(runs: list[FinishedRun]) -> None:
    with pytest.raises(RecordError, match=r"'utility' is 'quizz', which no run answered.*'quiz'"):
        compare_runs(runs, name="x", command="", utility="quizz")


def test_items_that_were_changed_are_refused(tmp_path: Path) -> None:
    run = write_answered_run(tmp_path / "plain", make_answers("plain"))
    path = run.folder / "audit" / "utility.parquet"
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(RecordError, match=r"utility\.parquet' is damaged"):
        compare_runs([run], name="x", command="")
    path.unlink()
    with pytest.raises(RecordError, match=r"utility\.parquet' is damaged: it is missing"):
        compare_runs([run], name="x", command="")


def test_a_metric_without_numbers_of_items_is_an_axis_without_differences(tmp_path: Path) -> None:
    nothing = [float("nan")] * 4
    runs = [
        write_answered_run(
            tmp_path / name,
            [make_task("mt", "trained", make_metric("bleu", nothing, aggregation="bleu", value=v))],
            name=name,
        )
        for name, v in (("plain", 31.5), ("k4", 30.0))
    ]
    comparison = compare_runs(runs, name="x", command="", utility="mt")
    assert [point.utility for point in comparison.front] == [31.5, 30.0]
    (row,) = comparison.tables.select("utility", "bleu", against="setting:plain", seed=0)
    assert row.value is None
    assert "no number of each item" in row.missing_because
    assert not [test for test in comparison.tables.tests if test.probe == "utility"]


def test_the_record_is_read_again(comparison: Comparison) -> None:
    again = Comparison.model_validate(json.loads(comparison.model_dump_json()))
    assert again == comparison
