"""Near-verbatim measures against rouge_score, nltk and plain loops."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from nltk.translate import bleu_score
from numpy.typing import NDArray
from rouge_score import rouge_scorer

from memguard.audit.probes.window_scores import APPROXIMATE_BLEU, compute_overlap, longest_true_run

# Few different ids, so that much is common; 2**31 - 1 is the largest an id can be.
_ids = st.lists(st.sampled_from([0, 1, 2, 3, 50_256, 2**31 - 1]), max_size=24)
_truths = _ids.filter(bool)


def _array(ids: list[int]) -> NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)


def _naive_edits(ones: list[int], others: list[int]) -> int:
    table = [[0] * (len(others) + 1) for _ in range(len(ones) + 1)]
    for i in range(len(ones) + 1):
        for j in range(len(others) + 1):
            if not i or not j:
                table[i][j] = i + j
            else:
                swap = table[i - 1][j - 1] + (ones[i - 1] != others[j - 1])
                table[i][j] = min(table[i - 1][j] + 1, table[i][j - 1] + 1, swap)
    return table[-1][-1]


def _naive_run(ones: list[int], others: list[int]) -> int:
    return max(
        (
            size
            for size in range(1, min(len(ones), len(others)) + 1)
            for i in range(len(ones) - size + 1)
            for j in range(len(others) - size + 1)
            if ones[i : i + size] == others[j : j + size]
        ),
        default=0,
    )


@given(truth=_truths, generated=_ids)
def test_edits_and_runs_equal_plain_loops(truth: list[int], generated: list[int]) -> None:
    overlap = compute_overlap(_array(truth), _array(generated))
    # One division of integers.
    assert overlap.edit_distance == _naive_edits(truth, generated) / max(len(truth), len(generated))
    assert overlap.longest_run_tokens == _naive_run(truth, generated)


@given(truth=_truths, generated=_ids)
def test_rouge_equals_rouge_score(truth: list[int], generated: list[int]) -> None:
    words = [" ".join(map(str, ids)) for ids in (truth, generated)]
    expected = rouge_scorer.RougeScorer(["rougeL"]).score(*words)["rougeL"].fmeasure
    overlap = compute_overlap(_array(truth), _array(generated))
    # The same fraction, rounded in another order.
    assert overlap.rouge_l == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(truth=_truths, generated=_ids.filter(bool))
def test_bleu_equals_nltk(truth: list[int], generated: list[int]) -> None:
    expected = bleu_score.sentence_bleu(
        [truth],
        generated,
        smoothing_function=bleu_score.SmoothingFunction().method3,
        auto_reweigh=True,
    )
    overlap = compute_overlap(_array(truth), _array(generated))
    # Four logarithms and an exponential.
    assert overlap.bleu == pytest.approx(expected, rel=1e-12)


@given(truth=_truths, generated=_ids.filter(lambda ids: len(ids) >= 5))
def test_smoothing_decides_no_verdict(truth: list[int], generated: list[int]) -> None:
    ours, theirs = (
        {tuple(ids[start : start + 4]) for start in range(len(ids) - 3)}
        for ids in (truth, generated)
    )
    assume(not ours & theirs)
    assert compute_overlap(_array(truth), _array(generated)).bleu < APPROXIMATE_BLEU


@pytest.mark.parametrize("size", [1, 2, 3, 4, 50, 500])
def test_equal_continuations(size: int) -> None:
    ids = np.arange(size, dtype=np.int32) % 7
    overlap = compute_overlap(ids, ids.copy())
    assert (overlap.rouge_l, overlap.edit_distance) == (1.0, 0.0)
    assert overlap.bleu == pytest.approx(1, abs=1e-15)  # exp of a sum of logarithms of 1
    assert overlap.longest_run_tokens == size
    assert overlap.type_token_ratio == min(size, 7) / min(size, 50)


@pytest.mark.parametrize("generated", [[], [9], [9, 9, 9, 9, 9, 9]])
def test_nothing_in_common(generated: list[int]) -> None:
    overlap = compute_overlap(_array([1, 2, 3]), _array(generated))
    assert (overlap.rouge_l, overlap.longest_run_tokens, overlap.bleu) == (0.0, 0, 0.0)
    assert overlap.edit_distance == 1.0
    assert overlap.type_token_ratio == (1 / len(generated) if generated else None)


def test_one_dropped_token_in_fifty() -> None:
    # Verbatim and position by position this fails from token 20 on; by hand: LCS 49 of 50 and 49.
    truth = np.arange(50, dtype=np.int32)
    overlap = compute_overlap(truth, np.delete(truth, 20))
    assert overlap.rouge_l == pytest.approx(98 / 99)
    assert overlap.edit_distance == 1 / 50
    assert overlap.longest_run_tokens == 29
    assert overlap.bleu > APPROXIMATE_BLEU


@given(st.lists(st.booleans(), max_size=40))
def test_longest_true_run_equals_plain_loop(flags: list[bool]) -> None:
    expected = max((len(list(run)) for right, run in groupby(flags) if right), default=0)
    assert longest_true_run(np.array(flags, dtype=bool)) == expected
