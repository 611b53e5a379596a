"""Counts what a generation waits for: agreements of all ranks, and reads from the device.

On a CPU nothing is waited for. A read is what would be one on a GPU: a scalar or the number of
nonzero elements that Python needs, and a copy to the CPU. The values of the control group, which
are on the CPU anyway, do not count.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from memguard.runtime import Runtime

_READING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
    "aten::_unique2", "aten::unique_dim",
}  # fmt: skip
_METHODS = ("agree_max", "agree_sum", "gather_objects", "broadcast_object", "check_peers")


@dataclass
class Waits:
    """What was counted."""

    num_agreements: int = 0
    """All-reduces over the control group."""
    num_reads: int = 0


class _Mode(TorchDispatchMode):
    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        is_mask = name == "aten::index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in _READING or is_mask:
            self._note()
        return func(*args, **(kwargs or {}))


@contextmanager
def count_waits(control: dist.ProcessGroup | None) -> Iterator[Waits]:
    """Count inside the block.

    Args:
        control: the group of all ranks that agree; None with one process.
    """
    waits, depth = Waits(), 0

    def note() -> None:
        waits.num_reads += depth == 0

    def read_by(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            note()
            return original(self, *args, **kwargs)

        return read

    def without_reads(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Runtime, *args: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                return original(self, *args)
            finally:
                depth -= 1

        return run

    reduce = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        waits.num_agreements += kwargs.get("group") is control
        return reduce(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, _Mode(note):
        patch.setattr(dist, "all_reduce", all_reduce)
        for name in ("cpu", "tolist"):
            patch.setattr(torch.Tensor, name, read_by(getattr(torch.Tensor, name)))
        for name in _METHODS:
            patch.setattr(Runtime, name, without_reads(getattr(Runtime, name)))
        yield waits
