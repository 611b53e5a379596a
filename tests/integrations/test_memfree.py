"""MemFree: what is forbidden equals a naive search; a model that recites no longer does."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trainer_program as program
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import LogitsProcessorList

from memguard.errors import ConfigError, RecordError
from memguard.integrations import memfree
from memguard.integrations.transformers import MemFreeLogitsProcessor

ROOT = Path(__file__).resolve().parents[2]
N = 5
Ids = list[int]


def list_ngrams(documents: list[Ids], size: int) -> set[tuple[int, ...]]:
    return {
        tuple(ids[start : start + size])
        for ids in documents
        for start in range(len(ids) - size + 1)
    }


def find_forbidden(documents: list[Ids], row: Ids, size: int, lm: int) -> set[int]:
    ngrams = list_ngrams(documents, size)
    if len(row) < size - 1:
        return set()
    return {token for token in range(lm) if (*row[len(row) - size + 1 :], token) in ngrams}


# Few different tokens, so that many n-grams meet; 0 among them.
_documents = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=5)


@given(
    documents=_documents,
    size=st.integers(2, 5),
    rows=st.integers(1, 7).flatmap(
        lambda length: st.lists(
            st.lists(st.integers(0, 3), min_size=length, max_size=length), min_size=1, max_size=4
        )
    ),
)
def test_forbidden_tokens_equal_a_naive_search(
    documents: list[Ids], size: int, rows: list[Ids]
) -> None:
    processor = MemFreeLogitsProcessor(documents, ngram_size=size)
    assert processor.num_ngrams == len(list_ngrams(documents, size))
    scores = torch.arange(4 * len(rows), dtype=torch.float32).reshape(-1, 4)
    before = scores.clone()
    found = processor(torch.tensor(rows), scores)
    assert torch.equal(scores, before), "the caller's scores are left as they are"
    for row, ours, plain in zip(rows, found, before, strict=True):
        forbidden = find_forbidden(documents, row, size, 4)
        for token in range(4):
            expected = -torch.inf if token in forbidden else plain[token]
            assert ours[token] == expected, (row, token)


@pytest.fixture(scope="module")
def texts() -> list[Ids]:
    return program.draw_texts()[:4]


@pytest.fixture(scope="module")
def model(texts: list[Ids]) -> Any:
    """Knows four texts by heart."""
    model = program.build_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        for text in texts:
            ids = torch.tensor([text])
            logits = model(input_ids=ids).logits[0, :-1]
            functional.cross_entropy(logits, ids[0, 1:]).backward()
        optimizer.step()
    return model.eval()


def generate(model: Any, prompts: list[Ids], processors: list[Any], **how: Any) -> list[Ids]:
    """Continue prompts, padded on the left; what was written, without prompt."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    written = model.generate(
        input_ids=ids,
        attention_mask=(ids != 0).long(),
        max_new_tokens=20,
        min_new_tokens=12,
        pad_token_id=0,
        eos_token_id=1,
        logits_processor=LogitsProcessorList(processors),
        **how,
    )
    return [row[width:].tolist() for row in written]


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "temperature": 0.5, "top_k": 5},
    ],
    ids=["greedy", "beams", "drawn"],
)
def test_a_model_that_recites_writes_no_ngram(
    model: Any, texts: list[Ids], how: dict[str, Any]
) -> None:
    # The last prompt is shorter than n - 1 tokens.
    prompts = [texts[0][:6], texts[1][:8], texts[2][:2]]
    ngrams = list_ngrams(texts, N)

    def recited(written: list[Ids]) -> list[bool]:
        whole = [prompt + row for prompt, row in zip(prompts, written, strict=True)]
        begins = [max(len(prompt) - N + 1, 0) for prompt in prompts]
        return [
            any(tuple(row[at : at + N]) in ngrams for at in range(begin, len(row) - N + 1))
            for row, begin in zip(whole, begins, strict=True)
        ]

    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert all(recited(generate(model, prompts, [], **how)))
        processor = MemFreeLogitsProcessor(texts, ngram_size=N)
        assert not any(recited(generate(model, prompts, [processor], **how)))


def test_a_runs_trained_documents_are_protected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecordError):
        MemFreeLogitsProcessor.from_run(tmp_path)
    placed = [
        ("trained", 2, [1, 2, 3]),
        ("control", 0, [2, 3, 4]),
        ("background", 0, [3, 4, 5]),
        ("canary", 1, [4, 5, 6]),
        ("canary", 0, [5, 6, 7]),
    ]
    corpus = SimpleNamespace(
        manifest=[
            SimpleNamespace(role=role, planned_repetitions=planned) for role, planned, _ in placed
        ],
        document=lambda index: SimpleNamespace(input_ids=np.array(placed[index][2])),
    )
    monkeypatch.setattr(memfree, "load_corpus", {tmp_path: corpus}.get)
    processor = MemFreeLogitsProcessor.from_run(tmp_path, ngram_size=3)
    rows = torch.tensor([[1, 2], [2, 3], [3, 4], [4, 5], [5, 6]])
    is_forbidden = processor(rows, torch.zeros(5, 8)).isinf()
    assert is_forbidden.nonzero().tolist() == [[0, 3], [2, 5], [3, 6]]


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(ConfigError, match="'ngram_size' should be 2 or more; got 1"):
        MemFreeLogitsProcessor([], ngram_size=1)
    processor = MemFreeLogitsProcessor([[1, 2, 99]], ngram_size=2)
    with pytest.raises(ConfigError, match="contain token 99, but the model's vocabulary has 64"):
        processor(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 64))


def test_the_guides_example_runs(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "memguard" / "integrations" / "README.md").read_text(encoding="utf-8")
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", text, re.S) if "MemFree" in each)
    assert len(code.splitlines()) <= 20
    checkpoint = shared_data / "checkpoints" / "stories260K"
    exec(code.replace("path/to/checkpoint", str(checkpoint)), {"__name__": "__main__"})
    written = capsys.readouterr().out.splitlines()
    memorized, protected = (line for line in written if line.startswith("Once"))
    assert memorized != protected
    assert memorized.split()[:5] == protected.split()[:5]
