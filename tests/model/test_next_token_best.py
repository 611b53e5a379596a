"""The most likely tokens over a sharded vocabulary against sorting all logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import RankPool
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

from memguard.model.lm_head import Head
from memguard.model.next_token import BestTokens, find_best

pytestmark = pytest.mark.slow


def check_best(whole: Whole, ours: BestTokens, num: int) -> None:
    """Compare with Python's sort, by logit and then by id."""
    logits_NV = whole.logits().detach()
    logprob_NV = logits_NV.log_softmax(1)
    num = min(num, logits_NV.shape[1])
    assert ours.ids_NK.dtype == torch.int64
    assert ours.ids_NK.shape == ours.logprob_NK.shape == (len(logits_NV), num)
    for row, logits in enumerate(logits_NV.tolist()):
        expected = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:num]
        assert ours.ids_NK[row].tolist() == expected
        # float64.
        torch.testing.assert_close(
            ours.logprob_NK[row], logprob_NV[row, expected], rtol=1e-11, atol=1e-12
        )


@settings(deadline=None, max_examples=100)
@given(whole=draw_wholes(), num=st.integers(1, 45), chunk_tokens=st.integers(1, 12))
def test_they_are_the_first_of_all_sorted(whole: Whole, num: int, chunk_tokens: int) -> None:
    head, hidden_ND = cut_whole(whole, chunk_tokens=chunk_tokens)
    check_best(whole, find_best(head, hidden_ND, num), num)


def check_on_ranks(degrees: tuple[int, int]) -> None:
    axes = cut_here(degrees)
    for vocab_size in VOCAB_SIZES:
        for with_ties in (False, True):
            whole = draw_whole(7, vocab_size, dim=6, steps=STEPS, with_ties=with_ties)
            head, hidden_ND = cut_whole(whole, axes, chunk_tokens=3)
            # 100 are more than any rank holds of 131.
            for num in (1, 4, 100, 200):
                check_best(whole, find_best(head, hidden_ND, num), num)
    whole = draw_whole(0, 131)
    head, hidden_ND = cut_whole(whole, axes)
    check_best(whole, find_best(head, hidden_ND, 3), 3)


@pytest.mark.parametrize("degrees", MESHES)
def test_a_sharded_head_finds_those_of_the_whole(ranks: RankPool, degrees: tuple[int, int]) -> None:
    ranks(check_on_ranks, degrees[0] * degrees[1], degrees)


def test_tokens_that_are_ruled_out_come_last() -> None:
    logits_NV = torch.tensor([[-torch.inf, 1.0, -torch.inf, 2.0]])
    best = find_best(Head(weight_VD=None, vocab_size=4), logits_NV, 3)
    assert best.ids_NK.tolist() == [[3, 1, 0]]
    assert best.logprob_NK[0, 2] == -torch.inf


def test_damaged_weights_are_seen() -> None:
    whole = draw_whole(3, 11)
    whole.weight_VD[4] = torch.nan
    head, hidden_ND = cut_whole(whole)
    best = find_best(head, hidden_ND, 5)
    assert best.logprob_NK.isnan().all()
    assert ((best.ids_NK >= 0) & (best.ids_NK < 11)).all()


def record_cost(degrees: tuple[int, int]) -> tuple[int, list[tuple[str, int]]]:
    whole = draw_whole(32, 1310, dim=4)
    head, hidden_ND = cut_whole(whole, cut_here(degrees), chunk_tokens=8)
    with Recorder() as recorder:
        find_best(head, hidden_ND, 5)
    return recorder.largest, recorder.collectives


def test_only_the_best_of_each_rank_are_sent(ranks: RankPool) -> None:
    largest, collectives = ranks(record_cost, 2, (1, 2))[0]
    assert largest <= 8 * 655
    sent = {name: sum(n for each, n in collectives if each == name) for name, _ in collectives}
    assert sent == {"all_gather_into_tensor": 32 * 2 * 5, "all_reduce": 32}
