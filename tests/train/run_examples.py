"""Small runs that finish in about a second: made-up documents, a model drawn from nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_llama import TINY_LLAMA

from memguard.config import RunConfig
from memguard.train.metrics import StepMetrics
from memguard.train.trainer import Trainer
from memguard.workflows.training.checks import check_run
from memguard.workflows.training.train import train_run


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


def train_checked(config: RunConfig) -> None:
    """Check the settings and train, as `memguard train` does on the processes that there are."""
    train_run(check_run(config))


def copy_run(config: RunConfig, folder: Path) -> RunConfig:
    """Return the run in a folder of its own, as `cp -a` leaves it."""
    copied = config.model_copy(update={"output_dir": str(folder / "runs")})
    shutil.copytree(Path(config.output_dir) / config.name, Path(copied.output_dir) / config.name)
    return copied


class Killed(Exception):
    """Ends a run as SIGKILL does."""


def kill_after(step: int, config: RunConfig) -> None:
    """Train in this process, and end as SIGKILL does: after that step nothing is saved."""
    original = Trainer._timed_step

    def timed_step(self: Trainer) -> StepMetrics:
        line = original(self)
        if line.step == step:
            raise Killed
        return line

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_timed_step", timed_step)
        with pytest.raises(Killed):
            train_checked(config)
