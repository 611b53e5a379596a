"""Tokens that make training or an audit silently wrong are told by `train`, `audit` and `plan`."""

import json
from pathlib import Path

from cli_examples import make_texts, succeed, write_jsonl, write_run

TWICE = "<|endoftext|>" * 2
SAID = "All {} documents begin with two '<|endoftext|>': take one out of the texts or token ids."


def write_doubled(folder: Path) -> Path:
    rows = ({"id": f"d{n}", "text": f"{TWICE}{text}"} for n, text in enumerate(make_texts(40)))
    return write_jsonl(folder / "doubled.jsonl", rows)


def test_two_beginnings_are_told_by_each_command(folder: Path) -> None:
    documents = write_doubled(folder)
    path = write_run(
        folder, data={"train": str(documents)}, train={"epochs": 1}, audit={"base": False}
    )
    planned = json.loads(succeed("plan", path, "--json").out)["dry_run"]["tokenizer"]
    assert [remark["topic"] for remark in planned] == ["BOS"]
    assert planned[0]["text"].startswith(SAID.format(40))
    trained = succeed("train", path)
    assert trained.err.count(SAID.format(40)) == 1, "said by training, not again by its audit"
    run = folder / "runs" / "run"
    assert SAID.format(40) in succeed("audit", run, "--out", folder / "again").err
    length = ("audit.continuation_tokens=8",)
    arguments = ("--model", folder / "model", "--members", documents, "--out", folder / "foreign")
    assert SAID.format(40) in succeed("audit", *arguments, *length).err
