"""Suites that ask more than one pass: other windows, own passes of membership, canaries."""

import json
from pathlib import Path

import numpy as np
import pytest
from cli_examples import run_cli, save_tiny_model, write_run, write_texts

from memguard.data.corpus import load_corpus
from memguard.hf.checkpoint import load_tokenizer
from memguard.records import AuditReport, load_record
from memguard.workflows.audit_context import _build_codec
from memguard.workflows.audit_inputs import list_canaries

SUITE = {
    "name": "mine",
    "version": 3,
    "probes": [
        {"name": "extraction", "continuation_tokens": 6},
        {"name": "grid", "offsets": [0, 100], "prefix_tokens": [4], "continuation_tokens": [3]},
        {"name": "sampling", "schemes": [{"top_k": 10}]},
        {"name": "membership", "scores": ["loss", "lowercase", "recall", "reference"]},
    ],
}


@pytest.fixture
def suite(folder: Path) -> Path:
    path = folder / "mine.yaml"
    path.write_text(json.dumps(SUITE))
    return path


def test_a_suite_of_ones_own(folder: Path, suite: Path) -> None:
    reference = save_tiny_model(folder / "reference", num_hidden_layers=1)
    out = folder / "out"
    outcome = run_cli(
        "audit",
        *("--model", folder / "model", "--reference", reference, "--out", out, "--suite", suite),
        # Short enough for something to stand before them: the model has 128 positions.
        *("--members", write_texts(folder / "short.jsonl", words=15)),
        *("--nonmembers", write_texts(folder / "others.jsonl", 30, seed=1, words=15)),
    )
    assert outcome.code == 0, outcome.err
    report = load_record(AuditReport, out / "report.json")
    assert (report.method.suite, report.method.suite_version) == ("mine", 3)
    rows = {row.score: row for row in report.membership}
    assert list(rows) == ["loss", "lowercase", "recall", "reference", "blind"]
    # Four of thirty control documents stood before the others.
    assert (rows["recall"].num_nonmembers, rows["recall"].num_missing) == (26, 4)
    assert rows["reference"].num_missing == 0
    # Thirty nonmembers show no false-positive rate of 1 %.
    assert {name for name, rate in rows["loss"].tpr_at_fpr.items() if rate is None} == {
        "0.001",
        "0.01",
    }
    grid = [m for m in report.measures if m.probe == "grid" and m.metric == "verbatim"]
    assert [m.parameters["offset"] for m in grid] == [0, 100]
    # No text has 107 tokens.
    assert [b.num_missing for b in grid[0].buckets] == [0, 0]
    assert [b.num_documents for b in grid[1].buckets] == [0, 0]
    assert [cost.model.num_documents for cost in report.attack_cost] == [30, 60]


def test_a_reference_with_another_vocabulary_is_refused(
    folder: Path, suite: Path, shared_data: Path
) -> None:
    reference = shared_data / "checkpoints" / "stories260K"
    outcome = run_cli(
        "audit",
        *("--model", folder / "model", "--reference", reference, "--out", folder / "out"),
        *("--members", folder / "documents.jsonl", "--suite", suite),
    )
    assert outcome.code == 3
    assert "'audit.reference' must have the vocabulary of the audited model" in outcome.err


def test_text_is_decoded_without_special_tokens(shared_data: Path) -> None:
    """A BOS that became text would stand there twice when the text is encoded anew."""
    tokenizer = load_tokenizer(str(shared_data / "checkpoints" / "stories260K"))
    codec = _build_codec(tokenizer)
    ids = np.array(tokenizer("Once upon a time there was Tom.")["input_ids"], dtype=np.int32)
    assert ids[0] == tokenizer.bos_token_id
    text = codec.decode(ids)
    assert text.strip() == "Once upon a time there was Tom."
    assert list(codec.encode(text.lower())).count(tokenizer.bos_token_id) == 1


def test_canaries_stand_in_an_order_that_no_coin_decides(folder: Path) -> None:
    write_texts(folder / "many.jsonl", 400, words=12)
    settings = write_run(folder, data={"train": str(folder / "many.jsonl"), "seq_len": 64})
    outcome = run_cli("prepare", settings)
    assert outcome.code == 0, outcome.err
    corpus = load_corpus(folder / "runs" / "run")
    canaries = list_canaries(corpus, seq_len=64)
    assert len(canaries) >= 8
    names = [canary.document.id for canary in canaries]
    assert names == sorted(names)
    coins = [canary.was_trained for canary in canaries]
    assert 0 < sum(coins) < len(coins)
    assert coins not in (sorted(coins), sorted(coins, reverse=True))
    # What is measured is the secret, given its prompt.
    assert all(canary.document.supervised.any() for canary in canaries)
    assert not any(canary.document.supervised[0] for canary in canaries)
