"""The central claim: one pass says what greedy decoding would do, on every document."""

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from memguard.audit.extraction import AuditDocument, ExtractionProbe, Window
from memguard.audit.scoring import ModelScorer
from memguard.parallel.checkpoint_folder import load_tokenizer
from memguard.parallel.vocab_checks import build_vocab_layer
from memguard.parallel.weights import load_model
from memguard.records import DocumentScore

MakeDocument = Callable[..., AuditDocument]


def _generate(model: Any, windows: Sequence[Window]) -> list[list[int]]:
    """Continue each window's prefix greedily; equal lengths together, so nothing is padded."""
    # Whatever the checkpoint's own settings are, e.g. an EOS that would end a text early.
    model.generation_config = transformers.GenerationConfig()
    shape = lambda i: (windows[i].prefix_tokens, windows[i].continuation_tokens)  # noqa: E731
    continued: dict[int, list[int]] = {}
    for (prefix, size), indices in groupby(sorted(range(len(windows)), key=shape), key=shape):
        batch = list(indices)
        ids = torch.tensor(np.stack([windows[i].input_ids[:prefix] for i in batch])).long()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=size,
            pad_token_id=0,
        )
        assert output.shape == (len(batch), prefix + size), "generate stopped early"
        continued |= dict(zip(batch, output[:, prefix:].tolist(), strict=True))
    return [continued[index] for index in range(len(windows))]


def _check(
    model: Any, documents: Sequence[AuditDocument], probe: ExtractionProbe
) -> list[DocumentScore]:
    """Compare one pass with `generate` on every document; return the scores."""
    cut = [probe.window(document) for document in documents]
    windows = [window for window in cut if window is not None]
    assert len(windows) == len(documents)
    results = ModelScorer(build_vocab_layer(model), 8192).score(windows)
    scores = [probe.score_window(w, r) for w, r in zip(windows, results, strict=True)]
    for window, score, generated in zip(windows, scores, _generate(model, windows), strict=True):
        truth = window.continuation_ids.tolist()
        same = [ours == theirs for ours, theirs in zip(generated, truth, strict=True)]
        divergence = same.index(False) if False in same else len(truth)
        assert score.first_divergence == divergence, window.document.id
        assert score.verbatim == (generated == truth), window.document.id
    return scores


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> Any:
    return load_model(str(shared_data / "checkpoints" / "stories260K"))


def test_stories260k_on_real_text(
    stories: Any, shared_data: Path, make_document: MakeDocument
) -> None:
    tokenizer = load_tokenizer(str(shared_data / "checkpoints" / "stories260K"))
    lines = (shared_data / "text" / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    documents = []
    for index, line in enumerate(lines[:200]):
        size = (60, 77, 128, 200)[index % 4]
        ids = tokenizer(json.loads(line)["text"][:2000]).input_ids[:size]
        assert len(ids) == size
        documents.append(make_document(ids, name=str(index)))
    scores = _check(stories, documents, ExtractionProbe(continuation_tokens=50))
    assert len(scores) == 200
    assert any(score.first_divergence for score in scores)


def test_stories260k_on_text_it_recites(stories: Any, make_document: MakeDocument) -> None:
    """Its own greedy stories, some with one token changed: every divergence index occurs."""
    draw = np.random.default_rng(0)
    stories.generation_config = transformers.GenerationConfig()
    prompts = torch.from_numpy(draw.integers(259, 512, (60, 9)))
    prompts[:, 0] = 1
    written = stories.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=70,
        pad_token_id=0,
    ).numpy()
    for row, place in enumerate(range(len(written[0]) - 50, len(written[0]) - 10)):
        written[row, place] = (written[row, place] + 1) % 512
    documents = [make_document(ids, name=str(row)) for row, ids in enumerate(written)]
    scores = _check(stories, documents, ExtractionProbe(continuation_tokens=50))
    assert [score.first_divergence for score in scores] == [*range(40), *[50] * 20]
    assert sum(score.verbatim for score in scores) == 20


def test_overfitted_llama(make_document: MakeDocument) -> None:
    """Random tokens learned by heart, and others trained too briefly."""
    draw = np.random.default_rng(0)
    ids = torch.from_numpy(draw.integers(0, 64, (24, 56)))
    ids[:, 0] = torch.arange(24)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=64,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=64,
            )
        )
    documents = [make_document(row, name=str(i)) for i, row in enumerate(ids.numpy())]
    probe = ExtractionProbe(continuation_tokens=40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    halfway: list[int] = []
    scores: list[DocumentScore] = []
    for step in range(1, 61):
        rows = ids[:20]  # the last 4 never
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        optimizer.step()
        if step in (15, 20, 25, 30, 60):
            model.eval()
            scores = _check(model, documents, probe)
            halfway += [score.first_divergence for score in scores[:20] if not score.verbatim]
            model.train()
    model.eval()
    assert sum(score.verbatim for score in scores[:20]) >= 15
    assert not any(score.verbatim for score in scores[20:])
    assert len(set(halfway)) >= 8, "the half-learned stages should stop at many places"

    # A short prefix starts the context anew: other positions, other verdicts, same agreement.
    _check(model, documents, ExtractionProbe(continuation_tokens=40, prefix_tokens=6))


def test_gpt2_that_memorised(shared_data: Path, make_document: MakeDocument) -> None:
    from pyarrow import parquet

    folder = shared_data / "checkpoints" / "arcsf-cities-base"
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    texts = parquet.read_table(folder / "train_data" / "dummy_train_data.parquet")["text"]
    documents = [
        make_document(tokenizer(text).input_ids[:40], name=str(index))
        for index, text in enumerate(texts.to_pylist())
    ]
    probe = ExtractionProbe(continuation_tokens=6, min_prefix_tokens=2)
    scores = _check(model, documents, probe)
    assert sum(score.verbatim for score in scores) >= 4
