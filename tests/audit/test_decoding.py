"""Decoding against `generate` and log-probabilities, in every batch and on every mesh."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from ranks import RankPool
from scipy import stats
from tiny_families import VOCAB_SIZE, build
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.tensor import DTensor

from memguard.audit import decoding
from memguard.audit.decoding import Continuation, Decoder
from memguard.audit.requests import Prompt
from memguard.config.settings import SamplingScheme
from memguard.errors import ModelError
from memguard.hf.assembly import Assembly
from memguard.hf.load import shard_scratch_model
from memguard.model import kv_cache
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.runtime import start_runtime

pytestmark = pytest.mark.slow

SCHEME = SamplingScheme(temperature=0.8, top_k=12, top_p=0.9)


def make_requests(num: int, *, longest: int = 20, seed: int = 0) -> list[Prompt]:
    """Prompts of 1 to 40 tokens with 0 to ``longest`` to add."""
    draw = np.random.default_rng(seed)
    return [
        Prompt(
            input_ids=draw.integers(0, VOCAB_SIZE, draw.integers(1, 41)),
            num_new=int(draw.integers(0, longest + 1)),
            document=f"d{index}",
        )
        for index in range(num)
    ]


def generate(model: Any, requests: Sequence[Prompt]) -> list[list[int]]:
    """Continue each prompt alone, so that nothing is padded, by transformers."""
    # Of the checkpoint's own settings only where a text would end, which is suppressed.
    ends = model.generation_config.eos_token_id
    model.generation_config = transformers.GenerationConfig(eos_token_id=ends)
    continued = []
    for request in requests:
        ids = torch.from_numpy(np.asarray(request.input_ids, dtype=np.int64))[None]
        if request.num_new == 0:
            continued.append([])
            continue
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=request.num_new,
            max_new_tokens=request.num_new,
            pad_token_id=0,
        )
        assert output.shape[1] == ids.shape[1] + request.num_new, "generate stopped early"
        continued.append(output[0, ids.shape[1] :].tolist())
    return continued


def to_lists(continued: Sequence[Continuation | NDArray[np.int32]]) -> list[Any]:
    return [(one.token_ids if isinstance(one, Continuation) else one).tolist() for one in continued]


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return build_causal_lm(build("llama"))


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gpt2", "gemma2", "mamba"),
        *(pytest.param(each, marks=pytest.mark.long) for each in ("qwen2", "mistral")),
    ],
)
def test_greedy_is_what_generate_gives(family: str) -> None:
    model = build(family)
    requests = make_requests(7 if family == "mamba" else 13)
    continued = Decoder(build_causal_lm(model), 400).continue_greedily(requests)
    assert to_lists(continued) == generate(model, requests)
    assert len({tuple(tokens) for tokens in to_lists(continued)}) > 5, "these say something"


@pytest.fixture(scope="module")
def one_by_one(lm: CausalLM) -> tuple[list[Any], list[Any]]:
    """17 requests continued and 8 of them drawn, each row in a batch of its own."""
    alone, requests = Decoder(lm, 1), make_requests(17)
    return (
        to_lists(alone.continue_greedily(requests)),
        to_lists(alone.sample(requests[:8], SCHEME, 5, seed=3)),
    )


@pytest.mark.parametrize("num_rows", [3, 16])
def test_batches_do_not_matter(
    lm: CausalLM, one_by_one: tuple[list[Any], list[Any]], num_rows: int
) -> None:
    requests, decoder = make_requests(17), Decoder(lm, num_rows * 60)
    assert to_lists(decoder.continue_greedily(requests)) == one_by_one[0]
    assert to_lists(decoder.sample(requests[:8], SCHEME, 5, seed=3)) == one_by_one[1]


def test_batches_are_limited_and_longest_first(
    lm: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(20)
    shapes: list[tuple[int, ...]] = []
    original = lm.hidden_states

    def note(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shapes.append(tuple(ids.shape))
        return original(ids, *args, **kwargs)

    monkeypatch.setattr(lm, "hidden_states", note)
    steps: list[tuple[int, int]] = []
    Decoder(lm, 200).continue_greedily(requests, lambda done, total: steps.append((done, total)))
    # The check of whether to cache runs single rows and a pair of them first.
    prompts = [shape for shape in shapes[10:] if shape[1] > 1]
    assert all(rows * length <= 200 for rows, length in prompts)
    assert max(rows for rows, _ in prompts) > 1
    num_asked = sum(1 for request in requests if request.num_new)
    assert steps[-1] == (num_asked, num_asked)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_rows_that_are_done_leave_the_batch(lm: CausalLM) -> None:
    """A finished row beside longer ones would run beyond the model's positions."""
    draw = np.random.default_rng(2)
    requests = [
        Prompt(input_ids=draw.integers(0, VOCAB_SIZE, 61), num_new=3),
        Prompt(input_ids=draw.integers(0, VOCAB_SIZE, 40), num_new=24),
    ]
    continued = Decoder(lm, 1000).continue_greedily(requests)
    assert to_lists(continued) == generate(lm.model, requests)
    gpt2 = build_causal_lm(build("gpt2"))  # Its table of positions ends.
    assert to_lists(Decoder(gpt2, 1000).continue_greedily(requests)) == generate(
        gpt2.model, requests
    )


def test_ties_go_to_the_lowest_id(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lm, "hidden_states", lambda ids, *args, **kwargs: torch.zeros(*ids.shape, 32)
    )
    (continued,) = Decoder(lm, 10).continue_greedily(
        [Prompt(input_ids=np.array([5, 6]), num_new=4)]
    )
    # The end-of-text tokens of this model's configuration are others.
    assert continued.token_ids.tolist() == [0, 0, 0, 0]
    assert continued.token_ids.dtype == np.int32
    assert continued.min_gap == 0


@pytest.mark.quick
@pytest.mark.parametrize("is_list", [False, True])
def test_end_of_text_is_suppressed_as_generate_does(is_list: bool) -> None:
    model = build("llama")
    requests = [request for request in make_requests(12, seed=4) if request.num_new]
    # The two best tokens of a step, so that the third is the one to choose.
    ids_T = torch.from_numpy(requests[0].input_ids.astype(np.int64))
    with torch.no_grad():
        best = model(ids_T[None]).logits[0, -1].topk(2).indices.tolist()
    ends = [3, *best] if is_list else best[0]
    listed = ends if isinstance(ends, list) else [ends]
    model.generation_config = transformers.GenerationConfig(eos_token_id=ends)
    lm = build_causal_lm(model)
    assert lm.end_token_ids == tuple(sorted(set(listed)))
    expected = generate(model, requests)
    assert to_lists(Decoder(lm, 400).continue_greedily(requests)) == expected
    assert not {token for row in expected for token in row} & set(listed)


@pytest.mark.quick
def test_gaps_are_between_the_best_two_tokens_along_the_text(lm: CausalLM) -> None:
    requests = [request for request in make_requests(6, seed=5) if request.num_new]
    for request, one in zip(requests, Decoder(lm, 90).continue_greedily(requests), strict=True):
        ids = np.concatenate([request.input_ids, one.token_ids])
        with torch.no_grad():
            logits_TV = lm.model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        chosen = logits_TV[len(request.input_ids) - 1 : -1].double()
        chosen[:, list(lm.end_token_ids)] = -torch.inf
        best = chosen.topk(2).values
        # fp32 logits of some units: sums in another order move them by about 1e-6.
        assert one.min_gap == pytest.approx(float((best[:, 0] - best[:, 1]).min()), abs=1e-5)


def test_a_request_ends_where_the_rest_is_not_needed(lm: CausalLM) -> None:
    requests = make_requests(17, seed=6)
    whole = Decoder(lm, 4000).continue_greedily(requests)
    draw = np.random.default_rng(0)
    limits = [int(draw.integers(1, request.num_new + 2)) for request in requests]
    seen: dict[int, list[int]] = {}

    def is_done(index: int, step: int, token: int) -> bool:
        if step == 0:
            seen[index] = []
        assert len(seen[index]) == step, "steps come in order"
        seen[index].append(token)
        return step + 1 >= limits[index]

    for batch_tokens in (1, 200, 4000):
        ended = Decoder(lm, batch_tokens).continue_greedily(requests, is_done=is_done)
        assert to_lists(ended) == [
            one.token_ids.tolist()[:limit] for one, limit in zip(whole, limits, strict=True)
        ]
        assert [seen.get(index, []) for index in range(len(requests))] == to_lists(ended)


def test_no_forward_runs_after_all_requests_are_done(
    lm: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Prompt(input_ids=np.arange(1, 9), num_new=20) for _ in range(3)]
    decoder, calls = Decoder(lm, 4000), 0
    original = lm.hidden_states

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    decoder.continue_greedily(requests)
    monkeypatch.setattr(lm, "hidden_states", count)
    decoder.continue_greedily(requests)
    num_whole, calls = calls, 0
    decoder.continue_greedily(requests, is_done=lambda index, step, token: step >= 4)
    assert calls == num_whole - 15


def test_the_cache_is_checked_once_for_all_texts_that_are_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches of a benchmark come longest first; looks of a budget have the same windows."""
    lm, checked = build_causal_lm(build("llama")), []
    monkeypatch.setattr(
        decoding,
        "can_cache",
        lambda lm, *lengths: (checked.append(lengths), kv_cache.can_cache(lm, *lengths))[1],
    )
    for size in range(12, 2, -1):
        prompts = [Prompt(input_ids=np.arange(1, n), num_new=4) for n in (size, 2)]
        Decoder(lm, 400).continue_greedily(prompts)
    assert checked == [(1, 14)]


def test_obstacles_to_generation_are_named(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(lm, 100)
    assert decoder.find_obstacle() is None
    monkeypatch.setattr(lm.model, "hf_device_map", {"a": "cpu", "b": "disk"}, raising=False)
    assert "offloaded" in str(decoder.find_obstacle())
    monkeypatch.setattr(lm.model, "hf_device_map", {"": "cpu"}, raising=False)
    assert decoder.find_obstacle() is None


# -- sampling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [SamplingScheme(), SamplingScheme(top_k=9), SCHEME])
def test_tokens_are_drawn_as_often_as_they_are_likely(lm: CausalLM, scheme: SamplingScheme) -> None:
    """Pairs of tokens, 4,000 draws, against the product of their two probabilities."""
    prompt = np.array([3, 14, 15])
    num_draws = 4000
    request = Prompt(input_ids=prompt, num_new=2, document="pi")
    (drawn,) = Decoder(lm, 8000).sample([request], scheme, num_draws, seed=1)
    assert drawn.shape == (num_draws, 2)
    p_V = probabilities(lm, prompt, scheme)
    counts_V = np.bincount(drawn[:, 0], minlength=VOCAB_SIZE)
    check_counts(counts_V, p_V)
    first = int(counts_V.argmax())
    rest = drawn[drawn[:, 0] == first, 1]
    second_V = probabilities(lm, np.append(prompt, first), scheme)
    check_counts(np.bincount(rest, minlength=VOCAB_SIZE), second_V)


def probabilities(
    lm: CausalLM, prompt: NDArray[np.int64], scheme: SamplingScheme
) -> NDArray[np.float64]:
    """Of every next token, by the warpers of transformers on its own logits."""
    none: Any = None
    with torch.no_grad():
        logits_1V = lm.model(torch.from_numpy(prompt)[None]).logits[:, -1].double()
    logits_1V = transformers.TemperatureLogitsWarper(scheme.temperature)(none, logits_1V)
    if scheme.top_k is not None:
        logits_1V = transformers.TopKLogitsWarper(scheme.top_k)(none, logits_1V)
    if scheme.top_p is not None:
        logits_1V = transformers.TopPLogitsWarper(scheme.top_p)(none, logits_1V)
    return logits_1V.softmax(1)[0].numpy()


def check_counts(counts_V: NDArray[np.int64], p_V: NDArray[np.float64]) -> None:
    assert not counts_V[p_V == 0].any(), "a token that is cut off"
    expected_V = p_V * counts_V.sum()
    # Tokens that are expected fewer than five times count as one.
    rare_V = expected_V < 5
    counts = np.append(counts_V[~rare_V], counts_V[rare_V].sum())
    expected = np.append(expected_V[~rare_V], expected_V[rare_V].sum())
    is_there = expected > 0
    # Fixed seeds: of a right sampler one such test in a thousand would fail.
    assert stats.chisquare(counts[is_there], expected[is_there]).pvalue > 1e-3


@pytest.mark.quick
def test_draws_belong_to_seed_document_and_sample(lm: CausalLM) -> None:
    request, other = make_requests(2, seed=5)
    decoder = Decoder(lm, 500)
    requested = [
        Prompt(input_ids=request.input_ids, num_new=12, document="a"),
        Prompt(input_ids=request.input_ids, num_new=12, document="b"),
        Prompt(input_ids=other.input_ids, num_new=5, document="c"),
    ]
    a, b, c = decoder.sample(requested, SCHEME, 4, seed=0)
    assert a.shape == (4, 12)
    assert c.shape == (4, 5)
    assert len({tuple(row) for row in np.concatenate([a, b]).tolist()}) == 8
    # Whatever else is asked, in any order; of more samples and more tokens the first are the same.
    longer = Prompt(input_ids=request.input_ids, num_new=15, document="a")
    found = decoder.sample([requested[2], longer], SCHEME, 6, seed=0)
    assert found[0][:4].tolist() == c.tolist()
    assert found[1][:4, :12].tolist() == a.tolist()
    assert decoder.sample(requested[:1], SCHEME, 4, seed=1)[0].tolist() != a.tolist()


def test_one_likely_token_is_greedy(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only greedy decoding suppresses end-of-text tokens.
    monkeypatch.setattr(lm.model.generation_config, "eos_token_id", None)
    requests = make_requests(6)
    decoder = Decoder(lm, 300)
    drawn = decoder.sample(requests, SamplingScheme(top_k=1), 2, seed=0)
    for tokens_NS, greedy in zip(drawn, decoder.continue_greedily(requests), strict=True):
        assert tokens_NS.tolist() == [greedy.token_ids.tolist()] * 2


# -- meshes ------------------------------------------------------------------------------------


def decode_all(decoder: Decoder) -> list[Any]:
    """One request, so that most ranks have none; some, unevenly many; and draws."""
    requests = make_requests(9, longest=8, seed=1)
    return [
        to_lists(decoder.continue_greedily(requests[:1])),
        to_lists(decoder.continue_greedily(requests)),
        to_lists(
            decoder.continue_greedily(requests, is_done=lambda index, step, _: step >= index % 4)
        ),
        to_lists(decoder.sample(requests[:3], SCHEME, 3, seed=1)),
    ]


def decode_on_mesh(degrees: MeshShape, model: Any) -> list[Any]:
    mesh = build_mesh(degrees, "cpu")
    layer = shard_scratch_model(model, Assembly(mesh=mesh, device=torch.device("cpu")))
    with start_runtime() as runtime:
        return decode_all(Decoder(layer.lm, 150, runtime))


def check_mesh(ranks: RankPool, mesh: MeshShape, family: str) -> None:
    model = build(family)
    expected = decode_all(Decoder(build_causal_lm(model), 150))
    for found in ranks(decode_on_mesh, mesh.num_ranks, mesh, model):
        assert found == expected


def test_a_sharded_vocabulary_does_not_matter(ranks: RankPool) -> None:
    check_mesh(ranks, MeshShape(x=2), "llama")


def count_gathers(model: Any) -> tuple[list[int], list[bool]]:
    """Return the all-gathers of decoding, of two scoring forwards, and of decoding again.

    And after each, whether all parameters are stored in shards.
    """
    mesh = build_mesh(MeshShape(z=2), "cpu")
    layer = shard_scratch_model(model, Assembly(mesh=mesh, device=torch.device("cpu")))
    counts, is_sharded, original = [0], [], param_group.foreach_all_gather

    def count(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return original(*args, **kwargs)

    param_group.foreach_all_gather = count
    try:
        with start_runtime() as runtime:
            decoder = Decoder(layer.lm, 4000, runtime)
            for work in (decode_all, score_twice, decode_all):
                work(decoder)
                is_sharded.append(
                    all(isinstance(one, DTensor) for one in layer.lm.model.parameters())
                )
                counts.append(0)
    finally:
        param_group.foreach_all_gather = original
    return counts[:-1], is_sharded


@torch.no_grad()
def score_twice(decoder: Decoder) -> None:
    for _ in range(2):
        ids = torch.zeros(1, 4, dtype=torch.int64)
        decoder.lm(lambda ids=ids: decoder.lm.hidden_states(ids))


def test_weights_are_gathered_once_for_all_tokens(ranks: RankPool) -> None:
    model = build("llama")
    # Blocks, embedding, head, last norm: each forward of scoring gathers them all.
    num_units = model.config.num_hidden_layers + 3
    for counts, is_sharded in ranks(count_gathers, 2, model):
        # Four decodings of many steps each; scoring reads no head.
        assert counts[0] == counts[2] == 4 * num_units
        assert counts[1] in (2 * (num_units - 1), 2 * num_units)
        assert all(is_sharded)


@pytest.mark.mesh
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(
    "mesh",
    [
        MeshShape(z=2),
        MeshShape(y=2),
        MeshShape(x=2),
        MeshShape(z=2, x=2),
        MeshShape(data=2, z=2),
        MeshShape(x=4),  # Two ranks share a key/value head.
    ],
)
def test_meshes_do_not_matter_even_where_a_rank_has_nothing_to_do(
    ranks: RankPool, mesh: MeshShape, family: str
) -> None:
    check_mesh(ranks, mesh, family)


# -- refusals ----------------------------------------------------------------------------------


def ask(lm: CausalLM, ids: Sequence[int], num_new: int) -> list[NDArray[np.int32]]:
    request = Prompt(input_ids=np.array(ids), num_new=num_new)
    return Decoder(lm, 64).continue_greedily([request])


def test_memory_running_out_halves_the_batch(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(12)
    expected = to_lists(Decoder(lm, 1).continue_greedily(requests))
    original = lm.hidden_states

    def limited(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if ids.numel() > 120:
            raise torch.OutOfMemoryError("no")
        return original(ids, *args, **kwargs)

    monkeypatch.setattr(lm, "hidden_states", limited)
    assert to_lists(Decoder(lm, 2000).continue_greedily(requests)) == expected

    def refuse(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(ids) == 1 and ids.shape[1] == 5:
            raise torch.OutOfMemoryError("no")
        return original(ids, *args, **kwargs)

    monkeypatch.setattr(lm, "hidden_states", refuse)
    with pytest.raises(ModelError, match="fit into memory beside the model"):
        ask(lm, [1] * 5, 1)


def test_unfit_tokenizer_is_refused(lm: CausalLM) -> None:
    assert ask(lm, [0, VOCAB_SIZE - 1], 1)
    with pytest.raises(ModelError, match="a tokenizer that does not fit the model"):
        ask(lm, [0, VOCAB_SIZE], 1)


def test_text_beyond_the_positions_is_refused(lm: CausalLM) -> None:
    assert ask(lm, [1] * 60, 5)  # The last token is never run.
    with pytest.raises(ModelError, match="'max_position_embeddings' is 64"):
        ask(lm, [1] * 60, 6)


def test_damaged_weights_are_refused(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lm, "hidden_states", lambda ids, *args, **kwargs: torch.full((*ids.shape, 32), math.nan)
    )
    with pytest.raises(ModelError, match="not finite"):
        ask(lm, [1, 2], 3)
    with pytest.raises(ModelError, match="not finite"):
        Decoder(lm, 64).sample([Prompt(input_ids=np.array([1]), num_new=2)], SCHEME, 2, 0)


def test_model_comes_back_as_it_was(lm: CausalLM) -> None:
    lm.model.train()
    try:
        ask(lm, [1, 2], 3)
        assert lm.model.training
    finally:
        lm.model.eval()
    assert Decoder(lm, 64).continue_greedily([]) == []
    assert [len(one.token_ids) for one in ask(lm, [1, 2], 0)] == [0]
