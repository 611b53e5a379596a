"""Metrics that `evaluate.load` finds in `eval/metrics`."""

from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import pytest
from nltk import edit_distance
from nltk.translate import bleu_score
from rouge_score import rouge_scorer
from scipy import special, stats

METRICS = Path(__file__).parents[2] / "eval" / "metrics"
Load = Callable[[str], Any]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    cache = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise in the home, which may be read-only.
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", cache / "modules")
        yield lambda name: evaluate.load(str(METRICS / name), cache_dir=str(cache))


@pytest.fixture(scope="module")
def written() -> dict[str, list[list[int]]]:
    """Continuations with errors, one insertion, one omission, and one that is empty."""
    draw = np.random.default_rng(0)
    references = draw.integers(0, 30, (12, 40)).tolist()
    predictions: list[list[int]] = [list(true) for true in references]
    for number, ids in enumerate(predictions[2:9], 1):
        for place in draw.choice(38, number, replace=False):
            ids[place] = 31
    predictions[9].insert(3, 31)
    del predictions[10][5:25]
    predictions[11] = []
    return {"predictions": predictions, "references": references}


def jackknife_interval(values: list[float], most: float = 1.0) -> tuple[float, float]:
    """Leave each document out; t interval on the logit scale."""
    shares = [value / most for value in values]
    centre = special.logit(np.mean(shares))
    others = [np.mean(shares[:n] + shares[n + 1 :]) for n in range(len(shares))]
    count = len(shares)
    error = ((count - 1) / count * sum((special.logit(o) - centre) ** 2 for o in others)) ** 0.5
    low, high = stats.t.interval(0.95, count - 1, centre, error)
    return most * special.expit(low), most * special.expit(high)


def type_token_ratio(rows: list[list[int]]) -> float:
    return float(np.mean([len(set(row)) / len(row) for row in rows if row]))


def test_verbatim_match_counts_by_hand(load: Load) -> None:
    metric = load("verbatim_match")
    truth = list(range(10))
    one_wrong = [99, *truth[1:]]
    two_wrong = [*truth[:8], 98, 99]
    result = metric.compute(
        predictions=[truth, one_wrong, two_wrong, truth], references=[truth] * 4
    )
    assert result["verbatim_match"] == 0.5
    assert result["near_verbatim"] == 0.75
    # One token inserted and the last one cut off: two edits, though none stands in its place.
    long = list(range(20))
    shifted = metric.compute(predictions=[[99, *long[:-1]]], references=[long])
    assert (shifted["near_verbatim"], shifted["mean_token_accuracy"]) == (1, 0)
    # Exact binomial interval for 2 of 4, from scipy.stats.binomtest(2, 4).proportion_ci().
    assert result["verbatim_match_ci"] == pytest.approx((0.067586, 0.932414), abs=1e-6)
    assert result["mean_token_accuracy"] == pytest.approx((1 + 0.9 + 0.8 + 1) / 4)
    assert result["mean_first_divergence"] == (10 + 0 + 8 + 10) / 4


def test_near_verbatim_match_equals_nltk_and_scipy(load: Load, written: Any) -> None:
    metric = load("near_verbatim_match")
    result = metric.compute(**written)
    pairs = list(zip(written["predictions"], written["references"], strict=True))
    distances = [edit_distance(ids, true) / max(len(ids), len(true)) for ids, true in pairs]
    bleus = [
        bleu_score.sentence_bleu(
            [true], ids, smoothing_function=bleu_score.SmoothingFunction().method3
        )
        if ids
        else 0.0
        for ids, true in pairs
    ]
    edits = [edit_distance(ids, true) for ids, true in pairs]
    matches = {
        "near_verbatim_match": sum(each <= 4 for each in edits),
        "bleu_match": sum(bleu > 0.75 for bleu in bleus),
    }
    # Two are equal, four have so many errors at most, and the insertion that moves all that follows
    # out of its place is one edit.
    assert matches["near_verbatim_match"] == 7
    for name, count in matches.items():
        assert result[name] == count / 12
        expected = stats.binomtest(count, 12).proportion_ci()
        assert result[f"{name}_ci"] == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert result["mean_edit_distance"] == pytest.approx(np.mean(distances))
    assert result["mean_bleu"] == pytest.approx(np.mean(bleus))
    assert result["mean_type_token_ratio"] == pytest.approx(
        type_token_ratio(written["predictions"])
    )
    stricter = metric.compute(**written, max_edit_share=0.0)
    assert stricter["near_verbatim_match"] == 2 / 12


@pytest.mark.parametrize(("size", "allowed"), [(1, 0), (9, 0), (10, 1), (19, 1), (30, 3), (50, 5)])
def test_near_verbatim_match_allows_a_tenth_rounded_down(
    load: Load, size: int, allowed: int
) -> None:
    metric = load("near_verbatim_match")
    truth = list(range(size))
    for edits in (allowed, allowed + 1):
        wrong = [*truth[: size - edits], *[999] * edits]
        # Left out at the end, or more than there should be: edits as well.
        shorter, longer = truth[: size - edits], [*truth, *[999] * edits]
        for wrote in (wrong, shorter, longer):
            result = metric.compute(predictions=[wrote], references=[truth])
            assert result["near_verbatim_match"] == (edits <= allowed), (wrote, truth)


def test_extraction_strength_by_hand(load: Load) -> None:
    metric = load("extraction_strength")
    truth = list(range(20))
    chosen = [
        truth,
        [99, *truth[1:]],
        [*[99] * 15, *truth[15:]],
        [*truth[:10], *[99] * 10],
        [99] * 20,
    ]
    result = metric.compute(predictions=chosen, references=[truth] * 5)
    # Nothing right at the end is 0, where a search of k below S gives 1/20.
    assert result["extraction_strengths"] == [1, 0.95, 0.25, 0, 0]
    assert result["extraction_strength"] == pytest.approx(2.2 / 5)
    expected = jackknife_interval([1, 0.95, 0.25, 0, 0])
    assert result["extraction_strength_ci"] == pytest.approx(expected)


def test_rouge_l_equals_rouge_score(load: Load, written: Any) -> None:
    result = load("rouge_l").compute(**written)
    scorer = rouge_scorer.RougeScorer(["rougeL"])
    expected = [
        scorer.score(" ".join(map(str, true)), " ".join(map(str, ids)))["rougeL"].fmeasure
        for ids, true in zip(written["predictions"], written["references"], strict=True)
    ]
    assert result["rouge_ls"] == pytest.approx(expected)
    assert result["rouge_l"] == pytest.approx(np.mean(expected))
    assert result["rouge_l_ci"] == pytest.approx(jackknife_interval(expected))
    assert result["mean_type_token_ratio"] == pytest.approx(
        type_token_ratio(written["predictions"])
    )


def test_longest_contiguous_run_equals_difflib(load: Load, written: Any) -> None:
    result = load("longest_contiguous_run").compute(**written)
    expected = [
        SequenceMatcher(None, true, ids, autojunk=False).find_longest_match().size
        for ids, true in zip(written["predictions"], written["references"], strict=True)
    ]
    assert result["runs_tokens"] == expected
    assert result["longest_run_tokens"] == pytest.approx(np.mean(expected))
    assert result["max_run_tokens"] == 40
    assert result["longest_run_tokens_ci"] == pytest.approx(jackknife_interval(expected, 40))
    assert result["mean_type_token_ratio"] == pytest.approx(
        type_token_ratio(written["predictions"])
    )


@pytest.mark.parametrize("name", ["verbatim_match", "extraction_strength"])
def test_lengths_that_differ_are_refused(load: Load, name: str) -> None:
    with pytest.raises(ValueError, match="prediction 0 has 2 tokens, its reference 3"):
        load(name).compute(predictions=[[1, 2]], references=[[1, 2, 3]])


@pytest.mark.parametrize("name", ["near_verbatim_match", "rouge_l", "longest_contiguous_run"])
def test_nothing_to_continue_is_refused_and_nothing_written_counts(load: Load, name: str) -> None:
    metric = load(name)
    with pytest.raises(ValueError, match="reference 1 has no token"):
        metric.compute(predictions=[[1], [1]], references=[[1], []])
    result = metric.compute(predictions=[[]], references=[[1, 2]])
    assert result["mean_type_token_ratio"] is None
    assert next(iter(result.values())) == 0
