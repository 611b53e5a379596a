"""A call from Python in a notebook: one output that is redrawn, and small."""

import logging
import time
import warnings
from typing import Any

import pytest

from memguard.runtime import Console, python_call
from memguard.runtime.display import DISPLAY
from memguard.runtime.python_call import NotebookDisplay
from memguard.workflows import sweep


class Cell:
    """Keeps what a notebook would show."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, str]] = []
        self.is_update: list[bool] = []

    def publish(self, output: dict[str, str], is_update: bool) -> None:
        self.outputs.append(output)
        self.is_update.append(is_update)

    @property
    def html(self) -> str:
        return self.outputs[-1]["text/html"]

    @property
    def text(self) -> str:
        return self.outputs[-1]["text/plain"]


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell = Cell()
    monkeypatch.setattr(python_call, "_find_notebook", lambda: cell.publish)
    return cell


def test_lines_and_progress_share_one_output(
    cell: Cell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_call, "_REDRAW_EVERY_S", 0.0)
    with python_call.python_call("train"):
        console = Console()
        assert console.live
        console.info("documents: <b>read</b>")
        assert "&lt;b&gt;" in cell.html
        console.warn("few documents")
        with console.progress("train", 40, "steps") as advance:
            advance(10, "loss 2.5")
            assert 'max="40" value="10"' in cell.html
            assert "train: 10 of 40 steps" in cell.text
            assert "loss 2.5" in cell.text
            # What another part of the program says meanwhile is not on the bar's line.
            Console().info("held-out loss 3")
        Console(quiet=True).info("of another rank")
        with console.rows() as rows:
            assert not rows.is_live
    assert cell.is_update == [False] + [True] * (len(cell.outputs) - 1)
    assert cell.text.splitlines()[0] == "memguard train: finished after 0 s"
    assert "few documents" in cell.html
    assert "<summary" in cell.html
    assert "2 lines of progress" in cell.html
    assert "<progress" not in cell.html
    assert "another rank" not in cell.html
    assert DISPLAY.get() is None
    assert Console().display is None
    assert capsys.readouterr() == ("", "")


def test_many_lines_stay_small() -> None:
    cell = Cell()
    display = NotebookDisplay(name="train", publish=cell.publish)
    with display.progress("train", 10**6, "steps") as advance:
        for number in range(2000):
            display.info(f"line {number} " + "x" * 400)
            advance(1, "y" * 400)
    for _ in range(50):
        display.warn("z" * 900)
    display.end("finished")
    assert len(cell.html) < 30_000
    assert "line 1999" in cell.html
    assert "line 0 " not in cell.html
    assert "2,000 lines of progress (the last 60)" in cell.html


def test_it_is_redrawn_a_few_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    cell = Cell()
    display = NotebookDisplay(name="train", publish=cell.publish)
    with display.progress("train", 1000, "steps") as advance:
        for _ in range(1000):
            now[0] += 0.001
            advance(1, "")
    # One second: the first drawing, and at most five more.
    assert 2 <= len(cell.outputs) <= 6


def test_an_error_ends_the_bar(cell: Cell) -> None:
    def fail() -> None:
        with python_call.python_call("audit"):
            Console().info("reading")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert cell.text == "memguard audit: stopped after 0 s"
    with pytest.raises(ValueError, match="refused"), python_call.python_call("audit"):
        raise ValueError("refused")
    assert len(cell.outputs) == 2, "a refused call shows nothing"


def test_a_call_inside_another_one_has_no_bar_of_its_own(cell: Cell) -> None:
    with python_call.python_call("train"):
        Console().info("reading")
        with python_call.python_call("audit"):
            Console().info("scoring")
    assert [text.split(":")[0] for text in (each["text/plain"] for each in cell.outputs)] == [
        "memguard train"
    ] * len(cell.outputs)


def test_the_runs_of_a_sweep_write_to_files(cell: Cell) -> None:
    # The processes of a sweep would write below the bar.
    assert not sweep._has_logs(1, Console())
    with python_call.python_call("compare"):
        assert sweep._has_logs(1, Console())


def test_outside_of_notebooks_lines_go_to_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with python_call.python_call("train"):
        assert DISPLAY.get() is None
        Console().info("reading")
    assert capsys.readouterr() == ("", "reading\n")


def test_libraries_are_quiet_during_the_call_only(capsys: pytest.CaptureFixture[str]) -> None:
    logger: Any = logging.getLogger("torchao")
    before = logger.level
    logger.setLevel(logging.NOTSET)
    try:
        with python_call.python_call("plan"):
            logger.warning("Failed to load a kernel")
            warnings.warn("IProgress not found. Please update jupyter", stacklevel=1)
        assert logger.level == logging.NOTSET
    finally:
        logger.setLevel(before)
    assert capsys.readouterr().err == ""
    with pytest.warns(UserWarning, match="IProgress"):
        warnings.warn("IProgress not found", stacklevel=1)
