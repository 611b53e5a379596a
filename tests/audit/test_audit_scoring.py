"""One scorer: same answer in every batch, clear refusals."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from ranks import RankPool

from memguard.audit.extraction import AuditDocument, ExtractionProbe, TokenResult, Window
from memguard.audit.scoring import ModelScorer
from memguard.errors import ModelError
from memguard.parallel.assemble import Sharding
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.scratch import shard_scratch_model
from memguard.parallel.vocab import VocabLayer
from memguard.parallel.vocab_checks import build_vocab_layer
from memguard.runtime import start_runtime

VOCAB = 61


@pytest.fixture(scope="module")
def vocab() -> VocabLayer:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    return build_vocab_layer(transformers.LlamaForCausalLM(config).eval())


@pytest.fixture(scope="module")
def windows(make_document: Callable[..., AuditDocument]) -> list[Window]:
    draw = np.random.default_rng(1)
    probe = ExtractionProbe(continuation_tokens=8, min_prefix_tokens=1)
    cut = [
        probe.window(make_document(draw.integers(0, VOCAB, size), name=str(size)))
        for size in draw.integers(9, 65, 33)
    ]
    return [window for window in cut if window is not None]


def _reference(model: Any, window: Window) -> TokenResult:
    """The same by the model's own forward, alone and unpadded."""
    ids = torch.from_numpy(window.input_ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, window.prefix_tokens - 1 : -1].double()
    labels = ids[0, window.prefix_tokens :]
    others = logits.scatter(1, labels[:, None], -math.inf).amax(1)
    truth = logits.gather(1, labels[:, None])[:, 0]
    argmax = logits.argmax(1)
    return TokenResult(
        argmax=argmax.int().numpy(),
        correct=(argmax == labels).numpy(),
        logprob=logits.log_softmax(1).gather(1, labels[:, None])[:, 0].float().numpy(),
        margin=(truth - others).float().numpy(),
    )


def score_on_mesh(degrees: MeshShape, model: Any, windows: list[Window]) -> list[TokenResult]:
    mesh = build_mesh(degrees, "cpu")
    sharding = Sharding(mesh=mesh, device=torch.device("cpu"))
    layer = shard_scratch_model(model, sharding)
    with start_runtime() as runtime:
        return ModelScorer(layer.vocab, 100, runtime).score(windows)


@pytest.mark.parametrize("num_windows", [1, 33])
@pytest.mark.parametrize("mesh", [MeshShape(data=2, z=2), MeshShape(z=3), MeshShape(y=2, x=2)])
def test_meshes_do_not_matter_even_where_a_rank_has_nothing_to_do(
    vocab: VocabLayer,
    windows: list[Window],
    ranks: RankPool,
    mesh: MeshShape,
    num_windows: int,
) -> None:
    asked = windows[:num_windows]
    alone = ModelScorer(vocab, batch_tokens=100).score(asked)
    for results in ranks(score_on_mesh, mesh.num_ranks, mesh, vocab.model, asked):
        for one, other in zip(alone, results, strict=True):
            assert one.argmax.tolist() == other.argmax.tolist()
            assert one.correct.tolist() == other.correct.tolist()
            # fp32 sums of 32 to 61 numbers of order 1, in another order: about 1e-6.
            np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-4)
            np.testing.assert_allclose(one.margin, other.margin, atol=1e-4)


@pytest.mark.parametrize("num_windows", [1, 7, 32])
def test_batches_do_not_matter(vocab: VocabLayer, windows: list[Window], num_windows: int) -> None:
    scorer = ModelScorer(vocab, batch_tokens=num_windows * 64)
    for window, result in zip(windows, scorer.score(windows), strict=True):
        expected = _reference(vocab.model, window)
        assert result.argmax.tolist() == expected.argmax.tolist()
        assert result.correct.tolist() == expected.correct.tolist()
        # fp32 sums of 32 to 61 numbers of order 1, in another order: about 1e-6.
        np.testing.assert_allclose(result.logprob, expected.logprob, atol=1e-4)
        np.testing.assert_allclose(result.margin, expected.margin, atol=1e-4)
        assert result.argmax.dtype == np.int32
        assert result.logprob.dtype == np.float32


def test_batches_are_limited_and_longest_first(
    vocab: VocabLayer, windows: list[Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    original = vocab.hidden_states
    monkeypatch.setattr(
        vocab, "hidden_states", lambda ids: (shapes.append(tuple(ids.shape)), original(ids))[1]
    )
    steps: list[tuple[int, int]] = []
    ModelScorer(vocab, 130).score(windows, lambda done, total: steps.append((done, total)))
    assert all(rows * length <= 130 for rows, length in shapes)
    lengths = [length for _, length in shapes]
    assert lengths == sorted(lengths, reverse=True)
    assert sum(rows for rows, _ in shapes) == len(windows)
    assert steps[-1] == (len(windows), len(windows))
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_memory_running_out_halves_the_batch(
    vocab: VocabLayer, windows: list[Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ModelScorer(vocab, 64).score(windows)
    sizes: list[int] = []
    original = vocab.hidden_states

    def limited(ids: torch.Tensor) -> torch.Tensor:
        sizes.append(len(ids))
        if ids.numel() > 4 * 64:
            raise torch.OutOfMemoryError("no")
        return original(ids)

    monkeypatch.setattr(vocab, "hidden_states", limited)
    results = ModelScorer(vocab, 32 * 64).score(windows)
    assert sizes[0] > 4
    assert [r.argmax.tolist() for r in results] == [r.argmax.tolist() for r in expected]

    monkeypatch.setattr(vocab, "hidden_states", _raise_out_of_memory)
    with pytest.raises(ModelError, match="does not fit into GPU memory"):
        ModelScorer(vocab, 4096).score(windows)


def _raise_out_of_memory(ids: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("no")


def test_ties_and_margins_are_the_heads(
    vocab: VocabLayer, windows: list[Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    # All logits equal: the first choice is token 0, whatever the device, by no margin.
    monkeypatch.setattr(vocab, "hidden_states", lambda ids: torch.zeros(*ids.shape, 32))
    for window, result in zip(windows, ModelScorer(vocab, 512).score(windows), strict=True):
        assert not result.argmax.any()
        assert result.correct.tolist() == (window.continuation_ids == 0).tolist()
        assert not result.margin.any()


def test_unfit_tokenizer_is_refused(
    vocab: VocabLayer, make_document: Callable[..., AuditDocument]
) -> None:
    assert _score(vocab, [make_document([*range(20), VOCAB - 1])])
    with pytest.raises(ModelError, match="a tokenizer that does not fit the model"):
        _score(vocab, [make_document([*range(20), VOCAB])])


def test_window_beyond_the_positions_is_refused(
    vocab: VocabLayer, make_document: Callable[..., AuditDocument]
) -> None:
    assert _score(vocab, [make_document([1] * 65)])  # the last token is only a label
    with pytest.raises(ModelError, match="'max_position_embeddings' is 64"):
        _score(vocab, [make_document([1] * 66)])


def test_damaged_weights_are_refused(
    vocab: VocabLayer, windows: list[Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab, "hidden_states", lambda ids: torch.full((*ids.shape, 32), math.nan))
    with pytest.raises(ModelError, match="not finite"):
        ModelScorer(vocab, 512).score(windows)


def test_model_comes_back_as_it_was(vocab: VocabLayer, windows: list[Window]) -> None:
    vocab.model.train()
    try:
        ModelScorer(vocab, 512).score(windows[:2])
        assert vocab.model.training
    finally:
        vocab.model.eval()
    assert ModelScorer(vocab, 512).score([]) == []


def _score(vocab: VocabLayer, documents: Sequence[AuditDocument]) -> list[TokenResult]:
    probe = ExtractionProbe(continuation_tokens=4, min_prefix_tokens=1)
    windows = [probe.window(document) for document in documents]
    return ModelScorer(vocab, 512).score([w for w in windows if w is not None])
