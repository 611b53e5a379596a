"""How much memory tensors take while something runs, operation by operation.

    memory = Allocations()
    with memory.following_resizes(), observe(memory):
        ...
    memory.current_bytes, memory.peak_bytes

Counts the storage of every tensor that an operation returns until it is freed; of a fake tensor,
what it would take. Not counted: what a kernel takes for itself, what an allocator rounds up.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from memguard.parallel.simulated import find_tensors


class Allocations:
    """Follows the memory of tensors; an observer of `observe`."""

    def __init__(self) -> None:
        self.current_bytes = 0
        self.peak_bytes = 0
        self.peak_origins: Counter[str] = Counter()
        """Bytes at the peak, by the operation that made the storage."""
        self._sizes: dict[int, int] = {}
        self._origin_of: dict[int, str] = {}
        self._origins: Counter[str] = Counter()

    def see(self, operation: Any, given: list[Any], result: Any) -> None:
        """Count what an operation has made."""
        if not operation.is_view:  # Which shares the storage of what it shows.
            for tensor in find_tensors(result):
                self.add(tensor, operation._schema.name)

    def add(self, tensor: torch.Tensor, origin: str) -> None:
        """Count a tensor's storage, once."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
            self._sizes[key] = 0
            self._origin_of[key] = origin
        self._resize(key, storage.nbytes())

    def reset_peak(self) -> None:
        """Begin anew to look for the peak, from what is there."""
        self.peak_bytes = self.current_bytes
        self.peak_origins = self._origins.copy()

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Notice storages that are resized in place, as FSDP2's are: no operation shows it."""
        inner = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = inner(storage, size)
            if storage._cdata in self._sizes:
                self._resize(storage._cdata, size)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resize):
            yield

    def _resize(self, key: int, size: int) -> None:
        change = size - self._sizes[key]
        if change:
            self._sizes[key] = size
            self.current_bytes += change
            self._origins[self._origin_of[key]] += change
            if self.current_bytes > self.peak_bytes:
                self.peak_bytes = self.current_bytes
                self.peak_origins = self._origins.copy()

    def _forget(self, key: int) -> None:
        self._resize(key, 0)
        del self._sizes[key], self._origin_of[key]
