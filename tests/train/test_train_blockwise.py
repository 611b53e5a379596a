"""Whole runs with adamw_8bit."""

from pathlib import Path
from typing import Any

import pytest
from run_examples import assert_same_weights, kill_after, make_run, read_losses, train_checked
from tiny_llama import TINY_LLAMA

from memguard.config import RunConfig

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.slow

_WIDE = {**TINY_LLAMA, "hidden_size": 64, "intermediate_size": 128}


def make(folder: Path, name: str, **changes: Any) -> RunConfig:
    """Return a run in which all matrices but the embedding are quantised."""
    return make_run(
        folder,
        name=name,
        model={"scratch": {"config": _WIDE, "vocab_size": 400}},
        train={"epochs": 1, "checkpoint_every_steps": 2},
        audit={"enabled": False},
        optim={"name": "adamw_8bit"},
        **changes,
    )


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = train_checked(make(tmp_path, "whole"))
    killed = make(tmp_path, "killed")
    kill_after(5, killed)
    train_checked(killed)
    assert_same_weights(killed, whole)
    assert read_losses(killed) == read_losses(whole)
