"""Calls from a notebook: a bar for progress, lines above it, quiet libraries."""

import logging
import re
import warnings
from typing import Any

import pytest

from memguard.runtime import Console, console, quieted_advice
from memguard.workflows import sweep


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "is_notebook", lambda: True)


def test_progress_is_a_bar_below_the_lines(
    notebook: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_BAR_EVERY_S", 0.0)
    own = Console()
    assert own.live
    own.info("documents: read")
    with own.progress("train", 40, "steps") as advance:
        advance(10, "loss 2.5")
        own.warn("few documents")
    Console(quiet=True).info("of another rank")
    with Console(quiet=True).progress("train", 40, "steps") as advance:
        advance(10, "")
    with own.rows() as rows:
        assert not rows.is_live
    said = capsys.readouterr().err
    assert re.search(r"train: +25%.* 10/40 .*loss 2\.5", said)
    lines = [line.rpartition("\r")[2].strip() for line in said.split("\n")]
    assert lines[:2] == ["documents: read", "warning: few documents"]
    # The bar goes when the step has ended.
    assert lines[2:] == [""]
    assert "another rank" not in said


def test_a_bar_is_drawn_once_a_second(notebook: None, capsys: pytest.CaptureFixture[str]) -> None:
    with Console().progress("train", 10**4, "steps") as advance:
        for _ in range(10**4):
            advance(1, "x" * 40)
    assert len(capsys.readouterr().err) < 2000


def test_the_runs_of_a_sweep_write_to_files(notebook: None) -> None:
    # What the processes of a sweep write is not shown in a notebook.
    assert sweep._has_logs(1, Console())
    assert not sweep._has_logs(1, Console(in_notebook=False))


def test_outside_of_notebooks_lines_go_to_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not console.is_notebook()
    Console().info("reading")
    assert capsys.readouterr() == ("", "reading\n")


def test_libraries_are_quiet_during_the_call_only(capsys: pytest.CaptureFixture[str]) -> None:
    logger: Any = logging.getLogger("torchao")
    before = logger.level
    logger.setLevel(logging.NOTSET)
    try:
        with quieted_advice():
            logger.warning("Failed to load a kernel")
            warnings.warn("IProgress not found. Please update jupyter", stacklevel=1)
        assert logger.level == logging.NOTSET
    finally:
        logger.setLevel(before)
    assert capsys.readouterr().err == ""
    with pytest.warns(UserWarning, match="IProgress"):
        warnings.warn("IProgress not found", stacklevel=1)
