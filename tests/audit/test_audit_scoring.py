"""One scorer: same answer in every batch and on every mesh, clear refusals."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from audit_examples import build_tiny_layer
from ranks import RankPool
from record_examples import make_document

from memguard.audit.passages import EXTRAS, Passage, ScoreSelection, TokenResult
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.scoring import ModelScorer
from memguard.audit.windows import TINY_MARGINS, AuditDocument
from memguard.config.settings import SamplingScheme
from memguard.errors import ModelError
from memguard.hf.assembly import Assembly
from memguard.hf.load import shard_scratch_model
from memguard.model.causal_lm import CausalLM
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.runtime import start_runtime

pytestmark = pytest.mark.slow

VOCAB = 61
EVERYTHING = ScoreSelection(
    needs=frozenset(EXTRAS),
    schemes=(
        SamplingScheme(),
        SamplingScheme(temperature=0.7),
        SamplingScheme(top_k=5),
        SamplingScheme(temperature=1.5, top_k=20, top_p=0.9),
        SamplingScheme(top_p=0.6),
    ),
)


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return build_tiny_layer(VOCAB)


@pytest.fixture(scope="module")
def passages() -> list[Passage]:
    """All kinds: every token wanted, choices of all, of some, of one, of none."""
    draw = np.random.default_rng(1)
    made = []
    for number, size in enumerate(draw.integers(9, 65, 33)):
        ids = draw.integers(0, VOCAB, size).astype(np.int32)
        first_label = int(draw.integers(1, size - 1))
        first_choice = int(draw.integers(first_label, size))
        if number % 4 == 1:
            first_choice = first_label
        elif number % 4 == 2:
            first_label = 1
        elif number % 4 == 3:
            first_choice = int(size)
        made.append(Passage(input_ids=ids, first_label=first_label, first_choice=first_choice))
    return made


def _log_warped(logits_NV: torch.Tensor, scheme: SamplingScheme) -> torch.Tensor:
    """The log-probabilities that transformers samples from."""
    warpers = [transformers.TemperatureLogitsWarper(scheme.temperature)]
    if scheme.top_k is not None:
        warpers.append(transformers.TopKLogitsWarper(scheme.top_k))
    if scheme.top_p is not None:
        warpers.append(transformers.TopPLogitsWarper(scheme.top_p))
    for warp in warpers:
        logits_NV = warp(None, logits_NV)
    return logits_NV.log_softmax(1)


def _reference(model: Any, passage: Passage) -> TokenResult:
    """The same by the model's own forward, alone and unpadded, in float64 from its logits on."""
    ids = torch.from_numpy(passage.input_ids.astype(np.int64))[None]
    with torch.no_grad():
        logits_NV = model(ids, use_cache=False).logits[0, passage.first_label - 1 : -1].double()
    labels_N1 = ids[0, passage.first_label :, None]
    logprob_NV = logits_NV.log_softmax(1)
    mean_N1 = (logprob_NV.exp() * logprob_NV).sum(1, keepdim=True)
    variance_N = (logprob_NV.exp() * (logprob_NV - mean_N1).square()).sum(1)
    # The model's end-of-text token is above no label.
    ranked_NV = logits_NV.index_fill(1, torch.tensor([2]), -math.inf)
    rank_N = 1 + (ranked_NV > logits_NV.gather(1, labels_N1) + TINY_MARGINS["fp32"]).sum(1)
    chosen = slice(passage.first_choice - passage.first_label, None)
    label_C1 = labels_N1[chosen]
    others_CV = logits_NV[chosen].scatter(1, label_C1, -math.inf)
    argmax_C = logits_NV[chosen].argmax(1)
    sampled = [
        _log_warped(logits_NV[chosen], scheme).gather(1, label_C1)[:, 0]
        for scheme in EVERYTHING.schemes
    ]
    return TokenResult(
        logprob=logprob_NV.gather(1, labels_N1)[:, 0].float().numpy(),
        argmax=argmax_C.int().numpy(),
        correct=(argmax_C == label_C1[:, 0]).numpy(),
        margin=(logits_NV[chosen].gather(1, label_C1)[:, 0] - others_CV.amax(1)).float().numpy(),
        entropy=-mean_N1[:, 0].float().numpy(),
        variance_logprob=variance_N.float().numpy(),
        is_best=(logits_NV.argmax(1, keepdim=True) == labels_N1)[:, 0].float().numpy(),
        rank=rank_N.float().numpy(),
        sampled=torch.stack(sampled).float().numpy(),
    )


@pytest.fixture(scope="module")
def references(lm: CausalLM, passages: list[Passage]) -> list[TokenResult]:
    return [_reference(lm.model, passage) for passage in passages]


def _check_same(found: TokenResult, expected: TokenResult) -> None:
    assert found.argmax.tolist() == expected.argmax.tolist()
    assert found.correct.tolist() == expected.correct.tolist()
    for name in ("logprob", "margin", "sampled", *EXTRAS):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == np.float32
        assert ours.shape == theirs.shape
        # fp32 sums of 32 to 61 numbers of order 1, in another order: about 1e-6; a variance squares
        # what it sums. What a scheme cuts off is -inf on both sides.
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-5, err_msg=name)


def score_on_mesh(degrees: MeshShape, model: Any, passages: list[Passage]) -> list[TokenResult]:
    mesh = build_mesh(degrees, "cpu")
    sharding = Assembly(mesh=mesh, device=torch.device("cpu"))
    layer = shard_scratch_model(model, sharding)
    with start_runtime() as runtime:
        scorer = ModelScorer(layer.lm, 100, runtime)
        found = scorer.score(passages, EVERYTHING)
        assert scorer.score([], EVERYTHING) == []
        return found


@pytest.mark.parametrize(
    ("mesh", "num_passages"),
    [
        (MeshShape(data=2, z=2), 1),
        (MeshShape(y=2, x=2), 33),
        pytest.param(MeshShape(data=2, z=2), 33, marks=pytest.mark.mesh),
        pytest.param(MeshShape(z=3), 1, marks=pytest.mark.mesh),
        pytest.param(MeshShape(z=3), 33, marks=pytest.mark.mesh),
        pytest.param(MeshShape(y=2, x=2), 1, marks=pytest.mark.mesh),
    ],
    ids=str,
)
def test_meshes_do_not_matter_even_where_a_rank_has_nothing_to_do(
    lm: CausalLM, passages: list[Passage], ranks: RankPool, mesh: MeshShape, num_passages: int
) -> None:
    requested = passages[:num_passages]
    alone = ModelScorer(lm, batch_tokens=100).score(requested, EVERYTHING)
    for results in ranks(score_on_mesh, mesh.num_ranks, mesh, lm.model, requested):
        for one, other in zip(results, alone, strict=True):
            _check_same(one, other)


@pytest.mark.parametrize("num_passages", [1, 7, 32])
def test_batches_do_not_matter(
    lm: CausalLM, passages: list[Passage], references: list[TokenResult], num_passages: int
) -> None:
    results = ModelScorer(lm, batch_tokens=num_passages * 64).score(passages, EVERYTHING)
    for passage, result, reference in zip(passages, results, references, strict=True):
        assert result.argmax.dtype == np.int32
        assert len(result.logprob) == passage.num_labels
        assert len(result.argmax) == len(passage.input_ids) - passage.first_choice
        _check_same(result, reference)


def test_order_of_passages_does_not_matter(lm: CausalLM, passages: list[Passage]) -> None:
    scorer = ModelScorer(lm, batch_tokens=300)
    forwards = scorer.score(passages, EVERYTHING)
    backwards = scorer.score(passages[::-1], EVERYTHING)[::-1]
    for one, other in zip(forwards, backwards, strict=True):
        _check_same(one, other)


def test_only_what_is_asked_for_is_there(lm: CausalLM, passages: list[Passage]) -> None:
    for result in ModelScorer(lm, 512).score(passages[:4]):
        assert result.entropy is None
        assert result.variance_logprob is None
        assert result.sampled is None


def test_batches_are_limited_and_longest_first(
    lm: CausalLM, passages: list[Passage], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    original = lm.hidden_states
    monkeypatch.setattr(
        lm, "hidden_states", lambda ids, **_: (shapes.append(tuple(ids.shape)), original(ids))[1]
    )
    ModelScorer(lm, 130).score(passages)
    assert all(rows * length <= 130 for rows, length in shapes)
    lengths = [length for _, length in shapes]
    assert lengths == sorted(lengths, reverse=True)
    assert sum(rows for rows, _ in shapes) == len(passages)


def test_memory_running_out_halves_the_batch(
    lm: CausalLM, passages: list[Passage], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ModelScorer(lm, 64).score(passages)
    sizes: list[int] = []
    original = lm.hidden_states

    def limited(ids: torch.Tensor, **_: object) -> torch.Tensor:
        sizes.append(len(ids))
        if ids.numel() > 4 * 64:
            raise torch.OutOfMemoryError("no")
        return original(ids)

    monkeypatch.setattr(lm, "hidden_states", limited)
    results = ModelScorer(lm, 32 * 64).score(passages)
    assert sizes[0] > 4
    assert [r.argmax.tolist() for r in results] == [r.argmax.tolist() for r in expected]

    monkeypatch.setattr(lm, "hidden_states", _raise_out_of_memory)
    with pytest.raises(ModelError, match="does not fit into memory"):
        ModelScorer(lm, 4096).score(passages)


def _raise_out_of_memory(ids: torch.Tensor, **_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("no")


def test_ties_and_margins_are_the_heads(
    lm: CausalLM, passages: list[Passage], monkeypatch: pytest.MonkeyPatch
) -> None:
    # All logits equal: the first choice is token 0, whatever the device, by no margin.
    monkeypatch.setattr(lm, "hidden_states", lambda ids, **_: torch.zeros(*ids.shape, 32))
    for passage, result in zip(passages, ModelScorer(lm, 512).score(passages), strict=True):
        assert not result.argmax.any()
        labels = passage.input_ids[passage.first_choice :]
        assert result.correct.tolist() == (labels == 0).tolist()
        assert not result.margin.any()


def test_without_a_budget_all_goes_at_once_on_a_cpu(
    lm: CausalLM, passages: list[Passage], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    original = lm.hidden_states
    monkeypatch.setattr(
        lm, "hidden_states", lambda ids, **_: (rows.append(len(ids)), original(ids))[1]
    )
    ModelScorer(lm).score(passages)
    assert rows == [len(passages)]


def test_unfit_tokenizer_is_refused(lm: CausalLM) -> None:
    assert _score(lm, [make_document([*range(20), VOCAB - 1])])
    with pytest.raises(ModelError, match="a tokenizer that does not fit the model"):
        _score(lm, [make_document([*range(20), VOCAB])])


def test_passage_beyond_the_positions_is_refused(lm: CausalLM) -> None:
    assert _score(lm, [make_document([1] * 65)])  # the last token is only a label
    with pytest.raises(ModelError, match="'max_position_embeddings' is 64"):
        _score(lm, [make_document([1] * 66)])


@pytest.mark.quick
def test_damaged_weights_are_refused(
    lm: CausalLM, passages: list[Passage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        lm, "hidden_states", lambda ids, **_: torch.full((*ids.shape, 32), math.nan)
    )
    with pytest.raises(ModelError, match="not finite"):
        ModelScorer(lm, 512).score(passages)


def test_model_comes_back_as_it_was(lm: CausalLM, passages: list[Passage]) -> None:
    lm.model.train()
    try:
        ModelScorer(lm, 512).score(passages[:2])
        assert lm.model.training
    finally:
        lm.model.eval()
    assert ModelScorer(lm, 512).score([]) == []


def _score(lm: CausalLM, documents: Sequence[AuditDocument]) -> list[TokenResult]:
    probe = ExtractionProbe(continuation_tokens=4, min_prefix_tokens=1)
    windows = [probe.window(document) for document in documents]
    return ModelScorer(lm, 512).score([w.passage() for w in windows if w is not None])
