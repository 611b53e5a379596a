"""What a run of a sweep does at present, read from its files while its process trains.

metrics.jsonl   the newest step
train.log       the newest line of all else: documents, held-out loss, audit
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from memguard.runtime import format_duration
from memguard.runtime.console import Rows
from memguard.train.metrics import StepMetrics

_TAIL_BYTES = 16_384
_WIDE = 110
"""Columns of a terminal that has room for all numbers of a step."""
_MOST_OF_NAME = 22


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProgress:
    """What a run does."""

    step: StepMetrics | None
    """The newest step; None before the first one."""
    tokens_per_s: float
    """Mean of the newest steps; 0 before the first one."""
    line: str
    """The newest line of its log; empty before the first one."""

    @property
    def is_training(self) -> bool:
        """Whether the newest line is that of a step."""
        return self.step is not None and self.line.startswith("step ")

    def describe(self, width: int | None) -> str:
        """Return a line for a log.

        Args:
            width: columns for it; None for any number.
        """
        if self.step is None or not self.is_training:
            return self.line[:width]
        line = self.step.describe(self.tokens_per_s, width=width)
        if width is None or len(line) <= width:
            return line
        step = f"step {self.step.step}/{self.step.num_steps}"
        return f"{step} {self.describe_briefly(width)}"[:width]

    def describe_briefly(self, width: int | None) -> str:
        """Return the text next to the bar of its steps.

        Args:
            width: columns of the terminal; None for any number.
        """
        if self.step is None or not self.is_training:
            return self.line
        left_s = self.step.elapsed_s / self.step.step * (self.step.num_steps - self.step.step)
        left = f"{format_duration(left_s)} left"
        if width is None or width >= _WIDE:
            return f"{self.step.describe_briefly(self.tokens_per_s, width=80)} {left}"
        loss = "none" if self.step.loss is None else f"{self.step.loss:.4f}"
        return f"loss {loss} lr {self.step.lr:.1e} {left}"


def show_run(rows: Rows, name: str, progress: RunProgress, width: int | None) -> None:
    """Show what a run does in its row.

    Args:
        rows: rows of all runs.
        name: name of the run.
        progress: what it does.
        width: columns of the terminal; None for a file or a pipe.
    """
    if not rows.is_live:
        if width is not None and len(name) > _MOST_OF_NAME:
            name = f"{name[: _MOST_OF_NAME - 1]}…"
        rows.show(name, progress.describe(None if width is None else width - len(name) - 2))
    elif progress.step is None:
        rows.show(name, progress.line)
    else:
        done, total = progress.step.step, progress.step.num_steps
        rows.show(name, progress.describe_briefly(width), done=done, total=total)


def read_progress(run_folder: Path, log: Path, log_start: int) -> RunProgress:
    """Read what a run does; files that are missing or half-written count as empty.

    Args:
        run_folder: folder of the run.
        log: file of its process's standard error.
        log_start: size of the log when the process was started (bytes).
    """
    steps = []
    for line in _read_tail(run_folder / "metrics.jsonl"):
        if '"event":"step"' in line:
            try:
                steps.append(StepMetrics.model_validate_json(line))
            except ValidationError:  # A line that is being written, or whose start is cut off.
                continue
    lines = [line.strip() for line in _read_tail(log, log_start) if line.strip()]
    return RunProgress(
        step=steps[-1] if steps else None,
        tokens_per_s=sum(step.tokens_per_s for step in steps) / max(1, len(steps)),
        line=lines[-1] if lines else "",
    )


def _read_tail(path: Path, start: int = 0) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
