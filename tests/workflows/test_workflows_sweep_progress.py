"""What a run of a sweep does, from the files that its process writes."""

from pathlib import Path

import pytest

from memguard.train.metrics import StepMetrics
from memguard.workflows.sweep import RunProgress, read_progress

STEP = StepMetrics(
    step=50,
    num_steps=200,
    loss=2.5,
    lr=1.25e-4,
    grad_norm=0.5,
    num_rows=8,
    num_supervised_tokens=100,
    num_kept_tokens=100,
    tokens_per_s=1000.0,
    peak_memory_bytes=2**30,
    elapsed_s=25.0,
)


def write_metrics(folder: Path, *steps: StepMetrics, rest: str = "") -> None:
    text = "".join(f"{step.model_dump_json()}\n" for step in steps)
    (folder / "metrics.jsonl").write_text(text + rest)


def read(folder: Path, log: str, *, log_start: int = 0) -> RunProgress:
    (folder / "train.log").write_text(log)
    return read_progress(folder, folder / "train.log", log_start)


def test_before_anything_is_written(tmp_path: Path) -> None:
    progress = read_progress(tmp_path, tmp_path / "train.log", 0)
    assert (progress.step, progress.line, progress.describe(None)) == (None, "", "")


def test_the_newest_whole_step_counts(tmp_path: Path) -> None:
    faster = STEP.model_copy(update={"step": 51, "tokens_per_s": 2000.0})
    write_metrics(tmp_path, STEP, faster, rest='{"event":"step","step":52,')
    progress = read(tmp_path, "held-out loss 5.1\nstep 50/200  loss 2.5\n\n")
    assert (progress.step, progress.tokens_per_s) == (faster, 1500.0)
    assert progress.is_training
    assert progress.describe(None) == faster.describe(1500.0)


def test_only_the_end_of_long_files_is_read(tmp_path: Path) -> None:
    steps = [STEP.model_copy(update={"step": number}) for number in range(1, 201)]
    write_metrics(tmp_path, *steps)
    progress = read(tmp_path, "a long line " * 10_000 + "\nstep 200/200\n")
    assert progress.step == steps[-1]
    assert progress.line == "step 200/200"


def test_lines_of_an_earlier_process_do_not_count(tmp_path: Path) -> None:
    before = "step 20/200  loss 3\n"
    assert read(tmp_path, before, log_start=len(before)).line == ""
    assert read(tmp_path, f"{before}documents: a\n", log_start=len(before)).line == "documents: a"


def test_what_comes_after_training_replaces_the_numbers(tmp_path: Path) -> None:
    write_metrics(tmp_path, STEP)
    progress = read(tmp_path, "step 50/200  loss 2.5\naudit: 20 of 100 documents\n")
    assert not progress.is_training
    assert progress.describe(12) == "audit: 20 of"
    assert progress.describe_briefly(80) == "audit: 20 of 100 documents"


@pytest.mark.parametrize(
    ("width", "brief", "line"),
    [
        (None, "loss 2.5000 lr 1.25e-04 grad 0.50 1,000 tok/s 75 s left", STEP.describe(1000.0)),
        (50, "loss 2.5000 lr 1.3e-04 75 s left", "step 50/200 loss 2.5000 lr 1.3e-04 75 s left"),
    ],
)
def test_a_step_is_shown_as_wide_as_the_terminal(
    tmp_path: Path, width: int | None, brief: str, line: str
) -> None:
    write_metrics(tmp_path, STEP)
    progress = read(tmp_path, "step 50/200  loss 2.5\n")
    # 25 s for 50 steps: 150 more take 75 s.
    assert progress.describe_briefly(width) == brief
    assert progress.describe(width) == line
