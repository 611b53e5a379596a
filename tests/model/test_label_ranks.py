"""Ranks of labels against counts in plain Python, and the bound that they give on any decoding."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import mesh_of
from ranks import RankPool
from tiny_families import build
from torch import Tensor
from transformers.generation import logits_process
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

from memguard.audit.beams import BeamRequest, search_beams
from memguard.audit.decoding import Decoder
from memguard.config.settings import SamplingScheme
from memguard.model.checks import build_causal_lm
from memguard.model.lm_head import Head
from memguard.model.token_scores import EXTRA_SCORES, score_tokens
from memguard.parallel.mesh_shape import MeshShape

pytestmark = pytest.mark.slow

RANK = frozenset({"rank"})
MARGINS = st.sampled_from([0.0, 0.5, 1.0])


def count_ranks(whole: Whole, margin: float = 0.0, not_ranked: Sequence[int] = ()) -> list[float]:
    """The definition, one number at a time."""
    return [
        1.0
        + sum(
            logit > row[label] + margin for v, logit in enumerate(row) if v not in set(not_ranked)
        )
        for row, label in zip(whole.logits().tolist(), whole.labels_N.tolist(), strict=True)
    ]


# -- what a rank is --------------------------------------------------------------------------------


def check_ranks(
    cut: tuple[Head, Tensor], whole: Whole, choices: bool, margin: float, not_ranked: Sequence[int]
) -> None:
    """Compare the ranks of a head, which may be sharded, with counts on all logits."""
    head, hidden_ND = cut
    scores = score_tokens(
        head,
        hidden_ND,
        whole.labels_N,
        needs=RANK,
        choices=choices,
        rank_margin=margin,
        not_ranked=not_ranked,
    )
    assert scores.rank_N.tolist() == count_ranks(whole, margin, not_ranked)


@settings(deadline=None, max_examples=200)
@given(
    whole=draw_wholes(),
    chunk_tokens=st.integers(1, 12),
    choices=st.booleans(),
    margin=MARGINS,
    not_ranked=st.lists(st.integers(0, 39), max_size=3),
)
def test_ranks_are_counts_in_plain_python(
    whole: Whole, chunk_tokens: int, choices: bool, margin: float, not_ranked: list[int]
) -> None:
    check_ranks(cut_whole(whole, chunk_tokens=chunk_tokens), whole, choices, margin, not_ranked)


def rank_on_mesh(degrees: tuple[int, int]) -> None:
    axes = cut_here(degrees)
    for vocab_size in VOCAB_SIZES:
        for bias, steps in ((True, STEPS), (False, ())):
            for with_ties in (False, True):
                whole = draw_whole(
                    7, vocab_size, dim=6, bias=bias, steps=steps, with_ties=with_ties
                )
                cut = cut_whole(whole, axes, chunk_tokens=3)
                for choices, margin, not_ranked in (
                    (True, 0.0, ()),
                    (False, 0.0, (1, vocab_size - 1)),
                    (True, 0.25, (0, 3)),
                ):
                    check_ranks(cut, whole, choices, margin, not_ranked)


@pytest.mark.parametrize("degrees", MESHES)
def test_a_sharded_head_has_the_ranks_of_the_whole(
    ranks: RankPool, degrees: tuple[int, int]
) -> None:
    ranks(rank_on_mesh, degrees[0] * degrees[1], degrees)


def rank_on_two(_: None) -> list[float]:
    axis = mesh_of(MeshShape(x=2)).axis("x")
    head = Head(
        weight_VD=torch.eye(6).narrow(0, 3 * axis.rank, 3),
        first_token=3 * axis.rank,
        vocab_size=6,
        vocab_axis=axis,
    )
    logits = torch.tensor([[0.0, 5, 2, 3, 4, 6], [9, 8, 7, 6, 5, 4]])
    scores = score_tokens(head, logits, torch.tensor([2, 5]), needs=RANK, not_ranked=(5,))
    found: list[float] = scores.rank_N.tolist()
    return found


@pytest.mark.quick
def test_counts_of_all_ranks_are_summed(ranks: RankPool) -> None:
    assert ranks(rank_on_two, 2, None) == [[4, 6], [4, 6]]


def record_collectives(needs: frozenset[str], choices: bool) -> list[tuple[str, int]]:
    whole = draw_whole(8, 131, dim=4)
    head, hidden_ND = cut_whole(whole, cut_here((1, 2)))
    with Recorder() as recorder:
        score_tokens(head, hidden_ND, whole.labels_N, needs=needs, choices=choices)
    return recorder.collectives


def test_ranks_add_numbers_to_the_collectives_but_no_collective(ranks: RankPool) -> None:
    for choices, found in ((True, ("all_gather_into_tensor", 3)), (False, ("all_reduce", 1))):
        name, size = found
        without = ranks(record_collectives, 2, EXTRA_SCORES - RANK, choices)[0]
        assert without == [(name, size * 8), ("all_reduce", 5 * 8)]
        with_ranks = ranks(record_collectives, 2, EXTRA_SCORES, choices)[0]
        assert with_ranks == [(name, (size + 1) * 8), ("all_reduce", 6 * 8)]


# -- what it bounds --------------------------------------------------------------------------------


def score_ours(logits_NV: Tensor, labels_N: Tensor, **scheme: Any) -> tuple[Tensor, Tensor]:
    """Ranks, and the probability of each label under a scheme."""
    head = Head(weight_VD=None, vocab_size=logits_NV.shape[1], chunk_tokens=4)
    schemes = [SamplingScheme(**scheme)]
    scores = score_tokens(head, logits_NV, labels_N, needs=RANK, schemes=schemes)
    return scores.rank_N, scores.sampled_SN[0].exp()


@st.composite
def draw_logits(draw: st.DrawFn) -> Tensor:
    """Rows of few numbers, so that many tie, or of random ones; 1 to 60 tokens."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    shape = (draw(st.integers(1, 6)), draw(st.integers(1, 60)))
    if draw(st.booleans()):
        return torch.randint(-2, 3, shape, generator=generator).double()
    scale = draw(st.sampled_from([0.1, 1.0, 8.0]))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def list_labels(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Every row once for each token."""
    num, size = logits_NV.shape
    return logits_NV.repeat_interleave(size, 0), torch.arange(size).repeat(num)


@settings(deadline=None, max_examples=300)
@given(
    logits_NV=draw_logits(),
    temperature=st.sampled_from([1e-3, 0.3, 1.0, 2.0, 1e3, 1e6]),
    top_k=st.none() | st.integers(1, 62),
    top_p=st.none() | st.floats(0, 1, exclude_min=True),
)
def test_no_scheme_draws_a_label_more_often_than_one_in_its_rank(
    logits_NV: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    every_NV, labels_N = list_labels(logits_NV)
    rank_N, p_N = score_ours(every_NV, labels_N, temperature=temperature, top_k=top_k, top_p=top_p)
    # float64.
    assert (p_N * rank_N <= 1 + 1e-12).all()


@pytest.mark.quick
def test_a_tie_at_the_border_of_top_k_keeps_no_label_below_it() -> None:
    # Two groups of the vocabulary, the even and the odd tokens.
    logits_NV = torch.full((1, 32), -9.0)
    logits_NV[0, [0, 2, 4, 6]] = torch.tensor([4.0, 3, 3, 1])
    rank_N, p_N = score_ours(logits_NV.repeat(4, 1), torch.tensor([0, 2, 4, 6]), top_k=2)
    assert rank_N.tolist() == [1, 2, 2, 4]
    total = float(np.exp([4, 3, 3]).sum())
    assert p_N.tolist() == pytest.approx([*(np.exp([4, 3, 3]) / total), 0], abs=1e-6)


CUTOFFS: dict[str, Callable[[float], Any]] = {
    "min-p": logits_process.MinPLogitsWarper,
    "epsilon": logits_process.EpsilonLogitsWarper,
    "eta": logits_process.EtaLogitsWarper,
    "top-h": logits_process.TopHLogitsWarper,
}


def warp(warper: Any, logits_NV: Tensor, so_far: Sequence[int] = ()) -> Tensor:
    ids = torch.tensor([list(so_far)] * len(logits_NV))
    probability_NV: Tensor = warper(ids, logits_NV.clone()).softmax(1)
    return probability_NV


@settings(deadline=None, max_examples=200)
@given(logits_NV=draw_logits(), kind=st.sampled_from(sorted(CUTOFFS)), share=st.floats(1e-4, 0.999))
def test_cutoffs_of_transformers_keep_the_bound(logits_NV: Tensor, kind: str, share: float) -> None:
    p_NV = warp(CUTOFFS[kind](share), logits_NV)
    every_NV, labels_N = list_labels(logits_NV)
    rank_N, _ = score_ours(every_NV, labels_N)
    assert (p_NV.flatten() * rank_N <= 1 + 1e-12).all()


def test_what_may_drop_the_likeliest_token_breaks_the_bound() -> None:
    logits_NV = torch.tensor([[0.6, 0.2, 0.2]], dtype=torch.float64).log()
    second = torch.tensor([1])
    assert score_ours(logits_NV, second)[0].tolist() == [2]
    penalty = transformers.RepetitionPenaltyLogitsProcessor(penalty=5.0)
    found = warp(penalty, logits_NV, [0])[0]
    # .6^5 = .08 of .48: the two others have .42 each.
    assert found.tolist() == pytest.approx([0.163, 0.419, 0.419], abs=1e-3)
    sharp_NV = torch.tensor([[0.5, 0.3, *[0.02] * 10]], dtype=torch.float64).log()
    typical = warp(logits_process.TypicalLogitsWarper(0.2), sharp_NV)[0]
    rank_N, _ = score_ours(*list_labels(sharp_NV))
    assert (typical * rank_N).max() > 1.2


def test_a_beam_search_narrower_than_the_largest_rank_does_not_return_the_text() -> None:
    lm = build_causal_lm(build("llama", seed=3, vocab_size=23, pad_token_id=None))
    decoder = Decoder(lm, 4096)
    draw = np.random.default_rng(0)
    num_returned = num_hidden = 0
    for _ in range(12):
        request = BeamRequest(prompt_ids=draw.integers(0, 23, 4).astype(np.int32), num_new=5)
        by_width = {
            width: search_beams(decoder, [request], width, candidates=23)[0].ids_WS.tolist()
            for width in (1, 2, 3, 5, 8, 16)
        }
        for text in by_width[16]:
            ids = torch.tensor([*request.prompt_ids.tolist(), *text])
            hidden_ND = lm.hidden_states(ids[None])[0, 3:-1]
            largest = lm.token_scores(hidden_ND, ids[4:], RANK).rank_N.max()
            for width, texts in by_width.items():
                if width < largest:
                    assert text not in texts
                    num_hidden += 1
                num_returned += text in texts
    assert min(num_returned, num_hidden) > 100
