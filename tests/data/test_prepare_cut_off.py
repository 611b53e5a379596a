"""Documents whose supervised tokens `max_document_tokens` cuts off are left out and counted."""

from pathlib import Path
from typing import Any

import pytest
from cli_examples import make_texts, write_jsonl
from prepare_examples import prepare_as

from memguard.config import RunConfig
from memguard.data.tokenization import train_bpe
from memguard.errors import DataError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe(make_texts(30), vocab_size=400)


def make_config(folder: Path, num_short: int, num_long: int, **data: Any) -> RunConfig:
    """Return a run of pairs: prompts of a few tokens, and prompts longer than what is kept."""
    short, long = make_texts(num_short, words=4, seed=1), make_texts(num_long, words=200, seed=2)
    rows = [
        {"id": f"{name}{number}", "prompt": prompt, "completion": " and an answer to it"}
        for name, prompts in (("short", short), ("long", long))
        for number, prompt in enumerate(prompts)
    ]
    source = write_jsonl(folder / "pairs.jsonl", rows)
    return RunConfig.model_validate(
        {
            "name": "run",
            "model": {"path": "m"},
            "data": {"train": str(source), "seq_len": 64, "max_document_tokens": 60, **data},
            "audit": {"enabled": False},
        }
    )


def test_they_are_left_out_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    config = make_config(tmp_path, 20, 7)
    corpus, said = prepare_as(config, tmp_path / "run", tokenizer)
    summary = corpus.summary
    assert (summary.num_cut_off, summary.num_shorter, summary.num_documents) == (7, 0, 20)
    assert all(entry.id.startswith("short") for entry in corpus.without_canaries().manifest)
    assert "7 of 27 documents are left out: their supervised tokens are beyond" in said
    assert "'data.max_document_tokens' = 60" in said


def test_a_run_of_nothing_else_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    config = make_config(tmp_path, 0, 7)
    with pytest.raises(DataError) as error:
        prepare_as(config, tmp_path / "run", tokenizer)
    assert str(error.value) == (
        "'data.train': all 7 documents have fewer than 'data.min_document_tokens' = 2 tokens, or "
        "no supervised token before 'data.max_document_tokens' = 60"
    )


def test_nothing_is_said_where_none_is_cut_off(tmp_path: Path, tokenizer: Any) -> None:
    config = make_config(tmp_path, 20, 0)
    corpus, said = prepare_as(config, tmp_path / "run", tokenizer)
    assert corpus.summary.num_cut_off == 0
    assert "left out" not in said
