"""Saves the state while training goes on.

    start    copies this rank's state into CPU memory that is reused, and starts a thread
    thread   the save itself, of the copy, over a gloo group of its own
    wait     returns once the thread has ended on every rank, and says whether the save failed

The thread reads nothing that training changes. It cannot hold a process whose other ranks are dead:
its group has a time limit, and a process does not wait for it at its end. One failed save is a
warning, as the next one saves more; two in a row are an error, and so is one that is vital.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from memguard.errors import OtherRankFailed, describe_foreign, is_out_of_memory
from memguard.runtime import Console, Runtime
from memguard.runtime.stalls import SAVE_THREAD
from memguard.train.checkpoint import StatePart, TrainState, to_stored

Save = Callable[[Mapping[str, Tensor], Runtime], object]
"""Saves tensors of the state; every rank calls it with its own."""


class BackgroundSave:
    """Runs one save at a time; all ranks call its methods, except `end`, in the same order."""

    def __init__(self, runtime: Runtime, console: Console, *, timeout: timedelta) -> None:
        """Create the group of the saves; ``timeout`` is the longest that a rank waits in one."""
        self._runtime, self._console, self._own = runtime, console, runtime
        if runtime.world_size > 1:
            group = dist.new_group(backend="gloo", timeout=timeout)
            self._own = replace(runtime, control=group)
        self._buffers: dict[str, Tensor] = {}
        self.has_room = True
        """Whether this machine has memory for a copy; otherwise wait before the next step."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_vital = False
        self._num_failed = 0
        """Saves in a row, up to the last that was waited for."""

    @property
    def has_failed(self) -> bool:
        """Whether the save in flight has failed on this rank."""
        return self._error is not None

    def start(self, state: TrainState, save: Save, *, is_vital: bool = False) -> None:
        """Copy the state and begin to save it; a failure of a ``is_vital`` save is an error."""
        assert self._thread is None, "the save before was not waited for"
        parts = self._copy(list(state.parts()))
        self._is_vital = is_vital
        self._thread = threading.Thread(
            target=self._run, args=(parts, save), name=SAVE_THREAD, daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in flight, if there is one; warn if it failed and the next may do.

        Raises:
            OSError: it could not be written, and was vital or the second in a row.
            OtherRankFailed: the same, and only other ranks know why.
        """
        if self._thread is None:
            return
        error = self._join()
        follows, rank = isinstance(error, OtherRankFailed), self._runtime.rank
        own = None if error is None else (follows, rank, describe_foreign(error))
        failed = [one for one in self._runtime.gather_objects(own) if one is not None]
        self._num_failed = self._num_failed + 1 if failed else 0
        if not failed:
            return
        # The first rank that failed by itself.
        _, rank, cause = min(failed)
        if self._is_vital or self._num_failed > 1:
            raise error or OtherRankFailed(rank, 1)
        self._console.warn(f"a save failed on rank {rank} ({cause}); the next one tries again")

    def end(self) -> None:
        """Wait for this rank's part of the save in flight, after an error on any rank."""
        if (error := self._join()) is not None:
            self._console.warn(f"the last save failed ({describe_foreign(error)})")

    def _join(self) -> BaseException | None:
        if self._thread is not None:
            self._thread.join()
        error, self._error, self._thread = self._error, None, None
        return error

    def _run(self, parts: Sequence[StatePart], save: Save) -> None:
        try:
            if self._own.device.type == "cuda":
                torch.cuda.set_device(self._own.device)  # A new thread has the first GPU.
            save(to_stored(parts), self._own)
        except BaseException as error:  # Raised by `wait`.
            self._error = error

    def _copy(self, parts: Sequence[StatePart]) -> Sequence[StatePart]:
        """Return the parts in this object's own memory; as they are if there is no room."""
        if self.has_room and self._runtime.agree_any(not self._find_room(parts)):
            self.has_room = False
            self._buffers.clear()
            self._console.warn(
                "no memory is left for a copy of the state: training waits for each save"
            )
        if not self.has_room:
            return parts
        copies = [
            replace(part, value=self._buffers[part.name].copy_(part.value, non_blocking=True))
            for part in parts
        ]
        if self._runtime.device.type == "cuda":
            torch.cuda.current_stream(self._runtime.device).synchronize()
        return copies

    def _find_room(self, parts: Sequence[StatePart]) -> bool:
        """Allocate what is not yet; a parameter has no moments before its first gradient."""
        try:
            for part in parts:
                if part.name not in self._buffers:
                    self._buffers[part.name] = torch.empty_like(
                        part.value, device="cpu", pin_memory=part.value.is_cuda
                    )
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True
