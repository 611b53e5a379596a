"""Builds the batch of the next step in a background thread while a step computes.

    main thread     step n: forward, backward      collective, update      step n + 1
    background      batch n + 1 ................. counts of its labels

At most one batch is ahead. A batch is a pure function of its step and of the levels of its
documents; a caller that may change levels starts the next batch afterwards.

A wait counts from when the GPU has nothing left to compute.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Self

import torch

from memguard.data.loader import Batch


class Prefetcher:
    """Batches by number of the step; a context manager, which ends its thread."""

    def __init__(self, build: Callable[[int], Batch]) -> None:
        """Set the function that builds a batch; it runs in the thread."""
        self._build = build
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memguard-batch")
        self._ahead: tuple[int, Future[Batch]] | None = None
        self.waited_s = 0.0
        """Seconds in which the caller waited since it began to take a batch."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for a batch that is being built, and drop it."""
        self._thread.shutdown(cancel_futures=True)

    def start(self, step: int) -> None:
        """Start building the batch of a step; the one before must have been taken."""
        assert self._ahead is None, "at most one batch is ahead"
        self._ahead = step, self._thread.submit(self._build, step)

    def peek(self) -> Batch | None:
        """Wait for the batch that was started and return it; None if none was started.

        Raises:
            Exception: the error of building it, of its own type.
        """
        if self._ahead is None:
            return None
        future = self._ahead[1]
        is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        while is_on_gpu and not (future.done() or torch.cuda.current_stream().query()):
            wait([future], timeout=1e-3)
        started = time.perf_counter()
        batch = future.result()
        self.waited_s += time.perf_counter() - started
        return batch

    def take(self, step: int) -> Batch:
        """Return the batch of a step, built now if it was not started."""
        self.waited_s = 0.0
        if self._ahead is None:
            self.start(step)
        batch = self.peek()
        assert self._ahead is not None, "was just started"
        assert self._ahead[0] == step, "steps are taken in order"
        self._ahead = None
        assert batch is not None, "was just started"
        return batch
