"""metrics.jsonl and the line on the screen."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, TextIO

from pydantic import ValidationError

from memguard.errors import RecordError
from memguard.records import Record, WatchedStep, write_atomically
from memguard.runtime import format_duration


class StepMetrics(Record):
    """One optimizer step."""

    event: Literal["step"] = "step"
    step: int
    """From 1: steps taken."""
    num_steps: int
    loss: float | None
    """Nats a label that received loss; null for a step without one."""
    lr: float
    grad_norm: float | None
    num_rows: int
    num_supervised_tokens: int
    """Labels without any mitigation."""
    num_kept_tokens: int
    """Labels that received loss."""
    tokens_per_s: float
    """Labels that received loss, per second."""
    peak_memory_bytes: int
    elapsed_s: float
    penalised_share: float | None = None
    """Of the windows of an n-gram penalty, those beyond its margin; null without one."""

    def describe(self) -> str:
        """Return the line for a log."""
        left = self.elapsed_s / self.step * (self.num_steps - self.step)
        loss = "none" if self.loss is None else f"{self.loss:.4f}"
        return (
            f"step {self.step}/{self.num_steps}  loss {loss}  lr {self.lr:.2e}  "
            f"{self.tokens_per_s:,.0f} supervised tokens/s  "
            f"peak {self.peak_memory_bytes / 2**30:.2f} GiB  {format_duration(left)} left"
        )

    def describe_briefly(self) -> str:
        """Return what stands beside a progress bar on a terminal of 80 columns."""
        loss = "none" if self.loss is None else f"{self.loss:.4f}"
        return (
            f"loss {loss}  {self.tokens_per_s:,.0f} tokens/s  "
            f"{self.peak_memory_bytes / 2**30:.2f} GiB"
        )


class HeldoutMetrics(Record):
    """Mean loss on held-out documents, before training and after."""

    event: Literal["heldout"] = "heldout"
    step: int
    bucket: str
    nll: float
    """Nats a token, plain loss."""
    num_documents: int
    num_tokens: int


class EndMetrics(Record):
    """The whole run, once its last step was taken."""

    event: Literal["end"] = "end"
    step: int
    num_rows: int
    num_supervised_tokens: int
    num_kept_tokens: int
    train_s: float
    epsilon: float | None = None
    """Privacy loss of a row at `delta`, by the run's own schedule; null without dp_sgd."""
    epsilon_if_sampled: float | None = None
    """As if each step had drawn its rows."""
    delta: float | None = None
    tally_sha256: str
    """Of what was fed of each document; the manifest must agree, or its doses mean nothing."""
    stopped_by_budget: bool = False
    """Whether the risk budget ended the run before its last step."""


def hash_tally(repetitions: Iterable[int | None], num_tokens_fed: Iterable[int | None]) -> str:
    """Return a hash of how often, and how much of, each document was fed, in manifest's order."""
    counts = zip(repetitions, num_tokens_fed, strict=True)
    text = ",".join(":".join("-" if n is None else str(int(n)) for n in pair) for pair in counts)
    return hashlib.sha256(text.encode()).hexdigest()


MetricsLine = StepMetrics | HeldoutMetrics | WatchedStep | EndMetrics
_KINDS: dict[str, type[MetricsLine]] = {
    "step": StepMetrics,
    "heldout": HeldoutMetrics,
    "audit": WatchedStep,
    "end": EndMetrics,
}


class MetricsLog:
    """Appends to metrics.jsonl; every line is on disk before the next step starts."""

    def __init__(self, path: Path, *, kept: bytes, is_writer: bool = True) -> None:
        """Open the log.

        Args:
            path: of metrics.jsonl.
            kept: the lines it begins with: those of the checkpoint that the run goes on from. What
                an interrupted run wrote after it is dropped.
            is_writer: False on all ranks but one: nothing is written.
        """
        self._file: TextIO | None = None
        if not is_writer:
            return
        write_atomically(path, kept)
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: MetricsLine) -> None:
        """Append one line."""
        if self._file is not None:
            self._file.write(f"{line.model_dump_json()}\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> Iterator[MetricsLine]:
    """Yield the lines of metrics.jsonl; a last line cut off by a crash is passed over.

    Raises:
        RecordError: another line cannot be read.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        kind = next((k for n, k in _KINDS.items() if f'"event":"{n}"'.encode() in line), None)
        try:
            if kind is None:
                raise ValueError("no such event")
            yield kind.model_validate_json(line)
        except (ValidationError, ValueError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                return
            raise RecordError(
                f"'{path}' line {number} cannot be read: run memguard train "
                f"{path.parent / 'config.yaml'} to bring the log back from a checkpoint"
            ) from error
