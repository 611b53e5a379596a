"""A run on a GPU that is killed and resumed ends with the same bits, with `train.deterministic`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_examples import make_run
from test_train_run import assert_same_steps_and_weights, kill_after
from tiny_llama import TINY_LLAMA

from memguard.config import RunConfig
from memguard.workflows.train import train_run


def make(folder: Path, name: str, **train: Any) -> RunConfig:
    """Return a run of 8 steps in bf16 with checkpoints after 3, 6 and the last."""
    # Head dimension 16, the least that flash attention's kernels take.
    scratch = {"config": {**TINY_LLAMA, "hidden_size": 64}, "vocab_size": 400}
    settings = {
        "batch_size": 8,
        "micro_batch_size": 4,
        "max_steps": 8,
        "precision": "bf16",
        "deterministic": True,
        "checkpoint_every_steps": 3,
    }
    return make_run(
        folder,
        name=name,
        model={"scratch": scratch},
        mitigations=[{"name": "goldfish", "k": 3, "mode": "random"}],
        train={**settings, **train},
        audit={"enabled": False},
    )


@pytest.mark.slow
def test_killed_and_resumed_ends_with_the_same_bits(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = make(tmp_path, "whole"), make(tmp_path, "killed")
    train_run(whole)
    kill_after(5, killed, monkeypatch)
    train_run(killed)
    assert_same_steps_and_weights(killed, whole)
    environment = json.loads((tmp_path / "runs" / "whole" / "environment.json").read_text())
    assert (environment["gpu"] == "none") == (device.type == "cpu")
