"""What a run gives to its process group and its mesh."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from memguard.config import ParallelConfig
from memguard.parallel.mesh_shape import ModelSizes
from memguard.runtime import Runtime
from memguard.workflows import setup

SIZES = ModelSizes(
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=97,
    is_tied=False,
)


def test_the_time_limit_of_a_collective_is_that_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the group of all ranks and of the groups of each axis."""
    runtime, limits = Runtime(world_size=2), []

    @contextmanager
    def start(timeout: timedelta) -> Iterator[Runtime]:
        limits.append(timeout)
        yield runtime

    def build(*_: Any, timeout: timedelta) -> None:
        limits.append(timeout)

    monkeypatch.setattr(setup, "detect_runtime", lambda: runtime)
    monkeypatch.setattr(setup, "start_runtime", start)
    monkeypatch.setattr(setup, "build_mesh", build)
    with setup.open_distributed(ParallelConfig(x=2, timeout_minutes=7), SIZES):
        pass
    assert limits == [timedelta(minutes=7)] * 2
