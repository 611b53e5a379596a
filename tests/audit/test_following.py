"""Documents continued from their scoring pass: the same numbers as those that run a second time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from audit_examples import Held, run_probes
from ranks import RankPool
from record_examples import make_document
from tiny_families import VOCAB_SIZE, build

from memguard.audit import decoding, following, runner
from memguard.audit.cache import RecordCache
from memguard.audit.context import AuditContext
from memguard.audit.decoding import Decoder
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.probes.near_verbatim import NearVerbatim
from memguard.audit.requests import Measured, Prompt
from memguard.audit.runner import Runner
from memguard.audit.scoring import ModelScorer
from memguard.audit.windows import Window
from memguard.hf.assembly import Assembly
from memguard.hf.load import shard_scratch_model
from memguard.model import kv_cache
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.runtime import start_runtime

SIZE = 12
ENDS = transformers.GenerationConfig(eos_token_id=[5, 9])
PROBE = ExtractionProbe(continuation_tokens=SIZE, generation_floor=0.3, num_generated_below_floor=3)


def build_layer(family: str, **fields: Any) -> CausalLM:
    model = build(family, **fields)
    model.generation_config = ENDS
    return build_causal_lm(model)


def make_windows(lm: CausalLM, num: int = 24, longest: int = 40) -> list[Window]:
    """Documents of several lengths: verbatim, diverging half-way, with one edit, and unknown."""
    draw = np.random.default_rng(2)
    sizes = draw.integers(9, longest - SIZE + 1, num).tolist()
    prompts = [Prompt(input_ids=draw.integers(0, VOCAB_SIZE, size), num_new=SIZE) for size in sizes]
    decoder = Decoder(lm, 200)
    texts = [one.token_ids for one in decoder.continue_greedily(prompts)]
    for index, text in enumerate(texts):
        if index % 4 == 1:
            text[SIZE // 2 :] = (text[SIZE // 2 :] + 1) % VOCAB_SIZE
        elif index % 4 == 2:
            text[SIZE - 3] = (text[SIZE - 3] + 1) % VOCAB_SIZE
        elif index % 4 == 3:
            text[:] = draw.integers(0, VOCAB_SIZE, SIZE)
    lm.cached_lengths.clear()
    rows = [np.append(p.input_ids, text) for p, text in zip(prompts, texts, strict=True)]
    windows = [
        PROBE.window(make_document(ids, name=f"d{n}", bucket="ab"[n % 2]))
        for n, ids in enumerate(rows)
    ]
    assert None not in windows
    return [window for window in windows if window is not None]


class Noting(Decoder):
    """A decoder that notes the prompts it is given, and the rows that it takes over."""

    num_prompts = num_kept = 0

    def continue_greedily(self, requests: Any, *args: Any, **fields: Any) -> Any:
        self.num_prompts += len(requests)
        return super().continue_greedily(requests, *args, **fields)

    def continue_kept(self, pool: Any, sizes: Sequence[int], *args: Any) -> Any:
        self.num_kept += len(sizes)
        return super().continue_kept(pool, sizes, *args)


def measure(lm: CausalLM, windows: Sequence[Window], decoder: Decoder, **given: Any) -> Measured:
    held = Held(ModelScorer(lm, 150), decoder, identity="m")
    return run_probes([PROBE], held, windows, **given)["extraction"]


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measure without keeping keys."""

    def measure_plainly(lm: CausalLM, windows: Sequence[Window]) -> Measured:
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "_follow", lambda *_: None)
            return measure(lm, windows, Decoder(lm, 300))

    return measure_plainly


def check_same(ours: Measured, theirs: Measured) -> None:
    np.testing.assert_allclose(ours.columns.rows, theirs.columns.rows, rtol=1e-6, atol=1e-5)
    one, other = ours.detail, theirs.detail
    assert np.array_equal(one.matched_N, other.matched_N)
    assert np.array_equal(one.num_edits_N, other.num_edits_N, equal_nan=True)
    np.testing.assert_allclose(one.min_gap_N, other.min_gap_N, rtol=0, atol=2e-5)
    assert (one.num_generated, one.num_checked) == (other.num_generated, other.num_checked)


def check_kept(num_kept: int, near: NearVerbatim, copies: int = 1) -> None:
    """More than the sample below the floor may be kept, before the others are scored."""
    num_more = num_kept - copies * near.num_generated
    assert 0 <= num_more <= copies * (near.num_below_floor - near.num_checked)


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma2"),
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in ("mistral", "qwen3", "gpt2", "gpt_neox", "mixtral", "bloom", "cohere")
        ),
    ],
)
@pytest.mark.parametrize("batch_tokens", [60, pytest.param(300, marks=pytest.mark.long)])
def test_numbers_are_those_of_a_second_pass(family: str, batch_tokens: int, never: Any) -> None:
    lm = build_layer(family)
    windows = make_windows(lm)
    decoder = Noting(lm, batch_tokens)
    ours = measure(lm, windows, decoder)
    near = ours.detail
    assert decoder.num_kept >= near.num_generated - (0 if batch_tokens == 300 else 4) > 8
    assert decoder.num_prompts == 0 or batch_tokens == 60
    check_same(ours, never(lm, windows))


def test_the_first_token_is_no_end_of_text(never: Any) -> None:
    lm = build_layer("llama")
    windows = make_windows(lm)
    scorer = ModelScorer(lm, 300)
    (result,) = scorer.score([windows[3].passage()])
    first = int(result.argmax[np.argmin(result.correct)])
    lm.model.generation_config = transformers.GenerationConfig(eos_token_id=first)
    decoder = Noting(lm, 300)
    ours = measure(lm, windows[3:4], decoder)
    assert decoder.num_kept == 1
    check_same(ours, never(lm, windows[3:4]))
    # The next best token is less likely than the one that ends the text.
    (prompt,) = [Prompt.of(windows[3], int(np.argmin(result.correct)))]
    (text,) = decoder.continue_greedily([prompt])
    assert first not in text.token_ids


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("family", ["mamba", pytest.param("phi3", marks=pytest.mark.long)])
def test_families_whose_keys_cannot_be_kept_run_as_before(family: str, never: Any) -> None:
    longrope = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}
    lm = build_layer(family, **(longrope if family == "phi3" else {}))
    windows, decoder = make_windows(lm), Noting(lm, 300)
    ours = measure(lm, windows, decoder)
    assert decoder.num_kept == 0 < decoder.num_prompts
    check_same(ours, never(lm, windows))


def test_a_family_that_forgets_its_window_with_a_cache_is_scored_without(
    monkeypatch: pytest.MonkeyPatch, never: Any
) -> None:
    # Longer than the few tokens that frequencies need.
    lm = build_layer("mistral", sliding_window=12)
    blind = build_layer("mistral", sliding_window=None)
    windows, decoder, original = make_windows(lm), Noting(lm, 300), lm.hidden_states
    theirs = never(lm, windows)

    def forget(ids: Any, *args: Any, cache: Any = None, **fields: Any) -> Any:
        of = original if cache is None else blind.hidden_states
        return of(ids, *args, cache=cache, **fields)

    lm.cached_lengths.clear()
    monkeypatch.setattr(lm, "hidden_states", forget)
    check_same(measure(lm, windows, decoder), theirs)
    assert decoder.num_kept == 0


def test_the_check_runs_once_and_nothing_is_checked_in_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = build_layer("llama")
    windows, checks = make_windows(lm), []

    def note(name: str, original: Any) -> Any:
        return lambda *args: (checks.append(name), original(*args))[1]

    monkeypatch.setattr(following, "can_continue", note("pass", kv_cache.can_continue))
    monkeypatch.setattr(decoding, "can_cache", note("whole", kv_cache.can_cache))
    num_forwards, forward = [0, 0], CausalLM.forward
    for look in range(2):

        def count(self: CausalLM, work: Any, look: int = look) -> Any:
            num_forwards[look] += 1
            return forward(self, work)

        monkeypatch.setattr(CausalLM, "forward", count)
        # A budget looks with a decoder of its own each time.
        measure(lm, windows, Decoder(lm, 300), in_training=True)
    assert checks == ["pass"]
    # Three tokens, a resumption and the first tokens alone.
    assert num_forwards[0] - num_forwards[1] == 5


@pytest.mark.parametrize("shard_items", [pytest.param(2048, marks=pytest.mark.long), 7])
def test_what_is_cached_is_not_continued(
    shard_items: int, tmp_path: Path, never: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_SHARD_ITEMS", shard_items)
    lm = build_layer("llama")
    windows, context = make_windows(lm), AuditContext(cache=RecordCache(tmp_path))
    first, again = Noting(lm, 300), Noting(lm, 300)
    ours = measure(lm, windows, first, context=context)
    check_same(ours, never(lm, windows))
    check_kept(first.num_kept, ours.detail)
    assert first.num_prompts == 0
    # Another margin: scores are measured again, and texts are those of the cache.
    check_same(measure(lm, windows, again, context=context, tiny_margin=1e-9), ours)
    assert (again.num_kept, again.num_prompts) == (0, 0)


@pytest.mark.parametrize(
    ("owner", "place"),
    [(kv_cache._Layer, "like"), (kv_cache.RowPool, "add"), (kv_cache.GrowingRows, "resume")],
)
def test_rows_that_do_not_fit_into_memory_run_as_before(
    owner: type, place: str, monkeypatch: pytest.MonkeyPatch, never: Any
) -> None:
    lm = build_layer("llama")
    windows, decoder, passes = make_windows(lm), Noting(lm, 300), []
    original = ModelScorer._score_batch

    def refuse(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    def run(scorer: ModelScorer, rows: Any, requested: Any, cache: Any = None) -> Any:
        # A pass that is repeated needs the memory of the keys.
        assert cache is not None or passes[-1] is None or not passes[-1].layers
        passes.append(cache)
        return original(scorer, rows, requested, cache)

    theirs = never(lm, windows)
    lm.cached_lengths[1, 100] = True
    monkeypatch.setattr(owner, place, refuse)
    monkeypatch.setattr(ModelScorer, "_score_batch", run)
    ours = measure(lm, windows, decoder)
    assert decoder.num_prompts == ours.detail.num_generated
    assert passes[0] is not None
    check_same(ours, theirs)


def test_memory_of_kept_rows_is_taken_in_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = build_layer("llama")
    windows = make_windows(lm)
    verbatim = max(windows[::4], key=lambda window: len(window.input_ids))
    size = len(verbatim.input_ids)
    pools: list[kv_cache.RowPool] = []

    def note(*args: Any) -> kv_cache.RowPool:
        pools.append(kv_cache.RowPool(*args))
        return pools[-1]

    monkeypatch.setattr(following, "RowPool", note)
    others = [window for window in windows[1::4] if len(window.input_ids) < size]
    decoder = Noting(lm, 300)
    held = Held(ModelScorer(lm, 1), decoder)
    run_probes([PROBE], held, [verbatim, *others[:2]])
    (pool,) = pools
    assert decoder.num_kept == len(pool.sizes) == 2
    assert len(pool.hidden_RD) == 300 // size


def measure_on_mesh(
    model: Any, mesh: MeshShape, windows: Sequence[Window], batch_tokens: int
) -> tuple[Measured, int, int]:
    """Return what a rank measures, and how many prompts and kept rows it continues."""
    layer = shard_scratch_model(
        model, Assembly(mesh=build_mesh(mesh, "cpu"), device=torch.device("cpu"))
    )
    layer.lm.model.generation_config = ENDS
    with start_runtime() as runtime:
        decoder = Noting(layer.lm, batch_tokens, runtime)
        held = Held(ModelScorer(layer.lm, 100, runtime), decoder)
        context = AuditContext(peers=runtime)
        found = run_probes([PROBE], held, windows, context=context)["extraction"]
    return found, decoder.num_prompts, decoder.num_kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "num"),
    [
        pytest.param(MeshShape(z=2), 24, marks=pytest.mark.quick),
        *(
            pytest.param(mesh, num, marks=pytest.mark.mesh)
            for mesh, num in (
                (MeshShape(x=2), 24),
                (MeshShape(y=2), 24),
                (MeshShape(data=2), 24),
                (MeshShape(x=2, z=2), 24),
                # One rank has no document.
                (MeshShape(z=2), 4),
            )
        ),
    ],
)
@pytest.mark.parametrize("batch_tokens", [100])
def test_ranks_continue_their_own_rows(
    ranks: RankPool, mesh: MeshShape, num: int, batch_tokens: int, never: Any
) -> None:
    lm = build_layer("llama")
    windows = make_windows(lm, num)
    theirs = never(lm, windows)
    copies = mesh.num_ranks // mesh.num_batch_ways
    results = ranks(
        measure_on_mesh, mesh.num_ranks, lm.model, mesh, windows, batch_tokens, timeout_s=60
    )
    for found, num_prompts, _ in results:
        check_same(found, theirs)
        assert num_prompts == 0
    check_kept(sum(num_kept for *_, num_kept in results), theirs.detail, copies)
