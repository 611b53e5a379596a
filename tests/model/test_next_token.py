"""Tokens drawn over a sharded vocabulary against plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import RankPool
from torch import Tensor
from vocab_pieces import MESHES, STEPS, Recorder, Whole, cut_here, cut_whole, draw_whole

from memguard.config.settings import SamplingScheme
from memguard.model import truncation
from memguard.model.next_token import DrawnTokens, draw_tokens

pytestmark = pytest.mark.slow

LAST = 1 - 2**-53  # The largest number that a generator draws.

SCHEMES = [
    SamplingScheme(),
    SamplingScheme(temperature=0.7),
    SamplingScheme(top_k=1),
    SamplingScheme(top_k=40),
    SamplingScheme(top_p=0.9),
    SamplingScheme(top_p=1e-9),
    SamplingScheme(temperature=1.7, top_k=9, top_p=0.55),
]


def truncate(logits: list[float], scheme: SamplingScheme) -> list[float] | None:
    """The probabilities of all tokens, in plain Python; None where rounding decides on top_p."""
    scaled = [logit / scheme.temperature for logit in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    kept = set(order)
    if scheme.top_k is not None:
        border = scaled[order[min(scheme.top_k, len(order)) - 1]]
        kept = {i for i in order if scaled[i] >= border}
    weights = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order if i in kept}
    if scheme.top_p is not None and scheme.top_p < 1:
        target, reached, nucleus = scheme.top_p * sum(weights.values()), 0.0, {}
        for i in weights:
            if nucleus and reached >= target:
                break
            nucleus[i] = weights[i]
            reached += weights[i]
            if abs(reached - target) < 1e-9:
                return None
        weights = nucleus
    return [weights.get(i, 0.0) / sum(weights.values()) for i in range(len(scaled))]


def check_drawn(whole: Whole, uniform_N: Tensor, scheme: SamplingScheme, ours: DrawnTokens) -> None:
    assert ours.ids_N.dtype == torch.int64
    for row, (logits, uniform) in enumerate(
        zip(whole.logits().tolist(), uniform_N.tolist(), strict=True)
    ):
        p_V = truncate(logits, scheme)
        if p_V is None:
            continue
        drawn = int(ours.ids_N[row])
        assert p_V[drawn] > 0, "a token that is cut off"
        # float64; a number within rounding of a border may fall on either side of it.
        assert sum(p_V[:drawn]) <= uniform + 1e-12
        assert uniform - 1e-12 <= sum(p_V[: drawn + 1])
        assert float(ours.logprob_N[row].exp()) == pytest.approx(p_V[drawn], rel=1e-9)


@settings(deadline=None, max_examples=150)
@given(
    num_tokens=st.integers(0, 6),
    vocab_size=st.integers(1, 30),
    chunk_tokens=st.integers(1, 8),
    scale=st.sampled_from([0.01, 1.0, 5.0]),
    temperature=st.sampled_from([0.5, 1.0, 1.3]),
    top_k=st.none() | st.integers(1, 32),
    top_p=st.none() | st.floats(0, 1, exclude_min=True),
    with_ties=st.booleans(),
    extreme=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_token_is_where_the_distribution_passes_the_number(
    num_tokens: int,
    vocab_size: int,
    chunk_tokens: int,
    scale: float,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    with_ties: bool,
    extreme: bool,
    seed: int,
) -> None:
    # Of integers ties are exact.
    scale = 1.0 if with_ties else scale
    whole = draw_whole(num_tokens, vocab_size, seed=seed, scale=scale, with_ties=with_ties)
    head, hidden_ND = cut_whole(whole, chunk_tokens=chunk_tokens)
    scheme = SamplingScheme(temperature=temperature, top_k=top_k, top_p=top_p)
    generator = torch.Generator().manual_seed(seed)
    uniform_N = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    if extreme:
        uniform_N = torch.where(uniform_N < 0.5, 0.0, LAST)
    check_drawn(whole, uniform_N, scheme, draw_tokens(head, hidden_ND, uniform_N, scheme))


def check_on_ranks(degrees: tuple[int, int]) -> None:
    axes = cut_here(degrees)
    for vocab_size, scale, with_ties in ((131, 0.1, False), (131, 1.0, True), (5, 2.0, False)):
        # tanh of equal numbers may differ by a bit: ties without it.
        steps = () if with_ties else STEPS
        whole = draw_whole(9, vocab_size, dim=6, scale=scale, steps=steps, with_ties=with_ties)
        uniform_N = torch.linspace(0, LAST, 9, dtype=torch.float64)
        head, hidden_ND = cut_whole(whole, axes, chunk_tokens=6)
        for scheme in SCHEMES:
            with pytest.MonkeyPatch.context() as patch:
                # So that vocabularies as small as these take several rounds.
                patch.setattr(truncation, "_FIRST_CANDIDATES", 4)
                ours = draw_tokens(head, hidden_ND, uniform_N, scheme)
            check_drawn(whole, uniform_N, scheme, ours)


@pytest.mark.parametrize("degrees", MESHES)
def test_a_sharded_head_draws_what_the_whole_does(
    ranks: RankPool, degrees: tuple[int, int]
) -> None:
    ranks(check_on_ranks, degrees[0] * degrees[1], degrees)


def test_damaged_weights_are_seen() -> None:
    whole = draw_whole(3, 11)
    whole.weight_VD[4] = torch.nan
    head, hidden_ND = cut_whole(whole)
    uniform_N = torch.tensor([0.0, 0.5, LAST], dtype=torch.float64)
    for scheme in (SamplingScheme(), SamplingScheme(top_k=2), SamplingScheme(top_p=0.5)):
        drawn = draw_tokens(head, hidden_ND, uniform_N, scheme)
        assert drawn.logprob_N.isnan().all()
        assert ((drawn.ids_N >= 0) & (drawn.ids_N < 11)).all()


def record_cost(degrees: tuple[int, int], scheme: SamplingScheme) -> tuple[int, int]:
    whole = draw_whole(32, 1310, dim=4)
    head, hidden_ND = cut_whole(whole, cut_here(degrees), chunk_tokens=8)
    uniform_N = torch.full((32,), 0.5, dtype=torch.float64)
    with Recorder() as recorder:
        draw_tokens(head, hidden_ND, uniform_N, scheme)
    gathered = [num for name, num in recorder.collectives if "gather" in name]
    return recorder.largest, sum(gathered)


def test_no_more_than_a_piece_of_a_chunk_is_made(ranks: RankPool) -> None:
    largest, gathered = ranks(record_cost, 2, (1, 2), SamplingScheme())[0]
    assert largest <= 8 * 655
    assert gathered == 32
    largest, gathered = ranks(record_cost, 2, (1, 2), SamplingScheme(top_k=40))[0]
    assert largest <= 8 * 655
    assert gathered == 32 + 32 * 40


def test_equal_arguments_equal_tokens_whatever_the_batch() -> None:
    whole = draw_whole(12, 40)
    uniform_N = torch.rand(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    head, hidden_ND = cut_whole(whole)
    scheme = SamplingScheme(top_p=0.8)
    together = draw_tokens(head, hidden_ND, uniform_N, scheme).ids_N
    alone = [
        draw_tokens(head, hidden_ND[i : i + 1], uniform_N[i : i + 1], scheme) for i in range(12)
    ]
    assert together.tolist() == [int(each.ids_N[0]) for each in alone]
