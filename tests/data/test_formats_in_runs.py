"""Alpaca and sharegpt in a run: prepared, not near-duplicates, with canaries, read again."""

from pathlib import Path
from typing import Any

import pytest
from cli_examples import write_jsonl
from prepare_examples import CHAT, draw_texts, make_run, prepare_as

from memguard.config import RunConfig
from memguard.data.given import read_texts
from memguard.data.tokenization import train_bpe
from memguard.errors import DataError
from memguard.records import load_manifest

COUNT = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `alpaca.jsonl` and `sharegpt.jsonl`, of the same texts."""
    made = tmp_path_factory.mktemp("formats")
    pairs = list(zip(draw_texts(COUNT), draw_texts(COUNT, 1), strict=True))
    rows: dict[str, list[dict[str, Any]]] = {
        "alpaca": [{"instruction": one, "input": "", "output": other} for one, other in pairs],
        "sharegpt": [
            {"conversations": [{"from": "human", "value": one}, {"from": "gpt", "value": other}]}
            for one, other in pairs
        ],
    }
    for name, lines in rows.items():
        write_jsonl(made / f"{name}.jsonl", ({"id": f"d{n}", **r} for n, r in enumerate(lines)))
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = train_bpe(draw_texts(COUNT)[:40], vocab_size=400)
    made.chat_template = CHAT
    return made


def make_config(folder: Path, name: str, **data: Any) -> RunConfig:
    return make_run(folder / f"{name}.jsonl", seq_len=256, **data)


@pytest.mark.parametrize("template", ["stanford", "chat"])
def test_rows_of_one_template_are_no_near_duplicates_and_have_canaries(
    template: str, folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """The published prompt is longer than the run of words that makes near-duplicates."""
    config = make_config(folder, "alpaca", template=template)
    corpus, printed = prepare_as(config, tmp_path / "run", tokenizer)
    assert f"is read as alpaca: columns instruction, output, input; template {template}" in printed
    given = [entry for entry in corpus.manifest if entry.role != "canary"]
    assert len({entry.cluster for entry in given}) == COUNT
    assert corpus.summary.num_control_overlapping == 0
    # One canary for 20 of the trained documents, 160 to 179 here, whatever their format.
    assert corpus.summary.num_canaries == 8
    trained = corpus.document(corpus.manifest.index(given[0])).supervised
    assert 0 < trained.sum() < len(trained)


def test_settings_that_read_the_same_texts_prepare_nothing_again(
    folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    config = make_config(folder, "alpaca")
    before, _ = prepare_as(config, tmp_path / "run", tokenizer)
    settings = {"format": "alpaca", "template": "chat", "columns": {"output": "output"}}
    _, printed = prepare_as(make_config(folder, "alpaca", **settings), tmp_path / "run", tokenizer)
    assert "prepared before, unchanged" in printed
    # Rows of sharegpt with the same turns are the same documents.
    shared, _ = prepare_as(make_config(folder, "sharegpt"), tmp_path / "other", tokenizer)
    hmacs = [{e.id: e.text_hmac for e in c.manifest} for c in (before, shared)]
    assert hmacs[0] == hmacs[1]
    # Another template renders other texts.
    _, printed = prepare_as(
        make_config(folder, "alpaca", template="stanford"), tmp_path / "run", tokenizer
    )
    assert "have changed; preparing again" in printed


@pytest.mark.parametrize(
    ("name", "data"), [("alpaca", {}), ("alpaca", {"template": "stanford"}), ("sharegpt", {})]
)
def test_texts_of_a_run_are_found_again(
    name: str, data: dict[str, Any], folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    config, run = make_config(folder, name, **data), tmp_path / "run"
    prepare_as(config, run, tokenizer)
    path = run / "manifest.jsonl"
    entries = [entry for entry in load_manifest(path) if entry.role != "canary"]
    with_template = {"cache_dir": tmp_path, "has_chat_template": lambda: True}
    assert len(read_texts(config.data, run, entries, **with_template)) == COUNT
    if name == "alpaca" and not data:
        # Without the template that the run had, the texts are others.
        with pytest.raises(DataError, match=f"{COUNT} of the documents of .* have changed"):
            read_texts(config.data, run, entries, cache_dir=tmp_path)
