"""Tensors of a GPU that is not there: shapes and devices are right, numbers do not exist.

A read of a number, for which a GPU's queue would have to be waited for, raises.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class _Operators(TorchFunctionMode):
    """Call operators where Python's own ways ask the device, which must then exist."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].device.type == "cuda":
            name = getattr(func, "__name__", "")
            if name == "__getitem__":
                return _index(*args)
            if name == "__setitem__" and any(isinstance(part, slice) for part in args[1]):
                return torch.ops.aten.copy_(_index(args[0], args[1]), args[2])
            if name == "__setitem__":
                return torch.ops.aten.index_put_(args[0], list(args[1]), args[2])
            if name == "__invert__":
                return torch.ops.aten.bitwise_not(args[0])
            if name == "contiguous":
                return torch.ops.aten.clone(args[0], memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))


def _index(tensor: Tensor, index: Any) -> Tensor:
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [part for part in parts if not isinstance(part, Tensor)]:
        at = next(n for n, part in enumerate(parts) if part is Ellipsis)
        num_named = sum(part is not None for part in parts) - 1
        parts[at : at + 1] = [slice(None)] * (tensor.ndim - num_named)
    dim = 0
    tensors: list[Tensor | None] = []
    for part in parts:
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, int):
            tensor = tensor.select(dim, part)
            continue
        elif isinstance(part, slice):
            tensor = torch.ops.aten.slice(tensor, dim, part.start, part.stop, part.step or 1)
        tensors.append(part if isinstance(part, Tensor) else None)
        dim += 1
    return torch.ops.aten.index(tensor, tensors) if any(t is not None for t in tensors) else tensor


class Operations(TorchDispatchMode):
    """Counts operations and keeps the size of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        """Elements."""
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        self.counts[name] = self.counts.get(name, 0) + 1
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@contextlib.contextmanager
def fake_gpu() -> Iterator[Operations]:
    """Make ``device="cuda"`` available, without gradients and without numbers."""
    operations = Operations()
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        torch.no_grad(),
        FakeTensorMode(allow_non_fake_inputs=True),
        operations,
        _Operators(),
    ):
        yield operations


def move(model: Any, dtype: torch.dtype) -> Any:
    """Replace a model's weights and buffers by tensors of the GPU that is not there."""

    def on_gpu(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=kind, device="cuda")

    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(on_gpu(weight)))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, on_gpu(buffer))
    return model
