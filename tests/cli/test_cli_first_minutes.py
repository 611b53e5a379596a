"""What a new user meets first: `memguard` alone, and `memguard init`."""

import re
from pathlib import Path

import pytest
from cli_examples import run_cli, succeed


def test_memguard_alone_shows_the_commands_that_one_needs() -> None:
    outcome = succeed()
    assert outcome.err == ""
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) < 80
    commands = [line.split()[1] for line in lines if re.match("  memguard ", line)]
    assert commands == ["compare", "init", "plan", "train", "audit"]
    listed = succeed("--help").out
    assert all(re.search(rf"^  {command} ", listed, re.MULTILINE) for command in commands)
    assert "memguard --help" in outcome.out


def test_init_says_what_to_change_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Nothing is asked: a question would end at the closed input.
    monkeypatch.setattr("sys.stdin", None)
    outcome = succeed("init", "my run.yaml")
    assert outcome.err == ""
    first, *others = outcome.out.splitlines()
    assert first.startswith("wrote my run.yaml; fill in 'model.path' and 'data.train'")
    assert [line.split()[0] for line in others[:2]] == ["model.path", "data.train"]
    assert "  memguard plan 'my run.yaml'" in outcome.out
    assert "  memguard train 'my run.yaml'" in outcome.out
    # Those two are the only settings without a default that is of use.
    error = run_cli("train", "my run.yaml").err
    assert "path/to/checkpoint" in error
    assert "documents.jsonl" in error
    # Without a file, what to change is the first line of the settings.
    written = succeed("init").out
    assert written == Path("my run.yaml").read_text()
    assert "Fill in 'model.path' and 'data.train'" in written.splitlines()[0]
    # The usual settings, all of which are among every setting.
    every = succeed("init", "--all").out.splitlines()
    usual = [line for line in written.splitlines() if "memguard init --all" not in line]
    assert {line for line in usual if line} <= set(every)
    assert len(re.findall(r"(?m)^[ #-]*[a-z_]+: \S", written)) == 20
    assert succeed("init", "--schema", "schema.json").out == "wrote schema.json\n"
