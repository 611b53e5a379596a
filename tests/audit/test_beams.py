"""Beam search against `generate`, against trying everything, and on meshes."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from ranks import RankPool
from tiny_families import VOCAB_SIZE, build

from memguard.audit.beams import BeamRequest, Beams, search_beams
from memguard.audit.decoding import Decoder
from memguard.audit.requests import Prompt
from memguard.errors import ModelError
from memguard.hf.assembly import Assembly
from memguard.hf.checkpoint import load_tokenizer
from memguard.hf.load import load_model, shard_scratch_model
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.runtime import start_runtime

pytestmark = pytest.mark.slow


def make_requests(num: int, *, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> list[BeamRequest]:
    """Prompts of 1 to 40 tokens with 1 to 12 to add."""
    draw = np.random.default_rng(seed)
    return [
        BeamRequest(
            prompt_ids=draw.integers(0, vocab_size, draw.integers(1, 41)),
            num_new=int(draw.integers(1, 13)),
        )
        for _ in range(num)
    ]


def generate_beams(model: Any, request: BeamRequest, width: int) -> Any:
    """All beams of one prompt by transformers, whose scores are divided by the length at the end.

    Without EOS none is done early, and all are equally long.
    """
    model.generation_config = transformers.GenerationConfig()
    ids = torch.from_numpy(np.asarray(request.prompt_ids, dtype=np.int64))[None]
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=request.num_new,
        length_penalty=0.0,
        early_stopping=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )


def check_generated(model: Any, requests: Sequence[BeamRequest], width: int) -> None:
    found = search_beams(Decoder(build_causal_lm(model), 2000), requests, width)
    for request, beams in zip(requests, found, strict=True):
        theirs = generate_beams(model, request, width)
        new_WS = theirs.sequences[:, len(request.prompt_ids) :].tolist()
        assert beams.ids_WS.tolist() == new_WS
        # Sums of up to 50 fp32 log-probabilities.
        np.testing.assert_allclose(beams.score_W, theirs.sequences_scores, rtol=0, atol=2e-3)


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return build_causal_lm(build("llama"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "mistral", "mamba"])
def test_beams_are_those_of_generate(family: str) -> None:
    check_generated(build(family), make_requests(3 if family == "mamba" else 8), 4)


def test_beams_are_those_of_generate_on_real_text(shared_data: Path) -> None:
    folder = str(shared_data / "checkpoints" / "stories260K")
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    lines = (shared_data / "text" / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    requests = [
        BeamRequest(
            prompt_ids=np.array(tokenizer(json.loads(line)["text"][:2000]).input_ids[:size]),
            num_new=16,
        )
        for line, size in zip(lines, (20, 33, 64, 90, 121, 150), strict=False)
    ]
    check_generated(model, requests, 3)


@pytest.mark.quick
def test_as_many_beams_as_there_are_texts_find_the_best_of_all() -> None:
    """Three tokens of seven: with 49 beams nothing is lost, whatever else is tried."""
    model = build("llama", vocab_size=7)
    prompt = np.array([3, 1, 4])
    request = BeamRequest(prompt_ids=prompt, num_new=3)
    (beams,) = search_beams(Decoder(build_causal_lm(model), 5000), [request], 49)
    scores = {}
    for text in itertools.product(range(7), repeat=3):
        ids = torch.tensor([[*prompt.tolist(), *text]])
        with torch.no_grad():
            logprob_SV = model(ids).logits[0, 2:-1].double().log_softmax(1)
        scores[text] = float(logprob_SV[range(3), text].sum())
    best = sorted(scores, key=lambda text: -scores[text])[:49]
    assert [tuple(text) for text in beams.ids_WS.tolist()] == best
    # fp32 against float64.
    np.testing.assert_allclose(beams.score_W, [scores[text] for text in best], atol=1e-4)


def test_one_beam_is_greedy(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only greedy decoding suppresses end-of-text tokens.
    monkeypatch.setattr(lm.model.generation_config, "eos_token_id", None)
    requests = make_requests(6)
    decoder = Decoder(lm, 300)
    greedy = decoder.continue_greedily(
        [Prompt(input_ids=each.prompt_ids, num_new=each.num_new) for each in requests]
    )
    for beams, tokens in zip(search_beams(decoder, requests, 1), greedy, strict=True):
        assert beams.ids_WS.tolist() == [tokens.token_ids.tolist()]


def test_batches_do_not_matter(lm: CausalLM) -> None:
    requests = make_requests(9)
    alone, *others = (search_beams(Decoder(lm, size), requests, 5) for size in (1, 800, 9000))
    for other in others:
        assert [b.ids_WS.tolist() for b in other] == [b.ids_WS.tolist() for b in alone]


def test_equal_scores_go_by_the_more_likely_token_then_the_lower_id(
    lm: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        lm, "hidden_states", lambda ids, *args, **kwargs: torch.zeros(*ids.shape, 32)
    )
    request = BeamRequest(prompt_ids=np.array([5]), num_new=2)
    (beams,) = search_beams(Decoder(lm, 100), [request], 4)
    assert beams.ids_WS.tolist() == [[0, 0], [1, 0], [2, 0], [3, 0]]
    assert beams.score_W.tolist() == pytest.approx([-2 * math.log(VOCAB_SIZE)] * 4)


def test_a_vocabulary_smaller_than_the_width_gives_fewer_beams() -> None:
    lm = build_causal_lm(build("llama", vocab_size=3))
    request = BeamRequest(prompt_ids=np.array([1]), num_new=1)
    (beams,) = search_beams(Decoder(lm, 100), [request], 8)
    assert sorted(beams.ids_WS[:, 0].tolist()) == [0, 1, 2]
    assert search_beams(Decoder(lm, 100), [], 8) == []


def odd_places(ids_RT: NDArray[np.int64], candidates_RC: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Free where the next token stands at an odd place."""
    return np.full(candidates_RC.shape, ids_RT.shape[1] % 2 == 1)


def test_guesses_cost_what_they_are_said_to(lm: CausalLM) -> None:
    prompt = np.array([7, 8, 9])
    for cost in (0.0, 2.0):
        request = BeamRequest(prompt_ids=prompt, num_new=4, is_free=odd_places, guess_cost=cost)
        (beams,) = search_beams(Decoder(lm, 5000), [request], 6, candidates=20)
        for text, score in zip(beams.ids_WS.tolist(), beams.score_W, strict=True):
            ids = torch.tensor([[*prompt.tolist(), *text]])
            with torch.no_grad():
                logprob_SV = lm.model(ids).logits[0, 2:-1].double().log_softmax(1)
            logprob = logprob_SV[range(4), text].tolist()
            # The first and the third of the new tokens stand at places 3 and 5.
            guesses = -cost * (1 - 0.05 * logprob[0]) - cost * (1 - 0.05 * logprob[2])
            assert score == pytest.approx(logprob[1] + logprob[3] + guesses, abs=1e-4)
        assert beams.score_W.tolist() == sorted(beams.score_W, reverse=True)


def test_free_tokens_are_found_by_what_follows_them(lm: CausalLM) -> None:
    """The best pair (guess, token) over all guesses, not the one after the likeliest guess."""
    prompt = np.array([7, 8, 9])
    request = BeamRequest(prompt_ids=prompt, num_new=2, is_free=odd_places)
    (beams,) = search_beams(Decoder(lm, 50_000), [request], VOCAB_SIZE, candidates=VOCAB_SIZE)
    ids = torch.cat(
        [torch.from_numpy(prompt).expand(VOCAB_SIZE, 3), torch.arange(VOCAB_SIZE)[:, None]], 1
    )
    with torch.no_grad():
        logprob_VV = lm.model(ids).logits[:, -1].log_softmax(1)
    best = int(logprob_VV.argmax())
    assert beams.ids_WS[0].tolist() == [best // VOCAB_SIZE, best % VOCAB_SIZE]


def search_on_mesh(degrees: MeshShape, model: Any, requests: list[BeamRequest]) -> list[Beams]:
    mesh = build_mesh(degrees, "cpu")
    layer = shard_scratch_model(model, Assembly(mesh=mesh, device=torch.device("cpu")))
    with start_runtime() as runtime:
        return search_beams(Decoder(layer.lm, 400, runtime), requests, 4)


def check_mesh(ranks: RankPool, mesh: MeshShape, family: str) -> None:
    model, requests = build(family), make_requests(5)
    alone = search_beams(Decoder(build_causal_lm(model), 400), requests, 4)
    for found in ranks(search_on_mesh, mesh.num_ranks, mesh, model, requests):
        for one, other in zip(alone, found, strict=True):
            assert one.ids_WS.tolist() == other.ids_WS.tolist()
            # fp32 sums of 32 to 97 numbers in another order, 12 of them.
            np.testing.assert_allclose(one.score_W, other.score_W, atol=1e-3)


def test_a_sharded_vocabulary_does_not_matter(ranks: RankPool) -> None:
    check_mesh(ranks, MeshShape(x=2), "llama")


@pytest.mark.mesh
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(
    "mesh", [MeshShape(z=2), MeshShape(y=2), MeshShape(x=2), MeshShape(z=2, x=2), MeshShape(x=4)]
)
def test_meshes_do_not_matter(ranks: RankPool, mesh: MeshShape, family: str) -> None:
    check_mesh(ranks, mesh, family)


def test_damaged_weights_are_refused(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lm, "hidden_states", lambda ids, *args, **kwargs: torch.full((*ids.shape, 32), math.nan)
    )
    with pytest.raises(ModelError, match="not finite"):
        search_beams(Decoder(lm, 64), make_requests(1), 2)
