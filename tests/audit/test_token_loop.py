"""Texts that end early: the same ones, however seldom their tokens are read and ends agreed."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RankPool
from test_decoding import SCHEME, make_requests, to_lists
from tiny_families import VOCAB_SIZE, build
from waits import Waits, count_waits

from memguard.audit.beams import BeamRequest, search_beams
from memguard.audit.decoding import Decoder
from memguard.audit.requests import Prompt
from memguard.hf.assembly import Assembly
from memguard.hf.load import shard_scratch_model
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.runtime import start_runtime

pytestmark = pytest.mark.slow

NUM_NEW = 50
# Of ten texts of 50 tokens: at the first token, around each read, and not before the last.
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 34, 49, 50)


def draw_prompts() -> list[Prompt]:
    """Prompts of different lengths, so that shorter rows have a mask."""
    draw = np.random.default_rng(3)
    return [
        Prompt(input_ids=draw.integers(0, VOCAB_SIZE, 5 + index % 4), num_new=NUM_NEW)
        for index in range(len(LENGTHS))
    ]


def is_done(index: int, step: int, _: int) -> bool:
    return step + 1 >= LENGTHS[index]


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return build_causal_lm(build("llama"))


@pytest.fixture(scope="module")
def expected(lm: CausalLM) -> list[Any]:
    whole = Decoder(lm, 4000).continue_greedily(draw_prompts())
    return [one.token_ids.tolist()[:n] for one, n in zip(whole, LENGTHS, strict=True)]


@pytest.mark.parametrize(
    ("read_every", "batch_tokens"), [(1, 200), (2, 4000), (16, 60), (16, 4000), (64, 200)]
)
def test_texts_are_the_same_however_seldom_they_are_read(
    lm: CausalLM, expected: list[Any], read_every: int, batch_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    seen: dict[int, list[int]] = {}

    def note(index: int, step: int, token: int) -> bool:
        assert len(seen.setdefault(index, [])) == step, "steps come in order, none after the end"
        seen[index].append(token)
        return is_done(index, step, token)

    decoder = Decoder(lm, batch_tokens)
    monkeypatch.setattr(decoder, "_loop", partial(decoder._loop, read_every=read_every))
    continued = decoder.continue_greedily(draw_prompts(), is_done=note)
    assert to_lists(continued) == expected
    assert [seen[index] for index in range(len(LENGTHS))] == expected


@pytest.mark.quick
def test_gaps_after_the_end_do_not_count(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    by_step, seldom = Decoder(lm, 4000), Decoder(lm, 4000)
    monkeypatch.setattr(seldom, "_loop", partial(seldom._loop, read_every=16))
    gaps = [
        [one.min_gap for one in decoder.continue_greedily(draw_prompts(), is_done=is_done)]
        for decoder in (by_step, seldom)
    ]
    # Finished rows leave the batch later, and sums in batches of another size differ in the last
    # bits of fp32 logits of some units.
    np.testing.assert_allclose(gaps[1], gaps[0], rtol=0, atol=1e-5)
    whole = [one.min_gap for one in by_step.continue_greedily(draw_prompts())]
    assert any(late < early - 1e-3 for late, early in zip(whole, gaps[0], strict=True))


def generate_and_count(model: Any, mesh: MeshShape, fits: bool) -> dict[str, Any]:
    layer = shard_scratch_model(
        model, Assembly(mesh=build_mesh(mesh, "cpu"), device=torch.device("cpu"))
    )
    num_forwards, forward = 0, CausalLM.forward

    def count(self: CausalLM, work: Any) -> Any:
        nonlocal num_forwards
        num_forwards += 1
        return forward(self, work)

    with pytest.MonkeyPatch.context() as patch, start_runtime() as runtime:
        patch.setattr(CausalLM, "fits_gathered", lambda self: fits)
        patch.setattr(CausalLM, "forward", count)
        with count_waits(runtime.control) as waits:
            decoder = Decoder(layer.lm, 150, runtime)
            continued = decoder.continue_greedily(draw_prompts()[:4], is_done=is_done)
            first, num_forwards = num_forwards, 0
            once = Waits(**vars(waits))
            decoder.continue_greedily(draw_prompts()[:1], is_done=lambda _, step, __: step >= 4)
    return {"texts": to_lists(continued), "waits": once, "forwards": (first, num_forwards)}


@pytest.mark.parametrize(
    "mesh", [MeshShape(z=4), pytest.param(MeshShape(x=2, z=2), marks=pytest.mark.mesh)]
)
def test_four_ranks_seldom_wait(ranks: RankPool, expected: list[Any], mesh: MeshShape) -> None:
    """50 tokens of texts that may end early; 51 agreements and 211 reads if each step is read."""
    for found in ranks(generate_and_count, 4, build("llama"), mesh, True):
        assert found["texts"] == expected[:4]
        # Whether weights fit, whether keys are cached, whether logits are finite, and two ends.
        assert found["waits"].num_agreements <= 5
        # Two reads before the last one; the others are of the check of the cache.
        assert found["waits"].num_reads <= 16


def test_where_weights_are_gathered_for_each_token_no_text_runs_on(
    ranks: RankPool, expected: list[Any]
) -> None:
    for found in ranks(generate_and_count, 2, build("llama"), MeshShape(z=2), False):
        assert found["texts"] == expected[:4]
        # Two batches of two texts, dealt to two ranks: 17 tokens are the most that are needed. The
        # check of the cache makes six forwards, once.
        assert found["forwards"] == (6 + 17, 5)


def test_nothing_is_read_before_the_end_where_no_text_ends_early(lm: CausalLM) -> None:
    """Each more batch reads once."""
    requests, decoder = make_requests(9), Decoder(lm, 4000)
    decoder.continue_greedily(requests)  # The check of the cache reads, once.
    with count_waits(None) as one_batch:
        decoder.continue_greedily(requests)
        decoder.continue_greedily(requests[:1])
    with count_waits(None) as twice:
        decoder.continue_greedily([*requests, *requests])
        decoder.continue_greedily(requests[:1])
    assert one_batch == twice
    with count_waits(None) as drawn:
        decoder.sample(requests[:4], SCHEME, 3, seed=1)
    with count_waits(None) as more:
        decoder.sample(requests[:4], SCHEME, 6, seed=1)
    assert drawn.num_reads == more.num_reads


def test_beams_are_read_once_a_step(lm: CausalLM) -> None:
    ids = np.arange(1, 9)
    counts = []
    for num_new in (10, 20):
        with count_waits(None) as waits:
            search_beams(Decoder(lm, 4000), [BeamRequest(prompt_ids=ids, num_new=num_new)], 3)
        counts.append(waits.num_reads)
    assert counts[1] - counts[0] == 10


# -- the head ----------------------------------------------------------------------------------


def test_the_head_is_widened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama").to(torch.bfloat16)
    lm = build_causal_lm(model)
    weight = model.get_output_embeddings().weight
    num_widened, original = 0, torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal num_widened
        is_head = self.data_ptr() == weight.data_ptr() and self.shape == weight.shape
        num_widened += is_head and torch.float32 in args
        return original(self, *args, **kwargs)

    requests = draw_prompts()[:3]
    monkeypatch.setattr(torch.Tensor, "to", to)
    Decoder(lm, 60).continue_greedily(requests)
    assert num_widened == 1, "for all steps of all batches"
    Decoder(lm, 60).continue_greedily(requests)
    assert num_widened == 2, "freed at the end: the weights may be trained in between"
