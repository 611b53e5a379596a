"""`memguard audit` again: what is kept between audits, what is not, and where it cannot be."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from cli_examples import Outcome, read_json, run_cli
from pyarrow import parquet

from memguard.workflows import audited_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MEMGUARD_CACHE", str(folder))
    return folder


def audit(folder: Path, out: str, *arguments: object, model: str = "model") -> Outcome:
    outcome = run_cli(
        "audit",
        *("--model", folder / model, "--out", folder / out),
        *("--members", folder / "documents.jsonl", "--continuation-tokens", 6, *arguments),
    )
    assert outcome.code == 0, outcome.err
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
    arguments = ("--base", folder / "model", "--nonmembers", folder / "documents.jsonl")
    audit(folder, "first", *arguments)
    no_model_is_loaded()
    audit(folder, "second", *arguments)
    assert report_of(folder, "second") == report_of(folder, "first")
    assert scores_of(folder, "second") == scores_of(folder, "first")
    files = [file for file in cache.rglob("*") if file.is_file()]
    # Model and base are the same weights here: one pass, and generated text, of one model.
    assert len(files) == 2
    words = json.loads((folder / "documents.jsonl").read_text().splitlines()[0])["text"].split()
    assert not any(word.encode() in file.read_bytes() for word in words for file in files)


def test_no_cache_keeps_and_uses_nothing(folder: Path, cache: Path) -> None:
    audit(folder, "out", "--no-cache")
    assert not cache.exists()


def test_other_arithmetic_is_another_measurement(folder: Path, cache: Path) -> None:
    audit(folder, "fp32")
    before = parts(cache)
    audit(folder, "bf16", "--dtype", "bf16")
    assert len(before) == 2
    assert len(parts(cache)) == len(before) + 2
    one, other = (scores_of(folder, out)[0]["logprob"] for out in ("fp32", "bf16"))
    assert one != other
    # The batch is no part of it: numbers do not depend on who stands beside whom.
    audit(folder, "small", "--batch-tokens", 64)
    assert len(parts(cache)) == len(before) + 2


def test_the_same_weights_with_another_configuration_are_another_model(
    folder: Path, cache: Path
) -> None:
    shutil.copytree(folder / "model", folder / "other")
    config = read_json(folder / "other" / "config.json")
    config["rope_parameters"] = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
    (folder / "other" / "config.json").write_text(json.dumps(config))
    audit(folder, "first")
    audit(folder, "second", model="other")
    audit(folder, "fresh", "--no-cache", model="other")
    first, second, fresh = (
        [row["logprob"] for row in scores_of(folder, out)] for out in ("first", "second", "fresh")
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
