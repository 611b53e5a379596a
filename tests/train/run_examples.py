"""Small runs that finish in about a second: made-up documents, a model drawn from nothing."""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_llama import TINY_LLAMA

from memguard.config import RunConfig
from memguard.errors import Interrupted
from memguard.records import AuditReport, load_record
from memguard.runtime import detect_runtime
from memguard.train.metrics import MetricsLine, StepMetrics, read_metrics
from memguard.train.trainer import Trainer
from memguard.workflows.training.checks import check_run
from memguard.workflows.training.train import train_run

Line = TypeVar("Line", bound=MetricsLine)
QUIET = {"audit": {"enabled": False}}


def write_documents(path: Path, count: int = 60, *, words: int = 40, seed: int = 0) -> Path:
    """Write a jsonl of documents of random words (no two share a run of 13)."""
    draw = np.random.default_rng(seed)
    vocabulary = ["".join(draw.choice(list("abcdefghij"), 4)) for _ in range(300)]
    with path.open("w") as file:
        for number in range(count):
            text = " ".join(draw.choice(vocabulary, words + number % 7))
            file.write(json.dumps({"id": f"doc-{number}", "text": text}) + "\n")
    return path


def make_run(folder: Path, *, name: str = "run", **changes: Any) -> RunConfig:
    """Return a run of `folder`; `changes` replace or extend its sections."""
    source = folder / "documents.jsonl"
    if not source.exists():
        write_documents(source)
    values: dict[str, Any] = {
        "name": name,
        "output_dir": str(folder / "runs"),
        "seed": 3,
        "model": {"scratch": {"config": TINY_LLAMA, "vocab_size": 400}},
        "data": {"train": str(source), "seq_len": 128},
        "optim": {"lr": 3e-3},
        "train": {"batch_size": 8, "epochs": 2, "log_every_steps": 100},
        "audit": {"continuation_tokens": 8},
    }
    for section, change in changes.items():
        merged = isinstance(change, dict) and isinstance(values.get(section), dict)
        values[section] = {**values[section], **change} if merged else change
    return RunConfig.model_validate(values)


def train_checked(config: RunConfig) -> RunConfig:
    """Check the settings and train, as `memguard train` does on the processes that there are."""
    ranks = detect_runtime()
    train_run(check_run(config, nproc=ranks.world_size, writes=ranks.is_main))
    return config


def run_folder(config: RunConfig) -> Path:
    return Path(config.output_dir) / config.name


def read_lines(config: RunConfig, kind: type[Line]) -> list[Line]:
    """Return the lines of one kind of a run's log."""
    lines = read_metrics(run_folder(config) / "metrics.jsonl")
    return [line for line in lines if isinstance(line, kind)]


def read_losses(config: RunConfig) -> list[float | None]:
    return [line.loss for line in read_lines(config, StepMetrics)]


def read_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_file(run_folder(config) / "model/model.safetensors")
    return weights


def assert_same_weights(one: RunConfig, other: RunConfig) -> None:
    ours, theirs = read_weights(one), read_weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def read_report(config: RunConfig) -> AuditReport:
    return load_record(AuditReport, run_folder(config) / "audit" / "report.json")


def copy_run(config: RunConfig, folder: Path) -> RunConfig:
    """Return the run in a folder of its own, as `cp -a` leaves it."""
    copied = config.model_copy(update={"output_dir": str(folder / "runs")})
    shutil.copytree(run_folder(config), run_folder(copied))
    return copied


class Killed(Exception):
    """Ends a run as SIGKILL does."""


@contextmanager
def acting_after(step: int, act: Callable[[Trainer], None]) -> Iterator[None]:
    """Let this happen after a step of the runs that are trained meanwhile."""
    original = Trainer._timed_step

    def timed_step(self: Trainer) -> StepMetrics:
        line = original(self)
        if line.step == step:
            act(self)
        return line

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_timed_step", timed_step)
        yield


def kill_after(step: int, config: RunConfig) -> None:
    """Train in this process, and end as SIGKILL does: after that step nothing is saved."""

    def act(_: Trainer) -> None:
        raise Killed

    with acting_after(step, act), pytest.raises(Killed):
        train_checked(config)


def stop_after(step: int, config: RunConfig) -> None:
    """Train in this process, and end as SIGTERM does after that step, which is saved."""

    def act(trainer: Trainer) -> None:
        trainer.stop_request.signal_number = signal.SIGTERM

    with acting_after(step, act), pytest.raises(Interrupted):
        train_checked(config)
