"""Batches that are built ahead and copied from pinned memory are those of a loop without either."""

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from run_examples import make_run
from step_examples import make_step
from test_train_run import assert_same_steps_and_weights
from tiny_families import build

from memguard.config import RunConfig
from memguard.data.loader import Batch
from memguard.model.checks import build_causal_lm
from memguard.train.prefetch import Prefetcher
from memguard.workflows.train import train_run


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
    train_run(ahead)

    def start(self: Prefetcher, step: int) -> None:
        future: Future[Batch] = Future()
        future.set_result(self._build(step))
        self._ahead = step, future

    monkeypatch.setattr(Prefetcher, "start", start)
    train_run(in_turn)
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
