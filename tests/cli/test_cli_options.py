"""Settings in the style of other trainers, `--optim.lr=3e-5`, and those of two words."""

import pytest
from cli_examples import run_cli


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
