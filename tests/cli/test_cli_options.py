"""Settings in the style of other trainers, `--optim.lr=3e-5`; sentences on a screen."""

import io
import re

import pytest
import rich.console
from cli_examples import run_cli, succeed

from memguard.cli.app import app
from memguard.cli.options import Sentence, print_indented


@pytest.mark.parametrize("command", ["plan", "train", "prepare", "compare"])
def test_a_setting_of_two_words_is_one_error_that_says_how_to_write_it(command: str) -> None:
    outcome = run_cli(command, "run.yaml", "--optim.lr", "3e-5")
    assert outcome.code == 2
    assert outcome.err == (
        "argument '--optim.lr' is not an option; a setting is one argument: optim.lr=3e-5\n"
    )


def test_each_setting_of_two_words_has_its_line() -> None:
    outcome = run_cli("plan", "x", "--seed", "3", "--optim.lr", "3e-5", "--data.seq_len=64")
    assert [line.rsplit(": ", 1)[1] for line in outcome.err.splitlines()] == [
        "seed=3",
        "optim.lr=3e-5",
    ]


def test_a_setting_of_one_word_is_taken() -> None:
    # The settings are read after the file.
    assert "nothing.yaml" in run_cli("plan", "nothing.yaml", "--optim.lr=3e-5").err
    assert "nothing.yaml" in run_cli("plan", "nothing.yaml", "--seed=1", "--optim.lr=1").err


@pytest.mark.parametrize("is_indented", [False, True])
def test_a_number_and_its_sign_are_on_one_line(is_indented: bool) -> None:
    text = "26 of 135 (19.3\u00a0%), the 95 % interval 12.9 % to 27 %: above the limit of 10 %."
    for width in range(12, 90):
        # Plain spaces only: what a stream of this encoding takes.
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        out = rich.console.Console(file=stream, width=width)
        if is_indented:
            print_indented(out, Sentence(text, "dim"))
        else:
            out.print(Sentence(text), width=width)
        stream.seek(0)
        lines = stream.read().splitlines()
        assert not any(line.strip().startswith("%") for line in lines), width
        assert all(len(line.rstrip()) <= width for line in lines)
        assert " ".join(" ".join(lines).split()) == text.replace("\u00a0", " ")


@pytest.mark.parametrize("command", [info.callback.__name__ for info in app.registered_commands])
def test_help_fits_80_columns_and_has_a_whole_command(command: str) -> None:
    shown = succeed(command, "--help").out
    assert max(map(len, shown.splitlines())) <= 80
    assert " <" not in shown, "no types as Python writes them"
    (example,) = re.findall(r"Example:\n  memguard (.*)\n", shown)
    name, *words = example.split()
    assert name == command
    for option in filter(re.compile("--").match, words):
        assert re.search(rf"^  {option}\b", shown, re.MULTILINE), option


def test_options_of_an_audit_are_in_groups() -> None:
    titles = re.findall(r"^(\w.*):$", succeed("audit", "--help").out, re.MULTILINE)
    assert titles == ["Arguments", "Model and documents", "Probes", "Options", "Example"]


def test_errors_wrap_between_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_cli("audit", "--model", "x", "--members", "no-such.jsonl", "--out", "y").err
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")  # As rich sees a terminal.
    wrapped = run_cli("audit", "--model", "x", "--members", "no-such.jsonl", "--out", "y").err
    assert len(whole.splitlines()) == 1
    assert max(map(len, wrapped.splitlines())) <= 30
    assert wrapped.split() == whole.split()
