"""`memguard audit RUN` of a folder that was moved: where the model before training is found."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_examples import read_json, run_cli, save_tiny_model, write_run


def train_sweep(tiny_folder: Path, folder: Path, **changes: Any) -> Path:
    """Train a run beside the model it starts from, as in a sweep, by relative paths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        shutil.copytree(tiny_folder / "model", "runs/sweep/base/model")
        settings = write_run(
            folder,
            output_dir="runs/sweep",
            model={"path": "runs/sweep/base/model"},
            data={"train": str(tiny_folder / "documents.jsonl")},
            train={"max_steps": 6},
            **changes,
        )
        outcome = run_cli("train", settings)
    assert outcome.code == 0, outcome.err
    return folder / "runs" / "sweep"


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sweep(tiny_folder, tmp_path_factory.mktemp("moved"))


@pytest.fixture
def sweep(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that sweep, in the current folder."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained, tmp_path / "runs" / "sweep")


def test_a_sweep_that_was_moved_finds_its_base(sweep: Path, tmp_path: Path) -> None:
    before = read_json(sweep / "run" / "audit" / "report.json")
    (tmp_path / "elsewhere").mkdir()
    moved = sweep.rename(tmp_path / "elsewhere" / "kept")
    outcome = run_cli("audit", moved / "run", "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    after = read_json(tmp_path / "out" / "report.json")
    assert after["model"]["base_weights_sha256"] == before["model"]["base_weights_sha256"]
    assert after["tables"] == before["tables"]


def test_a_run_that_was_moved_alone_says_how_to_name_its_base(sweep: Path, tmp_path: Path) -> None:
    before = read_json(sweep / "run" / "audit" / "report.json")
    run = (sweep / "run").rename(tmp_path / "alone")
    base = (sweep / "base").rename(tmp_path / "other")
    # Told before anything is read: there are no documents to read.
    (run / "prepared").rename(tmp_path / "prepared")
    outcome = run_cli("audit", run, "--out", tmp_path / "out")
    assert outcome.code == 3
    assert "the model before training: there is no folder 'runs/sweep/base/model'" in outcome.err
    assert "Name it with --base DIR, or leave it out with audit.base=false" in outcome.err
    (tmp_path / "prepared").rename(run / "prepared")

    outcome = run_cli("audit", run, "--out", tmp_path / "out", "--base", base / "model")
    assert outcome.code == 0, outcome.err
    after = read_json(tmp_path / "out" / "report.json")
    assert after["tables"] == before["tables"]


def test_another_base_is_refused(sweep: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", num_hidden_layers=1)
    arguments = ("--out", tmp_path / "out", "--base", other)
    outcome = run_cli("audit", sweep / "run", *arguments)
    assert outcome.code == 3
    assert "has other weights than in the run's earlier audit" in outcome.err
    outcome = run_cli("audit", sweep / "run", *arguments, "audit.base=false")
    assert outcome.code == 2
    assert "--base and audit.base=false contradict each other" in outcome.err


@pytest.mark.slow
def test_an_adapter_that_was_moved_with_its_base_finds_it(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = train_sweep(tiny_folder, tmp_path, adapter={"name": "lora", "r": 2})
    monkeypatch.chdir(tmp_path)
    before = read_json(sweep / "run" / "audit" / "report.json")
    moved = sweep.rename(tmp_path / "kept")
    outcome = run_cli("audit", moved / "run", "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    after = read_json(tmp_path / "out" / "report.json")
    assert after["tables"] == before["tables"]
    # Its hash shows that it is the same base; another one is refused, and so is none.
    hashes = [report["model"]["adapter"]["base_weights_sha256"] for report in (before, after)]
    assert hashes[0] == hashes[1]
    (moved / "base").rename(tmp_path / "other")
    outcome = run_cli("export", moved / "run", tmp_path / "merged", "--merge")
    assert (outcome.code, len(outcome.err.splitlines())) == (3, 1), outcome.err
    assert f"its base model '{tmp_path / 'runs/sweep/base/model'}' is missing" in outcome.err
