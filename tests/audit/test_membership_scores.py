"""Membership scores on a model in closed form, against plain loops, and which way they point."""

import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from memguard.audit.probes.membership_scores import (
    MEMBERSHIP_SCORES,
    compare_passes,
    compute_loss,
    compute_min_k,
    compute_min_k_plus_plus,
    compute_zlib,
)
from memguard.model.lm_head import Head
from memguard.model.token_scores import EXTRA_SCORES, TokenScores, score_tokens

_logprobs = st.lists(st.floats(-40, 0), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def toy() -> TokenScores:
    """What the vocabulary layer says of logits [9, 11] in closed form."""
    t, v = np.arange(9)[:, None], np.arange(11)[None]
    logits_TV = 3 * np.sin(1.7 * t + 0.9 * v) + 2 * np.cos(0.3 * t * v)
    return score_tokens(
        Head(weight_VD=None, vocab_size=11, chunk_tokens=4),
        torch.from_numpy(logits_TV),
        torch.from_numpy((3 * np.arange(9) + 1) % 11),
        needs=frozenset({"entropy", "variance_logprob"}),
    )


def _array(tensor: torch.Tensor | None) -> NDArray[np.float64]:
    array: NDArray[np.float64] = tensor.numpy()
    return array


# The golden numbers of the toy were computed apart from this package, with a log-softmax of the
# closed form in float64, and are printed with six (some five) digits after the point.
_PRINTED = 6e-7


def test_toy_tokens(toy: TokenScores) -> None:
    assert toy.argmax_N.tolist() == [2, 0, 10, 9, 1, 0, 4, 9, 8]
    expected = [-1.865662, -7.036824, -4.455959, -1.798202, -3.780066]
    expected += [-2.692172, -7.906247, -5.320588, -5.84467]
    assert toy.logprob_N.tolist() == pytest.approx(expected, abs=_PRINTED)
    assert compute_loss(_array(toy.logprob_N)) == pytest.approx(-4.522266, abs=_PRINTED)


@pytest.mark.parametrize(
    ("share", "min_k", "plus_plus"), [(0.2, -7.906247, -6.17672), (0.5, -6.527082, -5.455315)]
)
def test_toy_scores(toy: TokenScores, share: float, min_k: float, plus_plus: float) -> None:
    logprob_T = _array(toy.logprob_N)
    assert compute_min_k(logprob_T, share) == pytest.approx(min_k, abs=_PRINTED)
    found = compute_min_k_plus_plus(
        logprob_T, -_array(toy.entropy_N), _array(toy.variance_logprob_N), share
    )
    assert found == pytest.approx(plus_plus, abs=_PRINTED)


@given(values=_logprobs, percent=st.integers(1, 100))
def test_min_k_equals_plain_loop(values: list[float], percent: int) -> None:
    count = max(1, percent * len(values) // 100)
    expected = math.fsum(sorted(values)[:count]) / count
    # float64 sums of up to 40 numbers.
    assert compute_min_k(np.array(values), percent / 100) == pytest.approx(expected, abs=1e-12)


def test_min_k_counts_tokens_exactly() -> None:
    # .29 * 100 is 28.999999999999996 in floating point.
    values = np.array([-2.0] * 28 + [-1.0] * 72)
    assert compute_min_k(values, 0.29) == pytest.approx(-57 / 29)
    assert compute_min_k(values[:1], 0.2) == -2  # a share of one token


@given(values=_logprobs, share=st.floats(0.01, 1))
def test_min_k_plus_plus_standardises(values: list[float], share: float) -> None:
    logprob_T = np.array(values)
    size = len(values)
    mean_T, variance_T = -1 - np.arange(size) % 3.0, 0.5 + np.arange(size) % 4.0
    expected = compute_min_k((logprob_T - mean_T) / np.sqrt(variance_T), share)
    assert compute_min_k_plus_plus(logprob_T, mean_T, variance_T, share) == pytest.approx(expected)


def test_min_k_plus_plus_of_a_model_that_is_certain() -> None:
    # One token has all probability: the published quotient is 0/0 where it is the label.
    nothing_T = np.zeros(3)
    assert compute_min_k_plus_plus(nothing_T, nothing_T, nothing_T, 1.0) == 0
    wrong_T = np.array([0.0, -20.0, 0.0])
    found = compute_min_k_plus_plus(wrong_T, nothing_T, nothing_T, 1.0)
    assert found == pytest.approx(-20 / 1e-3 / 3)


def _compare(name: str, own: float, plain: float) -> float:
    """Return a score of two passes from the mean log-probability in each."""
    return float(compare_passes(np.array([plain]), {name: np.array([own])})[name][0])


def test_trained_documents_score_higher() -> None:
    """A trained document next to an untrained one that differs in nothing but what was learned."""
    trained_T, other_T = np.array([-0.1, -0.4, -0.2]), np.array([-0.1, -3.0, -2.0])
    mean_T, variance_T = np.full(3, -1.5), np.full(3, 2.0)
    text = "Ada Lovelace, 12 St James's Square"
    assert compute_loss(trained_T) > compute_loss(other_T)
    assert compute_min_k(trained_T) > compute_min_k(other_T)
    assert compute_min_k_plus_plus(trained_T, mean_T, variance_T) > compute_min_k_plus_plus(
        other_T, mean_T, variance_T
    )
    assert compute_zlib(-0.2, text) > compute_zlib(-1.7, text)
    # As likely as another one, although it compresses worse.
    assert compute_zlib(-1.7, text) > compute_zlib(-1.7, "a" * len(text))
    # Capitals learned by heart: lower case costs more of a lower loss.
    assert _compare("lowercase", -2.5, -0.2) > _compare("lowercase", -2.5, -1.7)
    assert _compare("reference", -1.7, -0.2) > _compare("reference", -1.7, -1.6)
    # A text in front takes the trained one from -.2 to -.5 and helps the other from -1.7 to -1.6.
    assert _compare("recall", -0.5, -0.2) > _compare("recall", -1.6, -1.7)


def test_values_by_hand() -> None:
    assert compute_zlib(-2.0, "héron") == -2 / len(zlib.compress("héron".encode()))
    assert _compare("lowercase", -3.0, -2.0) == 1.5
    assert _compare("reference", -3.0, -2.0) == 1.0
    assert _compare("recall", -3.0, -2.0) == 1.5


def test_documents_known_by_heart_keep_a_finite_score() -> None:
    # fp32 gives every token probability 1.
    assert _compare("lowercase", -2.0, 0.0) == 2.0 * 2**24
    assert _compare("recall", -2.0, 0.0) == 2.0 * 2**24
    assert compute_loss(np.zeros(4)) == 0


def test_every_score_of_the_table_is_defined_in_a_line() -> None:
    assert all("\n" not in score.definition for score in MEMBERSHIP_SCORES.values())
    extras = frozenset().union(*(score.extras for score in MEMBERSHIP_SCORES.values()))
    assert extras <= EXTRA_SCORES
