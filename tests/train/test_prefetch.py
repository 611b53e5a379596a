"""Batches that are built ahead: the same, in order, and with errors of their own type."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import RankPool
from run_examples import make_run, train_checked

from memguard.config import RunConfig
from memguard.data.loader import Batch, Loader
from memguard.errors import DataError
from memguard.train.prefetch import Prefetcher
from memguard.train.step import TrainStep

pytestmark = pytest.mark.slow


def make_batch(step: int) -> Batch:
    ids = np.full((1, 2), step)
    return Batch(
        input_ids=ids,
        labels=ids,
        position_ids=ids,
        document_ids=ids,
        num_supervised=step,
        num_kept=step,
    )


def test_a_batch_is_built_in_another_thread_while_this_one_continues() -> None:
    may_build = threading.Event()
    threads = []

    def build(step: int) -> Batch:
        assert may_build.wait(timeout=30)
        threads.append(threading.current_thread())
        return make_batch(step)

    with Prefetcher(build) as batches:
        assert batches.peek() is None
        batches.start(5)
        may_build.set()
        looked = batches.peek()
        assert looked is not None
        assert looked is batches.take(5)
        assert batches.peek() is None
        assert batches.take(6).num_kept == 6, "built when it was not started"
    assert all(thread is not threading.main_thread() for thread in threads)
    assert not any(thread.is_alive() for thread in threads)


def test_an_error_has_its_own_type() -> None:
    def build(step: int) -> Batch:
        raise DataError(f"no batch {step}")

    with Prefetcher(build) as batches:
        batches.start(3)
        for call in (batches.peek, lambda: batches.take(3)):
            with pytest.raises(DataError, match="no batch 3"):
                call()


def test_batches_are_taken_in_order() -> None:
    with Prefetcher(make_batch) as batches:
        batches.start(1)
        with pytest.raises(AssertionError, match="in order"):
            batches.take(2)
        with pytest.raises(AssertionError, match="at most one"):
            batches.start(2)


def test_an_error_of_the_loader_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Loader.batch

    def batch(self: Loader, samples: Any, **settings: Any) -> Batch:
        if 16 in samples:
            raise DataError("a row is missing")
        return original(self, samples, **settings)

    monkeypatch.setattr(Loader, "batch", batch)
    with pytest.raises(DataError, match="a row is missing"):
        train_checked(make_run(tmp_path, audit={"enabled": False}))


def watch_run(config: RunConfig) -> tuple[list[bool], int]:
    """On a rank: whether the labels of each step were known, and collectives before backward."""
    known, num_sums = [], 0
    run, sum_values = TrainStep.run, TrainStep._sum_over_batch

    def watched(self: TrainStep, batch: Batch, **settings: Any) -> Any:
        known.append(settings["labels"] is not None)
        result = run(self, batch, **settings)
        if settings["labels"] is not None:
            mine = settings["labels"]
            assert mine == (result.num_supervised, result.num_kept)
        return result

    def count(self: TrainStep, values: Any) -> Any:
        nonlocal num_sums
        num_sums += 1
        return sum_values(self, values)

    # For this process only, which ends with the test.
    TrainStep.run, TrainStep._sum_over_batch = watched, count  # type: ignore[method-assign]
    train_checked(config)
    return known, num_sums


def test_ranks_wait_for_each_other_once_a_step(ranks: RankPool, tmp_path: Path) -> None:
    config = make_run(tmp_path, audit={"enabled": False}, parallel={"z": 1, "x": 2})
    for known, num_sums in ranks(watch_run, 2, config):
        assert known == [False] + [True] * (len(known) - 1)
        assert len(known) > 5
        assert num_sums == len(known) + 1, "the first step's labels, and each step's sums"
