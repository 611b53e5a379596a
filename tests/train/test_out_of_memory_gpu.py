"""When memory runs out in the first step, training uses half of the micro-batch of `auto`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from run_examples import make_run
from test_train_run import assert_same_weights
from tiny_llama import TINY_LLAMA

from memguard.config import RunConfig, load_yaml
from memguard.train.metrics import StepMetrics
from memguard.train.trainer import Trainer
from memguard.workflows.train import train_run


def make(folder: Path, name: str, **train: Any) -> RunConfig:
    scratch = {"config": {**TINY_LLAMA, "hidden_size": 64}, "vocab_size": 400}
    settings = {"batch_size": 8, "max_steps": 3, "activation_checkpointing": "none"}
    return make_run(
        folder,
        name=name,
        model={"scratch": scratch},
        train={**settings, "deterministic": True, **train},
        audit={"enabled": False},
    )


def run_out_above(rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let memory run out where a pass has more rows; return the rows of all steps."""
    original, tried = Trainer._timed_step, []

    def timed_step(self: Trainer) -> StepMetrics:
        count = self.step.train.count_micro_rows(8)
        tried.append(count)
        if count > rows:
            if device.type == "cuda":
                # A real error of the allocator: four pebibytes.
                torch.empty(2**50, device=device)
            raise torch.OutOfMemoryError("made up")
        return original(self)

    monkeypatch.setattr(Trainer, "_timed_step", timed_step)
    return tried


def test_half_of_the_micro_batch_is_used(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = make(tmp_path, "fixed", micro_batch_size=4)
    train_run(fixed)
    tried = run_out_above(4, device, monkeypatch)
    halved = make(tmp_path, "halved", micro_batch_size="auto")
    train_run(halved)
    assert tried == [8, 4, 4, 4]
    stored = load_yaml(tmp_path / "runs" / "halved" / "config.yaml").values
    assert stored["train"]["micro_batch_size"] == 4
    assert_same_weights(halved, fixed)
