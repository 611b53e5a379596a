"""Runs on a GPU: batches from pinned memory, a run that is resumed, memory that runs out."""

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_examples import assert_same_weights, kill_after, make_run, train_checked
from step_examples import make_step
from test_train_run import assert_same_steps_and_weights
from tiny_families import build
from tiny_llama import TINY_LLAMA

from memguard.config import RunConfig, load_yaml
from memguard.data.loader import Batch
from memguard.model.checks import build_causal_lm
from memguard.train.metrics import StepMetrics
from memguard.train.prefetch import Prefetcher
from memguard.train.trainer import Trainer


def make(folder: Path, name: str) -> RunConfig:
    return make_run(
        folder,
        name=name,
        mitigations=[{"name": "goldfish", "k": 3, "mode": "random"}],
        train={"batch_size": 8, "micro_batch_size": 4, "max_steps": 6, "deterministic": True},
        audit={"enabled": False},
    )


def test_training_is_that_of_batches_built_one_by_one(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, in_turn = make(tmp_path, "ahead"), make(tmp_path, "in-turn")
    train_checked(ahead)

    def start(self: Prefetcher, step: int) -> None:
        future: Future[Batch] = Future()
        future.set_result(self._build(step))
        self._ahead = step, future

    monkeypatch.setattr(Prefetcher, "start", start)
    train_checked(in_turn)
    assert_same_steps_and_weights(ahead, in_turn)


def test_what_is_copied_may_be_changed_at_once(device: torch.device) -> None:
    """The copy to a GPU runs later than the call, from memory of its own."""
    step = make_step(build_causal_lm(build("llama").to(device)), device=device)
    draw = np.random.default_rng(0)
    copied = []
    for _ in range(20):
        array = draw.integers(0, 1000, (64, 512))
        copied.append((step._to_device(array), array.copy()))
        if device.type == "cuda":
            array[:] = -1
    for tensor, expected in copied:
        assert tensor.device.type == device.type
        assert tensor.dtype == torch.int64
        np.testing.assert_array_equal(tensor.cpu().numpy(), expected)


def make_bf16(folder: Path, name: str, **train: Any) -> RunConfig:
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


@pytest.mark.long
def test_killed_and_resumed_ends_with_the_same_bits(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = make_bf16(tmp_path, "whole"), make_bf16(tmp_path, "killed")
    train_checked(whole)
    kill_after(5, killed)
    train_checked(killed)
    assert_same_steps_and_weights(killed, whole)
    environment = json.loads((tmp_path / "runs" / "whole" / "environment.json").read_text())
    assert (environment["gpu"] == "none") == (device.type == "cpu")


def make_halved(folder: Path, name: str, **train: Any) -> RunConfig:
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
            self.is_in_step = True
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
    fixed = make_halved(tmp_path, "fixed", micro_batch_size=4)
    train_checked(fixed)
    tried = run_out_above(4, device, monkeypatch)
    halved = make_halved(tmp_path, "halved", micro_batch_size="auto")
    train_checked(halved)
    assert tried == [8, 4, 4, 4]
    stored = load_yaml(tmp_path / "runs" / "halved" / "config.yaml").values
    assert stored["train"]["micro_batch_size"] == 4
    assert_same_weights(halved, fixed)
