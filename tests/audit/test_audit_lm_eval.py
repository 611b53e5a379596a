"""Log-likelihood and `is_greedy` of lm-evaluation-harness, by its definition and by itself.

logprob     sum over the continuation of log_softmax(logits)[token]
is_greedy   whether the argmax is the token at every place
"""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from audit_examples import build_tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard.audit.passages import Passage
from memguard.audit.scoring import ModelScorer
from memguard.hf.checkpoint import load_tokenizer
from memguard.hf.load import load_model
from memguard.model.checks import build_causal_lm


def _ask_us(model: Any, rows: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """Return (logprob, is_greedy) of each pair of context and continuation."""
    passages = [
        Passage(
            input_ids=np.array([*context, *continuation], dtype=np.int32),
            first_label=len(context),
            first_choice=len(context),
        )
        for context, continuation in rows
    ]
    results = ModelScorer(build_causal_lm(model), 2048).score(passages)
    return [(float(r.logprob.sum(dtype=np.float64)), bool(r.correct.all())) for r in results]


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), sure=st.booleans())
def test_the_definition_on_random_rows(seed: int, sure: bool) -> None:
    draw = np.random.default_rng(seed)
    # A model that says one thing whatever it is given recites rows of that token.
    model = build_tiny_llama(13, seed=seed % 997, tie_word_embeddings=sure)
    rows = []
    for _ in range(8):
        context = draw.integers(0, 13, draw.integers(1, 20)).tolist()
        with torch.no_grad():
            best = int(model(torch.tensor([context])).logits[0, -1].argmax())
        others = draw.integers(0, 13, draw.integers(0, 6)).tolist()
        rows.append((context, [best, *others] if draw.random() < 0.5 else [*others, best]))
    for (context, continuation), (logprob, is_greedy) in zip(
        rows, _ask_us(model, rows), strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *continuation]])).logits[0]
        logits = logits[len(context) - 1 : -1]
        tokens = torch.tensor(continuation)
        assert is_greedy == bool((logits.argmax(-1) == tokens).all())
        expected = float(logits.log_softmax(-1).gather(1, tokens[:, None]).sum())
        # Sums of at most seven fp32 log-probabilities.
        assert logprob == pytest.approx(expected, abs=1e-4)


def test_lm_eval_itself_on_twenty_documents(shared_data: Path) -> None:
    harness = pytest.importorskip(
        "lm_eval.models.huggingface", reason="lm-eval is not installed (pip install lm-eval)"
    )
    folder = str(shared_data / "checkpoints" / "stories260K")
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    lines = (shared_data / "text" / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    rows = []
    for index, line in enumerate(lines[:20]):
        ids = tokenizer(json.loads(line)["text"][:1000]).input_ids[: 40 + 5 * index]
        rows.append((ids[:-20], ids[-20:]))
    # What it says itself, whole and with another last token.
    model.generation_config = transformers.GenerationConfig()
    for context, _ in rows[:5]:
        given_ids = torch.tensor([context])
        written = model.generate(
            given_ids,
            attention_mask=torch.ones_like(given_ids),
            do_sample=False,
            max_new_tokens=20,
            pad_token_id=0,
        )[0, len(context) :].tolist()
        rows += [(context, written), (context, [*written[:-1], (written[-1] + 1) % 512])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        theirs = harness.HFLM(
            pretrained=model, tokenizer=tokenizer, batch_size=4, device="cpu"
        )._loglikelihood_tokens([(("", ""), *row) for row in rows], disable_tqdm=True)
    ours = _ask_us(model, rows)
    assert [greedy for _, greedy in ours] == [bool(greedy) for _, greedy in theirs]
    assert sum(greedy for _, greedy in ours) == 5
    for (found, _), (expected, _) in zip(ours, theirs, strict=True):
        # Twenty fp32 log-probabilities, padded into batches of other shapes.
        assert found == pytest.approx(float(expected), abs=1e-3)
