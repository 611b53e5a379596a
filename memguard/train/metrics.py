"""metrics.jsonl and the progress line."""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TextIO

from pydantic import Field, TypeAdapter, ValidationError

from memguard.errors import RecordError
from memguard.records import KeptBy, Record, StartLine, WatchedLine, write_atomically
from memguard.records.record import describe_unread
from memguard.runtime import format_duration
from memguard.runtime.ended import read_start_s, read_why

_WIDE = 110
"""Columns of a terminal that has room for more than what everyone needs."""


class StepMetrics(Record):
    """One optimizer step."""

    event: Literal["step"] = "step"
    step: int
    """Steps taken, from 1."""
    num_steps: int
    loss: float | None
    """Mean loss (nats per label that received loss); null for a step without such labels."""
    lr: float
    grad_norm: float | None
    num_rows: int
    num_supervised_tokens: int
    """Labels before mitigations."""
    num_kept_tokens: int
    """Labels that received loss."""
    tokens_per_s: float
    """Labels that received loss, per second."""
    tokens_per_s_per_gpu: float | None = None
    """Tokens of the rows, without padding, per second and rank."""
    mfu: float | None = None
    """Share of a GPU's peak that the step's matmuls used; null if its peak is not known."""
    wait_data_s: float | None = None
    """Seconds in which the rank with the slowest loader waited for a batch."""
    wait_save_s: float | None = None
    """Seconds since the step before in which this rank waited for saves, or copied the state."""
    memory_bytes: dict[str, int] | None = None
    """`weights`, `gradients` and `optimizer` stored by this rank, and `other`: the rest of its
    peak, which is activations and buffers, on a CPU also programs."""
    peak_memory_bytes: int
    """Peak of this process's tensors on its GPU; on a CPU its peak resident memory."""
    peak_reserved_bytes: int | None = None
    """Peak of what CUDA's allocator held for them; null on a CPU."""
    num_alloc_retries: int | None = None
    """Times that the allocator freed its cached memory because memory was short; null on a CPU."""
    elapsed_s: float
    penalised_share: float | None = None
    """Share of an n-gram penalty's windows beyond its margin; null without an n-gram penalty."""
    router_loss: float | None = None
    """Load-balancing loss of a mixture of experts, not part of `loss`; if all experts are used
    equally, the number of experts of a token. Null for a model that does not train with it."""

    slope: float | None = None
    """MeZO's derivative of the loss along its direction; null: another optimizer."""

    def describe(
        self, tokens_per_s: float, *, width: int | None = None, heldout: float | None = None
    ) -> str:
        """Return the line for a log.

        ``tokens_per_s`` is the mean over the run so far, which one slow step hardly changes;
        ``width`` that of a terminal, where the line is not to wrap; None for a file or a pipe.
        ``heldout`` is the last held-out loss.
        """
        left_s = self.elapsed_s / self.step * (self.num_steps - self.step)
        step = f"step {self.step}/{self.num_steps}"
        *numbers, rate = self._list_parts(tokens_per_s, heldout)
        left = f"{format_duration(left_s)} left"
        parts = [step, *numbers, rate, left]
        lines = (
            "  ".join([*parts, self._describe_memory()]),
            "  ".join(parts),
            " ".join(parts),
            " ".join([step, *numbers, _abbreviate(rate), left]),
            " ".join([step, *numbers, left]),
            *([] if heldout is None else [" ".join([step, numbers[0], left])]),
        )
        return next((line for line in lines if width is None or len(line) <= width), lines[-1])

    def describe_briefly(
        self, tokens_per_s: float, *, width: int | None = None, heldout: float | None = None
    ) -> str:
        """Return the text next to a progress bar, short enough for a terminal of 80 columns."""
        loss, lr, *others, rate = self._list_parts(tokens_per_s, heldout)
        if width is None or width >= _WIDE:
            return " ".join([loss, lr, *others, rate, self._describe_memory()])
        return " ".join([loss, *([lr] if heldout is None else []), *others, _abbreviate(rate)])

    def _describe_memory(self) -> str:
        return f"peak {self.peak_memory_bytes / 2**30:.2f} GiB"

    def _list_parts(self, tokens_per_s: float, heldout: float | None) -> list[str]:
        loss = "none" if self.loss is None else f"{self.loss:.4f}"
        loss += "" if heldout is None else f" held-out {heldout:.4f}"
        grad_norm = "none" if self.grad_norm is None else _shorten(self.grad_norm)
        return [
            f"loss {loss}",
            f"lr {self.lr:.2e}",
            f"grad {grad_norm}",
            f"{_shorten_rate(tokens_per_s)} tokens/s",
        ]


def _shorten(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.1e}"


def _abbreviate(rate: str) -> str:
    return rate.replace("tokens", "tok")


def _shorten_rate(value: float) -> str:
    """Return a rate in at most six characters, up to a billion."""
    if value < 99_999.5:
        return f"{value:,.0f}"
    return f"{value / 1e3:.0f}k" if value < 999_500 else f"{value / 1e6:.2f}M"


class HeldoutMetrics(Record):
    """Mean loss on held-out documents, before, during and after training."""

    event: Literal["heldout"] = "heldout"
    step: int
    bucket: str
    nll: float
    """Mean loss without mitigations (nats per token)."""
    num_documents: int
    num_tokens: int


class EndMetrics(Record):
    """Totals of the run, written after its last step."""

    event: Literal["end"] = "end"
    step: int
    num_rows: int
    num_supervised_tokens: int
    num_kept_tokens: int
    train_s: float
    epsilon: float | None = None
    """Privacy loss of a row at `delta`, for the run's actual schedule; null without dp_sgd."""
    epsilon_if_sampled: float | None = None
    """Privacy loss as if each step had sampled its rows."""
    delta: float | None = None
    tally_sha256: str
    """Hash of how much of each document was trained; the manifest's counts must match it."""
    last_step: int
    """Steps that were taken; `step`, and the totals, are those of the exported weights."""
    kept_by: KeptBy = "last"
    stopped_by: Literal["budget", "heldout"] | None = None
    """What ended training before its last step."""


def hash_tally(repetitions: Iterable[int | None], num_tokens_fed: Iterable[int | None]) -> str:
    """Return a hash of how often and how much of each document was trained, in manifest order."""
    counts = zip(repetitions, num_tokens_fed, strict=True)
    text = ",".join(":".join("-" if n is None else str(int(n)) for n in pair) for pair in counts)
    return hashlib.sha256(text.encode()).hexdigest()


MetricsLine = StartLine | StepMetrics | HeldoutMetrics | WatchedLine | EndMetrics
_ANY_LINE: TypeAdapter[MetricsLine] = TypeAdapter(
    Annotated[MetricsLine, Field(discriminator="event")]
)


class MetricsLog:
    """Appends to metrics.jsonl; every line is on disk before the next step starts."""

    def __init__(self, path: Path, *, kept: bytes, step: int = 0, is_writer: bool = True) -> None:
        """Open the log; only the writer, one rank, writes.

        ``kept`` are the lines of the checkpoint that the run resumes from, at a step. Of those that
        an interrupted run wrote after it only its starts are kept.
        """
        self._file: TextIO | None = None
        self.on_line: Callable[[MetricsLine], None] | None = None
        """Called with each line once it is written."""
        self.is_whole = True
        """Whether the file has the kept lines."""
        if not is_writer:
            return
        written = b""
        with contextlib.suppress(OSError):
            written = path.read_bytes()
        self.is_whole = written.startswith(kept)
        dropped = written[len(kept) :].splitlines(keepends=True) if self.is_whole else []
        starts = [line for line in dropped if b'"event":"start"' in line and line.endswith(b"\n")]
        num_lost = sum(b'"event":"step"' in line for line in dropped)
        self._start: partial[StartLine] | None = partial(
            StartLine, why=read_why(path.parent), step=step, num_lost_steps=num_lost
        )
        write_atomically(path, kept + b"".join(starts))
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: MetricsLine) -> None:
        """Append one line."""
        if self._file is None:
            return
        if self._start is not None and isinstance(line, StepMetrics):
            first_step_s = round(time.time() - read_start_s(os.getpid()), 3)
            start, self._start = self._start(first_step_s=first_step_s), None
            self.write(start)
        self._file.write(f"{line.model_dump_json()}\n")
        self._file.flush()
        if self.on_line is not None:
            self.on_line(line)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> Iterator[MetricsLine]:
    """Yield the lines of metrics.jsonl; a last line truncated by a crash is skipped.

    Raises:
        RecordError: the file, or another line, cannot be read.
    """
    if not path.exists():
        return
    try:
        text = path.read_bytes()
    except OSError as error:
        raise describe_unread(path, error) from error
    yield from parse_metrics(text, path)


def parse_metrics(text: bytes, path: Path) -> Iterator[MetricsLine]:
    """Yield the lines of a log; ``path`` is for messages. See `read_metrics`."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            yield _ANY_LINE.validate_json(line)
        except ValidationError as error:
            if number == len(lines) and not line.endswith(b"\n"):
                return
            raise RecordError(
                f"'{path}' line {number} cannot be read: run memguard train "
                f"{path.parent / 'config.yaml'} to restore the log from a checkpoint"
            ) from error
