"""The central claim: one pass says what greedy decoding would do, on every document."""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from audit_examples import cut
from record_examples import make_document

from memguard.audit.passages import TokenResult
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.scoring import ModelScorer
from memguard.audit.windows import (
    TINY_MARGINS,
    AuditDocument,
    Window,
    compute_first_divergence,
    is_near_tie,
)
from memguard.hf.checkpoint import load_tokenizer
from memguard.hf.load import load_model
from memguard.model.checks import build_causal_lm

pytestmark = pytest.mark.slow


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


def _ask(
    model: Any, documents: Sequence[AuditDocument], probe: ExtractionProbe
) -> tuple[list[Window], list[TokenResult]]:
    """Return the windows of all documents and what one pass over each says."""
    windows = cut(probe, documents)
    passages = [window.passage() for window in windows]
    return windows, ModelScorer(build_causal_lm(model), 8192).score(passages)


def _find_divergence(window: Window, generated: list[int]) -> int:
    truth = window.continuation_ids.tolist()
    same = [ours == theirs for ours, theirs in zip(generated, truth, strict=True)]
    return same.index(False) if False in same else len(truth)


def _check(model: Any, documents: Sequence[AuditDocument], probe: ExtractionProbe) -> list[int]:
    """Compare one pass with `generate` on every document; return the first divergences.

    Verbatim is a divergence at the end, so that this compares the verdicts as well.
    """
    windows, results = _ask(model, documents, probe)
    found = [int(compute_first_divergence(result.correct)) for result in results]
    for window, divergence, generated in zip(
        windows, found, _generate(model, windows), strict=True
    ):
        assert divergence == _find_divergence(window, generated), window.document.id
    return found


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> Any:
    return load_model(str(shared_data / "checkpoints" / "stories260K"))


@pytest.fixture(scope="module")
def real_windows(shared_data: Path) -> list[AuditDocument]:
    """250 pieces of real text, 100 tokens each."""
    tokenizer = load_tokenizer(str(shared_data / "checkpoints" / "stories260K"))
    lines = (shared_data / "text" / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    documents: list[AuditDocument] = []
    for line in lines:
        ids = tokenizer(json.loads(line)["text"][:2000], verbose=False).input_ids
        for start in range(0, len(ids) - 99, 100):
            documents.append(make_document(ids[start : start + 100], name=str(len(documents))))
        if len(documents) >= 250:
            return documents[:250]
    raise AssertionError("there is more text than that")


@pytest.fixture(scope="module")
def own_stories(stories: Any) -> list[AuditDocument]:
    """What the model writes itself in fp32: 200 texts it recites, of 79 tokens each."""
    draw = np.random.default_rng(0)
    stories.generation_config = transformers.GenerationConfig()
    prompts = torch.from_numpy(draw.integers(259, 512, (200, 9)))
    prompts[:, 0] = 1
    written = stories.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=70,
        pad_token_id=0,
    )
    return [make_document(ids, name=f"own {row}") for row, ids in enumerate(written.numpy())]


def test_stories260k_on_real_text(stories: Any, real_windows: list[AuditDocument]) -> None:
    probe = ExtractionProbe(continuation_tokens=50, prefix_tokens=50)
    found = _check(stories, real_windows, probe)
    assert len(found) == 250
    assert len(set(found)) >= 4, "some go on for a few tokens"


def test_bf16_disagrees_only_within_the_stated_margin(
    shared_data: Path, real_windows: list[AuditDocument], own_stories: list[AuditDocument]
) -> None:
    """bf16 logits tie; `generate` takes them from other shapes, and the head is not in fp32."""
    model = load_model(str(shared_data / "checkpoints" / "stories260K"), dtype=torch.bfloat16)
    probe = ExtractionProbe(continuation_tokens=50)
    margin = TINY_MARGINS["bf16"]
    told: list[str] = []
    num_differing = num_verdicts = 0
    for documents in (real_windows[:100], own_stories):
        windows, results = _ask(model, documents, probe)
        for window, result, generated in zip(
            windows, results, _generate(model, windows), strict=True
        ):
            hangs = is_near_tie(result.margin, margin)
            if hangs:
                told.append(window.document.id)
            ours = compute_first_divergence(result.correct)
            theirs = _find_divergence(window, generated)
            if ours == theirs:
                continue
            num_differing += 1
            # At the first of both, they were given the same tokens and chose otherwise.
            assert abs(result.margin[min(ours, theirs)]) < margin, window.document.id
            if (ours == 50) != (theirs == 50):
                num_verdicts += 1
                assert hangs, window.document.id
    assert num_verdicts >= 10, "texts at the edge were to be tried"
    assert num_differing < 120
    # An interval that holds everything says nothing: real text is far from being recited.
    assert {name.split()[0] for name in told} == {"own"}


def test_stories260k_on_text_it_recites(stories: Any, own_stories: list[AuditDocument]) -> None:
    """Its own greedy stories, some with one token changed: every divergence index occurs."""
    written = np.stack([document.input_ids for document in own_stories[:60]])
    for row, place in enumerate(range(len(written[0]) - 50, len(written[0]) - 10)):
        written[row, place] = (written[row, place] + 1) % 512
    documents = [make_document(ids, name=str(row)) for row, ids in enumerate(written)]
    found = _check(stories, documents, ExtractionProbe(continuation_tokens=50))
    assert found == [*range(40), *[50] * 20]


def test_overfitted_llama() -> None:
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
    found: list[int] = []
    for step in range(1, 61):
        rows = ids[:20]  # the last 4 never
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        optimizer.step()
        if step in (15, 20, 25, 30, 60):
            model.eval()
            found = _check(model, documents, probe)
            halfway += [divergence for divergence in found[:20] if divergence < 40]
            model.train()
    model.eval()
    assert found[:20].count(40) >= 15
    assert 40 not in found[20:]
    assert len(set(halfway)) >= 8, "the half-learned stages should stop at many places"

    # A short prefix starts the context anew: other positions, other verdicts, same agreement.
    _check(model, documents, ExtractionProbe(continuation_tokens=40, prefix_tokens=6))


def test_gpt2_that_memorised(shared_data: Path) -> None:
    from pyarrow import parquet

    folder = shared_data / "checkpoints" / "arcsf-cities-base"
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    texts = parquet.read_table(folder / "train_data" / "dummy_train_data.parquet")["text"]
    documents = [
        make_document(tokenizer(text).input_ids[:40], name=str(index))
        for index, text in enumerate(texts.to_pylist())
    ]
    probe = ExtractionProbe(continuation_tokens=6, min_prefix_tokens=2)
    assert _check(model, documents, probe).count(6) >= 4
