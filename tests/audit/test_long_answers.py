"""Runs that recite answers of 10 to 400 tokens, in every format with answers, and their audits.

A document repeats ten words that no other has, so that a tiny model soon recites those that it was
trained on, and none of the others.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plain_statistics as plain
import pytest
import transformers
from cli_examples import CHAT_TEMPLATE, succeed, write_jsonl, write_run
from pyarrow import parquet
from tiny_llama import TINY_LLAMA

from memguard.data.tokenization import train_bpe
from memguard.hf.from_config import build_scratch_model
from memguard.records import AuditReport, load_record

pytestmark = pytest.mark.slow
FORMATS = ("alpaca", "sharegpt", "messages", "pairs")
SIZES = (10, 20, 49, 50, 51, 80, 120, 200, 300, 400)
"""Words of an answer; a word is a token, or two."""
_OWN_WORDS = 10


def make_row(format: str, prompt: str, answer: str) -> dict[str, Any]:
    if format == "alpaca":
        return {"instruction": prompt, "input": "", "output": answer}
    if format == "pairs":
        return {"prompt": prompt, "completion": f" {answer}"}
    name, keys, roles = "messages", ("role", "content"), ("user", "assistant")
    if format == "sharegpt":
        name, keys, roles = "conversations", ("from", "value"), ("human", "gpt")
    pairs = zip(roles, (prompt, answer), strict=True)
    return {name: [dict(zip(keys, pair, strict=True)) for pair in pairs]}


def train(folder: Path, rows: Sequence[tuple[str, int, bool]], **changes: Any) -> dict[str, str]:
    """Train on rows of a format and a length, if they are not unseen; return the answers by id."""
    draw = np.random.default_rng(0)
    numbers = draw.permutation(10_000)[: len(rows) * _OWN_WORDS]
    words = ["".join("abcdefghij"[int(digit)] for digit in f"{n:04}") for n in numbers]
    files: dict[tuple[bool, str], list[dict[str, Any]]] = {}
    answers = {}
    for index, (format, size, is_trained) in enumerate(rows):
        own = words[index * _OWN_WORDS :][:_OWN_WORDS]
        answer = " ".join((own * (size // _OWN_WORDS + 1))[:size])
        row = {"id": f"d{index}", **make_row(format, " ".join(own[-1:] * 7), answer)}
        files.setdefault((is_trained, format), []).append(row)
        answers[row["id"]] = f" {answer}" if format == "pairs" else answer
    paths: dict[bool, list[str]] = {True: [], False: []}
    for (is_trained, format), lines in files.items():
        path = write_jsonl(folder / f"{format}-{is_trained}.jsonl", lines)
        paths[is_trained].append(str(path))
    tokenizer = train_bpe([f" {word}" for word in words] * 3, vocab_size=256 + 4 * len(words))
    tokenizer.chat_template = CHAT_TEMPLATE
    config = {
        **TINY_LLAMA,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
    }
    model = build_scratch_model(
        config, vocab_size=len(tokenizer), tokenizer=tokenizer, seed=0, attn=None
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    settings: dict[str, Any] = {
        "data": {"train": paths[True], "control": paths[False], "seq_len": 512},
        "optim": {"lr": 2e-2},
        "audit": {"continuation_tokens": 50, "min_documents": 1, "cache": False},
        **changes,
    }
    succeed("train", write_run(folder, **settings))
    return answers


def check_audit(
    folder: Path, rows: Sequence[tuple[str, int, bool]], answers: dict[str, str]
) -> set[tuple[str, str]]:
    """Check that whole answers were audited, and recited exactly if they were trained.

    Intervals of lengths are computed again, and the columns and models of these returned.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    audit = folder / "runs" / "run" / "audit"
    report = load_record(AuditReport, audit / "report.json")
    records = parquet.read_table(audit / "records.parquet").to_pylist()
    assert len(records) == len(rows)
    assert {record["not_audited"] for record in records} == {None}
    counted: set[tuple[str, str]] = set()
    longest = 0
    for record in records:
        format, _, is_trained = rows[int(record["id"][1:])]
        size = len(tokenizer(answers[record["id"]])["input_ids"])
        longest = max(longest, size)
        assert record["continuation_tokens"] == size
        assert record["extraction.verbatim"] == is_trained, (format, size)
        for name in ("longest_run", "first_divergence", "num_correct"):
            assert (record[f"extraction.{name}"] == size) == is_trained, (name, format, size)
    for row in report.tables.results:
        place = {
            ("longest_run", ""): "extraction.longest_run",
            ("first_divergence", ""): "extraction.first_divergence",
            ("longest_copied_run", "decoding=greedy"): "generation.greedy.longest_copied_run",
        }.get((row.metric, row.parameters))
        if place is None or row.statistic != "mean" or row.against is not None:
            continue
        here = [record for record in records if record["bucket"] == row.bucket]
        start = "" if row.model == "trained" else f"{row.model}."
        values = [float(record[start + place]) for record in here]
        clusters = [record["cluster"] for record in here]
        expected = plain.estimate_mean(values, clusters, (0.0, float(longest)))
        low, high = row.ci or (None, None)
        assert (row.value, low, high) == pytest.approx(expected, rel=1e-6), (place, row)
        counted.add((place, row.model))
    assert {("extraction.longest_run", model) for model in ("trained", "base")} <= counted
    trained = {record["id"]: record for record in records if record["role"] == "trained"}
    found = {finding.id: finding for finding in report.findings}
    assert found.keys() == trained.keys()
    for name, record in trained.items():
        assert found[name].found_by["greedy"] == f"{record['continuation_tokens']} tokens exactly"
    page = (audit / "report.html").read_text()
    assert "before its last answer" in page
    assert "last 50 tokens" not in page
    return counted


def test_one_answer_of_each_format(tmp_path: Path) -> None:
    rows = [(format, size, True) for format, size in zip(FORMATS, (10, 51, 120, 400), strict=True)]
    rows += [(format, 60, False) for format in FORMATS]
    answers = train(tmp_path, rows, train={"batch_size": 4, "epochs": 130})
    check_audit(tmp_path, rows, answers)


def test_every_length_of_every_format(tmp_path: Path) -> None:
    rows = [
        (format, size, is_trained)
        for is_trained in (True, False)
        for format in FORMATS
        for size in SIZES
    ]
    audit = {"suite": "full", "continuation_tokens": 50, "cache": False}
    answers = train(tmp_path, rows, train={"batch_size": 4, "epochs": 130}, audit=audit)
    counted = check_audit(tmp_path, rows, answers)
    assert ("generation.greedy.longest_copied_run", "trained") in counted
