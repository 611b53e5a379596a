"""Missing paths are told all at once, before torch is loaded and before anything is read."""

from pathlib import Path
from typing import Any

import pytest

from memguard.config import RunConfig
from memguard.errors import DataError, ModelError
from memguard.workflows.training.checks import check_run


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def test_an_audit_names_all_that_is_missing(bare: Any, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text("not json: nobody reads it")
    given = ["audit", "--model", model, "--members", "a.jsonl", "--out", "o"]
    ended = bare(*given, "--nonmembers", "b.jsonl")
    assert ended.returncode == 3
    assert ended.stderr == (
        "memguard: '--nonmembers': there is no file or folder 'b.jsonl'. Correct the path.\n"
    )
    ended = bare(
        *given, "--members", "c/", "--nonmembers", "b.jsonl", "--base", "./x", "audit.reference=/y"
    )
    assert ended.returncode == 3
    assert ended.stderr == (
        "memguard: '--members': there is no file or folder 'c/'; '--nonmembers': there is no file "
        "or folder 'b.jsonl'; '--base': there is no folder './x'; 'audit.reference': there is no "
        "folder '/y'. Correct the paths.\n"
    )
    assert not (tmp_path / "o").exists()


def test_a_suite_that_does_not_exist_is_refused_as_early(bare: Any, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "run.yaml").write_text(
        "name: x\nmodel: {path: ./model}\ndata: {train: a.jsonl}\naudit: {suite: nonsense}\n"
    )
    model = ("--model", "model", "--members", "a.jsonl", "--out", "o")
    for command in (("audit", *model, "--suite", "nonsense"), ("train", "run.yaml")):
        ended = bare(*command)
        assert ended.returncode == 2, command
        assert "'audit.suite' must be a YAML file or one of" in ended.stderr
        assert "torch" not in ended.stderr
    assert not (tmp_path / "o").exists()


def test_a_folder_without_a_checkpoint_is_told_as_early(bare: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "empty").mkdir()
    ended = bare("audit", "--model", "empty", "--members", "a.jsonl", "--out", "o")
    assert (ended.returncode, ended.stderr) == (3, "memguard: model 'empty' has no config.json\n")


@pytest.mark.parametrize("command", ["train", "plan", "prepare"])
def test_a_run_names_all_that_is_missing(bare: Any, tmp_path: Path, command: str) -> None:
    (tmp_path / "run.yaml").write_text(
        "name: x\nmodel: {path: ./m}\ndata: {train: [a.jsonl, b.txt], heldout: c/d/e}\n"
    )
    (tmp_path / "b.txt").write_text("text")
    ended = bare(command, "run.yaml")
    assert ended.returncode == 3
    assert ended.stderr == (
        "memguard: 'data.train': there is no file or folder 'a.jsonl'; 'data.heldout': there is no "
        "file or folder 'c/d/e'; 'model.path': there is no folder './m'. Correct the paths.\n"
    )


def test_a_sweep_is_checked_as_a_whole_before_its_first_run(bare: Any, tmp_path: Path) -> None:
    """The settings' model is trained by 'pretrain': that it is not there yet is no mistake."""
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "sweep.yaml").write_text(
        "name: x\n"
        "pretrain: {model: {scratch: {vocab_size: 300, config: {model_type: llama}}},\n"
        "  data: {train: a.jsonl}}\n"
        "run: {data: {train: b.jsonl, study: {num_repetitions: [0, 4]}}}\n"
        "settings: [{name: plain}]\n"
    )
    ended = bare("compare", "sweep.yaml")
    assert ended.returncode == 3, ended.stderr
    assert ended.stderr == (
        "memguard: 'data.train': there is no file or folder 'b.jsonl'. Correct the path.\n"
    )


def test_hub_ids_and_sources_that_are_no_paths_pass(tmp_path: Path) -> None:
    def check(train: str, **model: Any) -> None:
        settings = {"name": "x", "model": model or {"path": "org/name"}, "data": {"train": train}}
        check_run(RunConfig.model_validate(settings), trains=False, writes=False)

    for source in ("org/data", "org/data:en@main", "docstrings:json", "wikitext"):
        check(source)
    check(str(tmp_path))
    with pytest.raises(DataError, match=r"'data.train': there is no file or folder 'wikitext.csv'"):
        check("wikitext.csv")
    with pytest.raises(ModelError, match=r"'model.scratch.tokenizer': there is no folder './t'"):
        check("org/data", scratch={"tokenizer": "./t", "config": {"model_type": "llama"}})
