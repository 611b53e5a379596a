"""Truncated sampling over a sharded vocabulary against the warpers of transformers."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ranks import RankPool
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from vocab_pieces import MESHES, STEPS, Recorder, Whole, cut_here, cut_whole, draw_whole

from memguard.config.settings import SamplingScheme
from memguard.model import truncation
from memguard.model.lm_head import Head
from memguard.model.token_scores import score_tokens

pytestmark = pytest.mark.slow

Scheme = dict[str, Any]

SCHEMES: list[Scheme] = [
    {},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"temperature": 1.7, "top_k": 9, "top_p": 0.55},
]


def warp(logits_NV: Tensor, scheme: Scheme) -> Tensor:
    """What generation of transformers draws from: log-probabilities [N, V]."""
    # Its processors take the tokens so far, which these do not look at.
    none: Any = None
    logits_NV = TemperatureLogitsWarper(scheme.get("temperature", 1.0))(none, logits_NV.detach())
    if scheme.get("top_k") is not None:
        logits_NV = TopKLogitsWarper(scheme["top_k"])(none, logits_NV)
    if scheme.get("top_p") is not None:
        logits_NV = TopPLogitsWarper(scheme["top_p"])(none, logits_NV)
    return logits_NV.log_softmax(1)


def score(head: Head, hidden_ND: Tensor, labels_N: Tensor, scheme: Scheme) -> Tensor:
    """Log-probabilities [N] as an audit gets them."""
    scores = score_tokens(
        head, hidden_ND, labels_N, choices=False, schemes=[SamplingScheme(**scheme)]
    )
    assert scores.sampled_SN is not None
    return scores.sampled_SN[0]


def pick(logprob_NV: Tensor, labels_N: Tensor) -> Tensor:
    return logprob_NV.gather(1, labels_N[:, None])[:, 0]


def num_undecided(logits_NV: Tensor, scheme: Scheme) -> int:
    """Rows in which rounding decides whether top_p is reached."""
    if scheme.get("top_p") is None:
        return 0
    before = {**scheme, "top_p": None}
    sum_NV = warp(logits_NV, before).exp().sort(1, descending=True).values.cumsum(1)
    return int(((sum_NV - scheme["top_p"]).abs() < 1e-9).any(1).sum())


@contextmanager
def few_candidates(num: int) -> Iterator[None]:
    """So that vocabularies as small as these take several rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation, "_FIRST_CANDIDATES", num)
        yield


def check_all_labels(whole: Whole, ours_N: Tensor, scheme: Scheme) -> None:
    expected_N = pick(warp(whole.logits(), scheme), whole.labels_N)
    assert torch.equal(ours_N.isinf(), expected_N.isinf())
    # float64: log-probabilities of logits of some tens.
    torch.testing.assert_close(ours_N, expected_N, rtol=1e-11, atol=1e-11)


@settings(deadline=None, max_examples=200)
@given(
    num_tokens=st.integers(0, 9),
    vocab_size=st.integers(1, 40),
    chunk_tokens=st.integers(1, 12),
    scale=st.sampled_from([0.01, 0.3, 1.0, 5.0]),
    temperature=st.sampled_from([0.5, 1.0, 1.3]),
    top_k=st.none() | st.integers(1, 42),
    top_p=st.none() | st.floats(0, 1, exclude_min=True),
    first_candidates=st.integers(1, 50),
    seed=st.integers(0, 1000),
)
def test_labels_have_the_probability_that_transformers_samples_them_with(
    num_tokens: int,
    vocab_size: int,
    chunk_tokens: int,
    scale: float,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    first_candidates: int,
    seed: int,
) -> None:
    whole = draw_whole(num_tokens, vocab_size, seed=seed, scale=scale)
    scheme = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    assume(not num_undecided(whole.logits(), scheme))
    head, hidden_ND = cut_whole(whole, chunk_tokens=chunk_tokens)
    with few_candidates(first_candidates):
        ours_N = score(head, hidden_ND, whole.labels_N, scheme)
    check_all_labels(whole, ours_N, scheme)


def check_on_ranks(degrees: tuple[int, int]) -> None:
    axes = cut_here(degrees)
    for vocab_size, scale in ((131, 0.1), (131, 2.0), (5, 2.0)):
        whole = draw_whole(8, vocab_size, dim=6, scale=scale, steps=STEPS)
        # Half of the labels are likely ones, so that few are cut off.
        whole.labels_N[::2] = whole.logits().argmax(1)[::2]
        head, hidden_ND = cut_whole(whole, axes, chunk_tokens=6)
        for scheme in SCHEMES:
            with few_candidates(4):
                ours_N = score(head, hidden_ND, whole.labels_N, scheme)
            check_all_labels(whole, ours_N, scheme)
    whole = draw_whole(0, 131)
    head, hidden_ND = cut_whole(whole, axes)
    assert score(head, hidden_ND, whole.labels_N, {"top_k": 3, "top_p": 0.5}).shape == (0,)


@pytest.mark.parametrize("degrees", MESHES)
def test_a_sharded_head_cuts_off_what_the_whole_does(
    ranks: RankPool, degrees: tuple[int, int]
) -> None:
    ranks(check_on_ranks, degrees[0] * degrees[1], degrees)


# -- ties --------------------------------------------------------------------------------------


def score_tied(degrees: tuple[int, int] | None, scheme: Scheme) -> list[float]:
    """Log-probabilities of all eight tokens, of which 1, 3, 4 and 6 are equally likely."""
    logits_V = torch.tensor([0.0, 2, 3, 2, 2, -1, 2, 0], dtype=torch.float64)
    whole = Whole(
        hidden_ND=logits_V.repeat(8, 1),
        weight_VD=torch.eye(8, dtype=torch.float64),
        bias_V=None,
        labels_N=torch.arange(8),
    )
    axes = () if degrees is None else cut_here(degrees)
    head, hidden_ND = cut_whole(whole, axes)
    with few_candidates(scheme.pop("first", 64)):
        found: list[float] = score(head, hidden_ND, whole.labels_N, scheme).tolist()
    return found


def expected_tied(kept: list[int]) -> list[float]:
    weight = {2: math.e**3, 1: math.e**2, 3: math.e**2, 4: math.e**2, 6: math.e**2}
    total = sum(weight[i] for i in kept)
    return [math.log(weight[i] / total) if i in kept else -math.inf for i in range(8)]


TIES: list[tuple[Scheme, list[int]]] = [
    # Of top_k all that tie at the border.
    ({"top_k": 2}, [1, 2, 3, 4, 6]),
    ({"top_k": 1}, [2]),
    # p is .37 and four times .137: the lowest ids, as many as it takes.
    ({"top_p": 0.4}, [1, 2]),
    ({"top_p": 0.6}, [1, 2, 3]),
    ({"top_p": 0.75}, [1, 2, 3, 4]),
    ({"top_p": 0.75, "first": 1}, [1, 2, 3, 4]),
    # Of the five that are left, .40 and four times .15.
    ({"top_k": 2, "top_p": 0.5}, [1, 2]),
    ({"top_k": 2, "top_p": 0.5, "first": 1}, [1, 2]),
]


@pytest.mark.parametrize(
    "degrees",
    [None, (2, 2), *(pytest.param(each, marks=pytest.mark.mesh) for each in ((1, 2), (1, 3)))],
)
def test_ties_at_the_border(ranks: RankPool, degrees: tuple[int, int] | None) -> None:
    found = (
        [score_all_ties(None)]
        if degrees is None
        else ranks(score_all_ties, degrees[0] * degrees[1], degrees)
    )
    for of_rank in found:
        for logprobs, (_, kept) in zip(of_rank, TIES, strict=True):
            # float64.
            assert logprobs == pytest.approx(expected_tied(kept), abs=1e-12)


def score_all_ties(degrees: tuple[int, int] | None) -> list[list[float]]:
    return [score_tied(degrees, dict(scheme)) for scheme, _ in TIES]


# -- numbers, memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fp32_agrees_with_the_warpers_in_float64(scheme: Scheme) -> None:
    whole = draw_whole(64, 4000, dim=16, dtype=torch.float32)
    whole.labels_N[::2] = whole.logits().argmax(1)[::2]
    head, hidden_ND = cut_whole(whole)
    ours_N = score(head, hidden_ND, whole.labels_N, scheme)
    expected_N = pick(warp(whole.logits().double(), scheme), whole.labels_N)
    assert ours_N.dtype == torch.float32
    assert torch.equal(ours_N.isinf(), expected_N.isinf())
    assert not expected_N.isinf().all()
    # fp32: logits of some tens, a nucleus whose last of thousands of tokens may be another one.
    torch.testing.assert_close(ours_N.double(), expected_N, rtol=0, atol=1e-4)


def test_logits_in_place_of_hidden_states_are_left_as_they_were() -> None:
    whole = draw_whole(9, 17)
    logits_NV = whole.logits()
    before_NV = logits_NV.clone()
    head = Head(weight_VD=None, vocab_size=17, chunk_tokens=4)
    scheme = {"top_k": 5, "top_p": 0.8}
    check_all_labels(whole, score(head, logits_NV, whole.labels_N, scheme), scheme)
    assert torch.equal(logits_NV, before_NV)


def test_damaged_weights_are_seen_not_cut_off() -> None:
    whole = draw_whole(3, 11)
    whole.weight_VD[4] = torch.nan
    head, hidden_ND = cut_whole(whole)
    for scheme in ({}, {"top_k": 2}, {"top_p": 0.5}):
        assert score(head, hidden_ND, whole.labels_N, scheme).isnan().all()


def record_cost(degrees: tuple[int, int], scale: float) -> tuple[int, int]:
    """Numbers of the largest tensor, and of all that was gathered."""
    whole = draw_whole(32, 1310, dim=4, scale=scale)
    head, hidden_ND = cut_whole(whole, cut_here(degrees), chunk_tokens=8)
    with Recorder() as recorder:
        score(head, hidden_ND, whole.labels_N, {"top_p": 0.9})
    gathered = [num for name, num in recorder.collectives if "gather" in name]
    return recorder.largest, sum(gathered)


def test_no_more_than_a_piece_of_a_chunk_is_made(ranks: RankPool) -> None:
    # Nearly uniform: a nucleus of nine tokens in ten, the worst case. Of a sharp one, 64 a rank.
    flat, sharp = (ranks(record_cost, 2, (1, 2), scale)[0] for scale in (1e-3, 20.0))
    assert flat[0] <= 8 * 655
    assert sharp[0] <= 8 * 655
    assert sharp[1] == 32 * 64
