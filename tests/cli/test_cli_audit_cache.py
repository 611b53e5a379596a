"""`memguard audit` again: what is kept between audits, what is not, and where it cannot be."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_examples import (
    Outcome,
    read_json,
    run_cli,
    save_tiny_model,
    succeed,
    write_run,
    write_texts,
)
from pyarrow import parquet

from memguard.data.corpus import load_corpus
from memguard.hf.checkpoint import load_tokenizer
from memguard.records import AuditReport, load_record
from memguard.workflows.auditing import models as audited_model
from memguard.workflows.auditing.resources import build_codec
from memguard.workflows.auditing.target import list_canaries

pytestmark = pytest.mark.slow


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MEMGUARD_CACHE", str(folder))
    return folder


def audit(folder: Path, out: str, *arguments: object, model: str = "model") -> Outcome:
    outcome = succeed(
        "audit",
        *("--model", folder / model, "--out", folder / out),
        *("--members", folder / "documents.jsonl", "audit.continuation_tokens=6", *arguments),
    )
    return outcome


def report_of(folder: Path, out: str) -> dict[str, Any]:
    """The report without what differs between two audits that say the same."""
    report: dict[str, Any] = read_json(folder / out / "report.json")
    del report["created"], report["method"]["wall_s"], report["method"]["command"]
    return report


def scores_of(folder: Path, out: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = parquet.read_table(folder / out / "records.parquet").to_pylist()
    return rows


def parts(cache: Path) -> set[Path]:
    return set(cache.rglob("*.parquet"))


@pytest.fixture
def no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function from which on loading a model fails."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    return lambda: monkeypatch.setattr(audited_model, "load_model", refuse)


def test_a_second_audit_loads_no_model_and_says_the_same(
    folder: Path, cache: Path, no_model_is_loaded: Any
) -> None:
    base = save_tiny_model(folder / "base", initializer_range=0.03)
    arguments = ("--base", base, "--nonmembers", folder / "documents.jsonl")
    audit(folder, "first", *arguments)
    no_model_is_loaded()
    audit(folder, "second", *arguments)
    assert report_of(folder, "second") == report_of(folder, "first")
    assert scores_of(folder, "second") == scores_of(folder, "first")
    files = [file for file in cache.rglob("*") if file.is_file()]
    # Of either model a file for each of three probes, one of other windows, one of generated text.
    assert len(files) == 10
    words = json.loads((folder / "documents.jsonl").read_text().splitlines()[0])["text"].split()
    assert not any(word.encode() in file.read_bytes() for word in words for file in files)


def test_no_cache_keeps_and_uses_nothing(folder: Path, cache: Path) -> None:
    audit(folder, "out", "audit.cache=false")
    assert not cache.exists()


def test_other_arithmetic_is_another_measurement(folder: Path, cache: Path) -> None:
    audit(folder, "fp32")
    before = parts(cache)
    audit(folder, "bf16", "audit.dtype=bf16")
    assert len(before) == 5
    assert len(parts(cache)) == len(before) + 5
    one, other = (scores_of(folder, out)[0]["extraction.logprob"] for out in ("fp32", "bf16"))
    assert one != other
    # The batch is no part of it: numbers do not depend on who stands beside whom.
    audit(folder, "small", "audit.batch_tokens=64")
    assert len(parts(cache)) == len(before) + 5


def test_the_same_weights_with_another_configuration_are_another_model(
    folder: Path, cache: Path
) -> None:
    shutil.copytree(folder / "model", folder / "other")
    config = read_json(folder / "other" / "config.json")
    config["rope_parameters"] = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
    (folder / "other" / "config.json").write_text(json.dumps(config))
    audit(folder, "first")
    audit(folder, "second", model="other")
    audit(folder, "fresh", "audit.cache=false", model="other")
    first, second, fresh = (
        [row["extraction.logprob"] for row in scores_of(folder, out)]
        for out in ("first", "second", "fresh")
    )
    assert second == fresh
    assert second != first


def test_a_damaged_part_is_made_again(folder: Path, cache: Path) -> None:
    audit(folder, "first")
    contents = {part: part.read_bytes() for part in parts(cache)}
    for part, content in contents.items():
        part.write_bytes(content[: len(content) // 2])
    audit(folder, "second")
    assert scores_of(folder, "second") == scores_of(folder, "first")
    assert {part: part.read_bytes() for part in contents} == contents


def test_where_nothing_can_be_kept_it_is_said_and_the_audit_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The superuser writes into any folder, but nobody into a file.
    (folder / "file").write_text("")
    monkeypatch.setenv("MEMGUARD_CACHE", str(folder / "file"))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        outcome = audit(folder, "out")
    assert outcome.err.count("scores cannot be cached in") == 1
    assert "Traceback" not in outcome.err
    assert len(scores_of(folder, "out")) == 60


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
    succeed(
        "audit",
        *(
            "--model",
            folder / "model",
            f"audit.reference={reference}",
            "--out",
            out,
            "--suite",
            suite,
        ),
        # Short enough for something to stand before them: the model has 128 positions.
        *("--members", write_texts(folder / "short.jsonl", words=15)),
        *("--nonmembers", write_texts(folder / "others.jsonl", 30, seed=1, words=15)),
    )
    report = load_record(AuditReport, out / "report.json")
    assert (report.method.suite, report.method.suite_version) == ("mine", 3)
    rows = {row.parameters: row for row in report.tables.select("membership", "auc")}
    scores = ("loss", "lowercase", "recall", "reference", "blind")
    assert list(rows) == [f"score={name}" for name in scores]
    # Four of thirty control documents stood before the others.
    recall = rows["score=recall"]
    assert (recall.num_other, recall.num_missing) == (26, 4)
    assert rows["score=reference"].num_missing == 0
    # Thirty nonmembers show no false-positive rate of 1 %.
    rates = report.tables.select("membership", "tpr")
    assert {r.parameters for r in rates if "score=loss" in r.parameters and not r.is_known} == {
        f"fpr={rate}, score=loss" for rate in ("0.001", "0.01")
    }
    offsets = [
        metric.settings["offset"]
        for metric in report.tables.list_metrics("grid")
        if metric.metric == "verbatim"
    ]
    assert offsets == [0, 100]
    grid = report.tables.select("grid", "verbatim")
    near, far = ([r for r in grid if f"offset={offset}," in r.parameters] for offset in offsets)
    # No text has 107 tokens.
    assert [row.num_missing for row in near] == [0, 0]
    assert [row.num_documents for row in far] == [0, 0]
    costs = report.tables.select("sampling", "log10_queries", statistic="median")
    assert [cost.num_documents for cost in costs] == [30, 60]


def test_a_reference_with_another_vocabulary_is_refused(
    folder: Path, suite: Path, shared_data: Path
) -> None:
    reference = shared_data / "checkpoints" / "stories260K"
    outcome = run_cli(
        "audit",
        *("--model", folder / "model", f"audit.reference={reference}", "--out", folder / "out"),
        *("--members", folder / "documents.jsonl", "--suite", suite),
    )
    assert outcome.code == 3
    assert "'audit.reference' must have the vocabulary of the audited model" in outcome.err


def test_text_is_decoded_without_special_tokens(shared_data: Path) -> None:
    """A BOS that became text would stand there twice when the text is encoded anew."""
    tokenizer = load_tokenizer(str(shared_data / "checkpoints" / "stories260K"))
    codec = build_codec(tokenizer)
    ids = np.array(tokenizer("Once upon a time there was Tom.")["input_ids"], dtype=np.int32)
    assert ids[0] == tokenizer.bos_token_id
    text = codec.decode(ids)
    assert text.strip() == "Once upon a time there was Tom."
    assert list(codec.encode(text.lower())).count(tokenizer.bos_token_id) == 1


def test_canaries_stand_in_an_order_that_no_coin_decides(folder: Path) -> None:
    write_texts(folder / "many.jsonl", 400, words=12)
    settings = write_run(folder, data={"train": str(folder / "many.jsonl"), "seq_len": 64})
    succeed("prepare", settings)
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
