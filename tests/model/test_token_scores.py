"""Scores over a sharded vocabulary against the plain formulas on all logits."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import RankPool
from torch import Tensor
from vocab_pieces import (
    MESHES,
    STEPS,
    VOCAB_SIZES,
    Recorder,
    Whole,
    cut_here,
    cut_whole,
    draw_whole,
    draw_wholes,
)

from memguard.config.settings import SamplingScheme
from memguard.model.lm_head import Head
from memguard.model.token_scores import EXTRA_SCORES, TokenScores, score_tokens

pytestmark = pytest.mark.slow

NAMES = ("logprob", "margin", "entropy", "is_best", "mean_logprob", "rank", "variance_logprob")


def plain_scores(logits_NV: Tensor, labels_N: Tensor) -> dict[str, Tensor]:
    """The definitions, in float64."""
    logits_NV = logits_NV.detach().double()
    logprob_NV = logits_NV.log_softmax(1)
    p_NV = logprob_NV.exp()
    label_N1 = labels_N[:, None]
    entropy_N = -(p_NV * logprob_NV).sum(1)
    others_NV = logits_NV.scatter(1, label_N1, -torch.inf)
    return {
        "logprob": logprob_NV.gather(1, label_N1)[:, 0],
        "margin": logits_NV.gather(1, label_N1)[:, 0] - others_NV.amax(1),
        "entropy": entropy_N,
        "is_best": (logits_NV.gather(1, label_N1)[:, 0] == logits_NV.amax(1)).double(),
        "mean_logprob": logprob_NV.mean(1),
        "rank": 1 + (logits_NV > logits_NV.gather(1, label_N1)).sum(1).double(),
        # In two passes, unlike ours.
        "variance_logprob": (p_NV * (logprob_NV + entropy_N[:, None]).square()).sum(1),
    }


def lowest_best(logits_NV: Tensor) -> list[int]:
    """The first of the largest, in plain Python."""
    return [row.index(max(row)) for row in logits_NV.tolist()]


def check_scores(whole: Whole, ours: TokenScores) -> None:
    logits_NV = whole.logits()
    assert ours.argmax_N.dtype == torch.int64
    assert ours.argmax_N.tolist() == lowest_best(logits_NV)
    # float64: logits differ by the last bits, times their size; so do sums of squares of them.
    size = max(1.0, *logits_NV.abs().flatten().tolist(), 0.0)
    for name, expected_N in plain_scores(logits_NV, whole.labels_N).items():
        found_N = getattr(ours, f"{name}_N")
        torch.testing.assert_close(found_N, expected_N, rtol=1e-11, atol=1e-13 * size**2)
    same = ours.argmax_N == whole.labels_N
    assert (ours.margin_N[same] >= 0).all()
    assert (ours.margin_N[~same] <= 0).all()


@settings(deadline=None, max_examples=100)
@given(whole=draw_wholes(), chunk_tokens=st.integers(1, 12))
def test_scores_are_the_formulas_on_all_logits(whole: Whole, chunk_tokens: int) -> None:
    head, hidden_ND = cut_whole(whole, chunk_tokens=chunk_tokens)
    check_scores(whole, score_tokens(head, hidden_ND, whole.labels_N, needs=EXTRA_SCORES))


def check_on_ranks(degrees: tuple[int, int]) -> None:
    axes = cut_here(degrees)
    for vocab_size in VOCAB_SIZES:
        for bias, steps in ((True, STEPS), (False, ())):
            for with_ties in (False, True):
                whole = draw_whole(
                    7, vocab_size, dim=6, bias=bias, steps=steps, with_ties=with_ties
                )
                head, hidden_ND = cut_whole(whole, axes, chunk_tokens=3)
                ours = score_tokens(head, hidden_ND, whole.labels_N, needs=EXTRA_SCORES)
                check_scores(whole, ours)
    whole = draw_whole(0, 131)
    head, hidden_ND = cut_whole(whole, axes)
    check_scores(whole, score_tokens(head, hidden_ND, whole.labels_N, needs=EXTRA_SCORES))


@pytest.mark.parametrize("degrees", MESHES)
def test_a_sharded_head_has_the_scores_of_the_whole(
    ranks: RankPool, degrees: tuple[int, int]
) -> None:
    ranks(check_on_ranks, degrees[0] * degrees[1], degrees)


def score_ties(degrees: tuple[int, int]) -> tuple[list[int], list[float], list[float]]:
    """Rows whose best logits are on several ranks, as one hidden state a token of five."""
    logits_NV = torch.tensor(
        [[0.0, 3, 1, 3, 3], [0, 3, 1, 3, 3], [2, 2, 2, 2, 2], [0, 0, 0, 0, 1], [4, 0, 0, 0, 4]]
    )
    whole = Whole(
        hidden_ND=logits_NV,
        weight_VD=torch.eye(5),
        bias_V=None,
        labels_N=torch.tensor([4, 0, 3, 4, 4]),
    )
    head, hidden_ND = cut_whole(whole, cut_here(degrees))
    needs = frozenset({"is_best"})
    scores = score_tokens(head, hidden_ND, whole.labels_N, needs=needs)
    alone = score_tokens(head, hidden_ND, whole.labels_N, needs=needs, choices=False)
    assert torch.equal(scores.is_best_N, alone.is_best_N)
    return scores.argmax_N.tolist(), scores.margin_N.tolist(), scores.is_best_N.tolist()


@pytest.mark.parametrize("degrees", MESHES)
def test_ties_across_ranks_go_to_the_lowest_id_with_margin_zero(
    ranks: RankPool, degrees: tuple[int, int]
) -> None:
    for argmax, margin, is_best in ranks(score_ties, degrees[0] * degrees[1], degrees):
        assert argmax == [1, 1, 0, 4, 0]
        assert margin == [0, -3, 0, 1, 0]
        # A tied label is one of the best, though not the first choice.
        assert is_best == [1, 0, 1, 1, 1]


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_fp32_scores_of_a_real_vocabulary_are_close_to_float64(scale: float) -> None:
    whole = draw_whole(16, 32_000, dim=64, scale=scale, dtype=torch.float32)
    head, hidden_ND = cut_whole(whole, chunk_tokens=8)
    ours = score_tokens(head, hidden_ND, whole.labels_N, needs=EXTRA_SCORES)
    wide = replace(
        whole, **{n: getattr(whole, n).double() for n in ("hidden_ND", "weight_VD", "bias_V")}
    )
    size = float(wide.logits().abs().max())
    for name, expected_N in plain_scores(wide.logits(), whole.labels_N).items():
        found_N = getattr(ours, f"{name}_N")
        assert found_N.dtype == torch.float32
        if name == "rank":  # Of 32,000 logits some are closer to the label's than fp32 tells.
            assert (found_N - expected_N).abs().max() <= 2
            continue
        # fp32 logits are off by some 2^-22 of their size, and a variance by that times its root.
        bound = 4 * size * 2**-22 * max(1.0, float(expected_N.abs().max().sqrt()))
        torch.testing.assert_close(found_N.double(), expected_N, rtol=1e-5, atol=bound)


def test_only_the_needed_scores_are_computed_and_unknown_names_are_refused() -> None:
    whole = draw_whole(3, 11)
    head, hidden_ND = cut_whole(whole)
    everything = score_tokens(head, hidden_ND, whole.labels_N, needs=EXTRA_SCORES)
    for needed in sorted(EXTRA_SCORES):
        scores = score_tokens(head, hidden_ND, whole.labels_N, needs=frozenset({needed}))
        for name in NAMES:
            found_N = getattr(scores, f"{name}_N")
            if name in ("logprob", "margin", needed):
                assert torch.equal(found_N, getattr(everything, f"{name}_N"))
                assert not found_N.requires_grad
            else:
                assert found_N is None
    with pytest.raises(AssertionError, match="does not compute"):
        score_tokens(head, hidden_ND, whole.labels_N, needs=frozenset({"perplexity"}))


def test_logits_in_place_of_hidden_states_are_left_as_they_were() -> None:
    whole = draw_whole(9, 17)
    logits_NV = whole.logits()
    before_NV = logits_NV.clone()
    head = Head(weight_VD=None, vocab_size=17, chunk_tokens=4)
    check_scores(whole, score_tokens(head, logits_NV, whole.labels_N, needs=EXTRA_SCORES))
    assert torch.equal(logits_NV, before_NV)


def test_damaged_weights_give_scores_that_are_not_finite() -> None:
    whole = draw_whole(3, 11)
    whole.weight_VD[4] = torch.nan
    head, hidden_ND = cut_whole(whole)
    scores = score_tokens(head, hidden_ND, whole.labels_N)
    assert scores.logprob_N.isnan().all()
    assert (scores.argmax_N < 11).all()


# -- cost --------------------------------------------------------------------------------------


def record_cost(degrees: tuple[int, int] | None) -> tuple[int, list[tuple[str, int]]]:
    whole = draw_whole(32, 131, dim=4)
    axes = () if degrees is None else cut_here(degrees)
    head, hidden_ND = cut_whole(whole, axes, chunk_tokens=8)
    with Recorder() as recorder:
        score_tokens(head, hidden_ND, whole.labels_N, needs=EXTRA_SCORES)
    return recorder.largest, recorder.collectives


def test_no_more_than_a_piece_of_a_chunk_is_made_and_few_numbers_sent(ranks: RankPool) -> None:
    assert record_cost(None) == (8 * 131, [])
    largest, collectives = ranks(record_cost, 4, (2, 2))[0]
    assert largest == 8 * 66
    # Over y the logits; over x four numbers a token to find the best and the label, then six sums.
    chunk = [("all_reduce", 8 * 66), ("all_gather_into_tensor", 4 * 8), ("all_reduce", 6 * 8)]
    assert collectives == chunk * 4


def test_choices_are_left_out_if_not_requested() -> None:
    whole = draw_whole(9, 131)
    head, hidden_ND = cut_whole(whole, chunk_tokens=4)
    everything = score_tokens(head, hidden_ND, whole.labels_N, needs=EXTRA_SCORES)
    scores = score_tokens(head, hidden_ND, whole.labels_N, needs=EXTRA_SCORES, choices=False)
    assert scores.argmax_N is None
    assert scores.margin_N is None
    for name in ("logprob", *EXTRA_SCORES):
        assert torch.equal(getattr(scores, f"{name}_N"), getattr(everything, f"{name}_N"))


def check_truncated_on_ranks(degrees: tuple[int, int]) -> None:
    whole = draw_whole(9, 131, dim=6)
    whole.labels_N[::2] = whole.logits().argmax(1)[::2]
    head, hidden_ND = cut_whole(whole, cut_here(degrees), chunk_tokens=4)
    ways = [
        SamplingScheme(),
        SamplingScheme(top_k=5),
        SamplingScheme(temperature=0.5, top_k=9, top_p=0.8),
    ]
    scores = score_tokens(head, hidden_ND, whole.labels_N, schemes=ways)
    assert scores.sampled_SN is not None
    for way, found_N in zip(ways, scores.sampled_SN, strict=True):
        alone = score_tokens(head, hidden_ND, whole.labels_N, choices=False, schemes=[way])
        assert alone.sampled_SN is not None
        # The best logit is found another way: float64's last bits. One way is `test_truncation`'s.
        torch.testing.assert_close(found_N, alone.sampled_SN[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("degrees", [(1, 1), pytest.param((1, 2), marks=pytest.mark.mesh), (2, 2)])
def test_ways_to_draw_are_scored_in_the_same_pass(
    ranks: RankPool, degrees: tuple[int, int]
) -> None:
    ranks(check_truncated_on_ranks, degrees[0] * degrees[1], degrees)
