"""What terminals of 80 and 120 columns, a terminal that cannot draw, and a pipe show.

The screens in `screens/` are those of `draw_screens.py` in tmux. To renew them after a change that
is wanted, run this file as a program and look at each.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import rich.console

from memguard.runtime import Console
from memguard.train.metrics import StepMetrics

PROGRAM = Path(__file__).with_name("draw_screens.py")
SCREENS = Path(__file__).with_name("screens")
ROOT = PROGRAM.parents[2]
# Name of the stored screen: columns, rows, TERM.
TERMINALS = {
    "80x24": (80, 24, "xterm-256color"),
    "120x40": (120, 40, "xterm-256color"),
    "dumb-80x24": (80, 24, "dumb"),
}
LINE = StepMetrics(
    step=12_345,
    num_steps=250_000,
    loss=10.1234,
    lr=1.2e-5,
    grad_norm=1.0,
    num_rows=16,
    num_supervised_tokens=16_384,
    num_kept_tokens=16_384,
    tokens_per_s=1_234_567.8,
    peak_memory_bytes=123 * 2**30,
    elapsed_s=1234.5,
)


@pytest.mark.parametrize(
    ("width", "heldout", "more"),
    [
        (80, None, ("lr 1.20e-05", "1.23M tok/s")),
        (80, 10.5678, (" held-out 10.5678 grad", "1.23M tok/s")),
        (120, None, ("lr 1.20e-05", "1.23M tokens/s", "peak 123.00 GiB")),
        (120, 10.5678, (" held-out 10.5678 lr 1.20e-05", "1.23M tokens/s")),
    ],
)
def test_the_live_line_is_one_line_with_everything_on_it(
    width: int, heldout: float | None, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    text = io.StringIO()
    console = Console(rich.console.Console(file=text, force_terminal=True, width=width))
    with console.progress("train", LINE.num_steps, "steps") as advance:
        line = LINE.describe_briefly(1_234_567.8, width=console.width, heldout=heldout)
        advance(LINE.step, line)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue()).replace("\r", "\n").splitlines()
    (last,) = {line for line in shown if "loss" in line}
    assert len(last) <= width
    numbers = ("12345/250000", "loss 10.1234", "grad 1.00", "--:--")
    for part in ("train ", "━", *numbers, *more):
        assert part in last, last
    assert "…" not in last


def test_the_line_of_a_log_says_the_same_and_more() -> None:
    # 1,234.5 s for 12,345 steps: 237,655 more take 23,766 s.
    assert LINE.describe(1_234_567.8) == (
        "step 12345/250000  loss 10.1234  lr 1.20e-05  grad 1.00  1.23M tokens/s  6:36 h left  "
        "peak 123.00 GiB"
    )


def test_the_line_of_a_log_fits_a_terminal_that_cannot_draw() -> None:
    line = LINE.describe(1_234_567.8, width=80)
    assert len(line) <= 80
    assert line.endswith(" grad 1.00 1.23M tokens/s 6:36 h left")
    for width in (80, 60):
        line = LINE.describe(1_234_567.8, width=width, heldout=10.5678)
        assert len(line) <= width
        assert "loss 10.1234 held-out 10.5678" in line


@pytest.mark.parametrize(
    ("rate", "text"), [(9.6, "10"), (99_999.4, "99,999"), (123_456.0, "123k"), (999_500.0, "1.00M")]
)
def test_rates_are_short(rate: float, text: str) -> None:
    assert f" {text} tokens/s" in LINE.describe(rate)


def test_a_step_without_a_loss_is_told_as_such() -> None:
    line = LINE.model_copy(update={"loss": None, "grad_norm": None})
    assert "loss none" in line.describe(1.0)
    assert "loss none lr 1.20e-05 grad none" in line.describe_briefly(1.0)


# -- stored screens --------------------------------------------------------------------------------


def capture(columns: int, rows: int, term: str) -> str:
    """Return what a terminal shows, without trailing blanks."""
    tmux = ["tmux", "-L", f"memguard-{os.getpid()}-{columns}-{term}", "-f", "/dev/null"]
    # The size is that of the terminal, not of the tests' environment.
    command = (
        f"exec env -u COLUMNS -u LINES TERM={term} PYTHONPATH={ROOT} {sys.executable} {PROGRAM}"
    )
    size = ["-x", str(columns), "-y", str(rows)]
    subprocess.run([*tmux, "new-session", "-d", *size, command], check=True)
    try:
        return _wait_for("drawn", lambda: _run([*tmux, "capture-pane", "-p"]))
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)


def _wait_for(word: str, read: Callable[[], str]) -> str:
    for _ in range(600):
        lines = [line.rstrip() for line in read().rstrip().split("\n")]
        if word in lines:
            return "\n".join(line for line in lines if line != word) + "\n"
        time.sleep(0.2)
    raise AssertionError(f"'{word}' was not shown")


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def draw_into_pipe() -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return done.stderr


@pytest.mark.long
@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
@pytest.mark.parametrize("name", TERMINALS)
def test_a_terminal_shows_the_stored_screen(name: str) -> None:
    assert capture(*TERMINALS[name]) == (SCREENS / f"{name}.txt").read_text()


@pytest.mark.slow
def test_a_pipe_gets_the_stored_lines() -> None:
    assert draw_into_pipe() == (SCREENS / "pipe.txt").read_text()


@pytest.mark.parametrize("name", TERMINALS)
def test_no_line_of_a_stored_screen_wraps_or_loses_its_end(name: str) -> None:
    lines = (SCREENS / f"{name}.txt").read_text().splitlines()
    starts = ("tokenise", "train", "step", "plain", "goldfish", "dedup", "new")
    assert lines
    for line in lines:
        assert line.startswith(starts), "the rest of a line that has wrapped"
        assert len(line) <= TERMINALS[name][0]
        assert not line.endswith("…")


if __name__ == "__main__":
    for name, terminal in TERMINALS.items():
        (SCREENS / f"{name}.txt").write_text(capture(*terminal))
    (SCREENS / "pipe.txt").write_text(draw_into_pipe())
