"""What is wrong with a folder or a model is told before torch is imported, by every command."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from cli_examples import run_cli, write_run
from tiny_llama import TINY_LLAMA

from memguard.cli import errors
from memguard.errors import ConfigError, RecordError
from memguard.workflows.common.folder import locked


def is_refused(code: int, *arguments: object) -> str:
    """Run a command that must fail before it says that it loads torch; return its one line."""
    outcome = run_cli(*arguments)
    assert (outcome.code, outcome.out) == (code, ""), outcome.err
    assert "loading torch" not in outcome.err
    (line,) = outcome.err.splitlines()
    return line


@pytest.mark.parametrize("command", [("train",), ("prepare",), ("train", "--nproc", 2)])
def test_a_run_that_another_process_is_at_work_in(
    folder: Path, command: tuple[object, ...]
) -> None:
    path = write_run(folder)
    with locked(folder / "runs" / "run"):
        assert "another process is using" in is_refused(2, *command, path)


@pytest.mark.parametrize("command", ["train", "prepare"])
def test_a_folder_that_cannot_be_made(folder: Path, command: str) -> None:
    path = write_run(folder, output_dir=str(folder / "documents.jsonl"))
    line = is_refused(2, command, path)
    assert "cannot be created or read (Not a directory): correct the path, or choose" in line


def test_too_many_open_files_are_told_whatever_reports_them() -> None:
    words = os.strerror(errno.EMFILE)
    caused = [ConfigError("a.yaml cannot be read"), RecordError("'prepared' is incomplete")]
    caused[0].__cause__, caused[1].__context__ = KeyError("a"), ImportError(f"a.so: {words}")
    caused[0].__cause__.__context__ = OSError(errno.EMFILE, words, "a")
    for error in (OSError(errno.EMFILE, words, "a"), ImportError(f"a.so: {words}"), *caused):
        report = errors._explain(error)
        assert (report.code, report.traceback) == (1, "")
        assert "too many files are open at once: raise the limit ('ulimit -n" in report.text


def test_a_link_to_itself_is_told(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises((OSError, RuntimeError)) as failed:
        (tmp_path / "loop").resolve(strict=True)
    report = errors._explain(failed.value)
    assert (report.code, report.traceback) == (2, "")
    assert f"'{tmp_path}/loop' cannot be created or read (Too many levels" in report.text


def test_an_adapter_beside_the_weights(folder: Path) -> None:
    model = Path(shutil.copytree(folder / "model", folder / "adapted"))
    (model / "adapter_config.json").write_text("{}")
    path = write_run(folder, model={"path": str(model)})
    members = ("--members", folder / "documents.jsonl", "--out", folder / "out")
    for arguments in (
        ("train", path),
        ("prepare", path),
        ("plan", path),
        ("plan", "--model", model, "--machine", "h200"),
        ("audit", "--model", model, *members),
        ("audit", "--model", folder / "model", "--base", model, *members),
    ):
        line = is_refused(3, *arguments)
        assert f"model '{model}' must not have adapter_config.json here" in line


def test_an_identity_key_that_would_be_committed_or_handed_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--model", folder / "model", "--members", folder / "documents.jsonl")
    given = (*given, "--out", folder / "out")
    line = is_refused(2, "audit", *given, f"data.identity_key={folder / 'out' / 'my.key'}")
    assert "'identity_key': the identity key must not be" in line
    assert "a folder of a run or an audit" in line
    (folder / "home" / ".git").mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "home"))
    line = is_refused(2, "audit", *given)
    assert "a git work tree" in line
    assert not list(folder.rglob("*.key"))


@pytest.mark.parametrize("layers", [-1, 0, 10**9])
def test_sizes_that_no_model_has(folder: Path, layers: int) -> None:
    config = {**TINY_LLAMA, "num_hidden_layers": layers}
    path = write_run(folder, model={"path": None, "scratch": {"config": config}})
    for command in ("train", "prepare", "plan"):
        line = is_refused(3, command, path)
        assert "'model.scratch.config': 'num_hidden_layers' must be a whole number from 1" in line
