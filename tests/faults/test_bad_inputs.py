"""What is wrong with an input is said in a line, with the right exit code, before it costs much."""

import subprocess
import time
from pathlib import Path

import pytest
from bad_inputs import BAD_INPUTS, BadInput
from cli_examples import run_cli
from fault_runs import list_refusals

_MOST_CPU_S = 5.0
_EVERY = 12


def _list_inputs() -> list[object]:
    return [
        pytest.param(
            bad,
            id=bad.name.replace(" ", "-"),
            marks=() if number % _EVERY == 0 else pytest.mark.faults,
        )
        for number, bad in enumerate(BAD_INPUTS)
    ]


def test_there_are_many_bad_inputs() -> None:
    assert len(BAD_INPUTS) >= 60
    assert len({bad.name for bad in BAD_INPUTS}) == len(BAD_INPUTS)


@pytest.mark.parametrize("bad", _list_inputs())
def test_a_bad_input_is_refused_in_a_line(
    bad: BadInput, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("what is wrong is found before any process is started")

    # Without this, a number of processes that is not refused would start them.
    monkeypatch.setattr(subprocess, "Popen", refuse)
    arguments = bad.make(folder)
    started = time.process_time()
    refused = run_cli(*arguments)
    took_s = time.process_time() - started
    assert refused.code == bad.code, refused.err
    assert "Traceback" not in refused.err
    assert took_s < _MOST_CPU_S
    if not bad.needs_torch:
        assert "loading torch" not in refused.err
    assert len(list_refusals(refused.err)) == bad.num_lines, refused.err
    for words in bad.words:
        assert words in refused.err, refused.err
