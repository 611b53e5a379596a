"""What a terminal of 80 columns shows while a run goes on."""

import io
import re

import pytest
import rich.console

from memguard.runtime import Console
from memguard.train.metrics import StepMetrics

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


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_line_is_one_line_with_everything_on_it(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    text = io.StringIO()
    console = Console(rich.console.Console(file=text, force_terminal=True, width=width))
    with console.progress("train", LINE.num_steps, "steps") as advance:
        advance(LINE.step, LINE.describe_briefly(1_234_567.8))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue()).replace("\r", "\n").splitlines()
    (last,) = {line for line in shown if "loss" in line}
    assert len(last) <= width
    for part in ("train ", "12345/250000", "loss 10.1234", "1,234,568 tokens/s", "123.00 GiB", "━"):
        assert part in last, last


def test_the_line_of_a_log_says_the_same_and_more() -> None:
    said = LINE.describe(1_234_567.8)
    assert said.startswith("step 12345/250000  loss 10.1234  lr 1.20e-05  ")
    assert "1,234,568 supervised tokens/s  peak 123.00 GiB" in said
    # 1,234.5 s for 12,345 steps: 237,655 more take 23,766 s.
    assert said.endswith("6:36 h left")


def test_a_step_without_a_loss_is_told_as_such() -> None:
    line = LINE.model_copy(update={"loss": None})
    assert "loss none" in line.describe(1.0)
    assert "loss none" in line.describe_briefly(1.0)
