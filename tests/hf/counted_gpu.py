"""A GPU that is not there, whose live bytes are counted while a model is loaded onto it.

Tensors on it are fake: they have shapes and sizes. What is read from files and built on the CPU is
real, as are shapes; no number of a model on the GPU exists, so checks of the model are left out.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import bitsandbytes.functional  # noqa: F401 - under fake tensors it cannot be imported.
import torch
from fake_mesh import Allocations, find_tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memguard.hf import load_as
from memguard.hf.merged_weights import MergedWeights
from memguard.hf.safetensors import FolderWeights
from memguard.workflows.common import setup

GPU = torch.device("cuda")


class _Operators(TorchFunctionMode):
    """Call operators where Python's own ways ask the device, which must then exist."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if tensor is not None and name == "to":
            device, dtype, _, _ = torch._C._nn._parse_to(*args[1:], **kwargs)
            device, dtype = device or tensor.device, dtype or tensor.dtype
            if GPU.type in (device.type, tensor.device.type):
                if (device.type, dtype) == (tensor.device.type, tensor.dtype):
                    return tensor
                return torch.ops.aten._to_copy(tensor, device=device, dtype=dtype)
        if tensor is not None and tensor.device.type == GPU.type:
            if name == "copy_":
                return torch.ops.aten.copy_(*args, **kwargs)
            if name == "contiguous":
                return tensor if tensor.is_contiguous() else torch.ops.aten.clone(tensor)
            if name == "__getitem__" and isinstance(args[1], slice):
                return torch.ops.aten.slice(tensor, 0, args[1].start, args[1].stop)
        return func(*args, **kwargs)


class Loaded(Allocations):
    """Live bytes on the GPU, and the bytes that were copied onto it."""

    moved_bytes = 0


class _Live(TorchDispatchMode):
    """Counts the storage of tensors on the GPU until they are freed, and copies onto it.

    A copy that changes the dtype as well casts on the CPU, where it is narrower there.
    """

    def __init__(self, memory: Loaded) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if (source.device.type, result.device.type) == ("cpu", GPU.type):
                self._memory.moved_bytes += max(source.nbytes, result.nbytes)
        for tensor in find_tensors(result):
            if not func.is_view and tensor.device.type == GPU.type:
                self._memory.add(tensor, func._schema.name)
        return result


def _really(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def counted_gpu() -> Iterator[Loaded]:
    """Make a GPU available, and count the live bytes on it."""
    # The package has functions of these names.
    load, checks = (importlib.import_module(f"memguard.hf.{name}") for name in ("load", "assembly"))
    memory = Loaded()
    with contextlib.ExitStack() as stack:
        for owner, name in (
            (load, "open_stored"),
            (load, "build_meta_layer"),
            (setup, "load_model"),
            (load_as, "load_model"),
            (FolderWeights, "read"),
            (MergedWeights, "read_factors"),
        ):
            real = _really(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, real))
        for owner in (load, checks):
            stack.enter_context(mock.patch.object(owner, "check_causal_lm"))
        stack.enter_context(mock.patch.object(load_as, "build_causal_lm", _Wrapped))
        stack.enter_context(mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)))
        stack.enter_context(torch.no_grad())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Live(memory))
        stack.enter_context(_Operators())
        yield memory


class _Wrapped:
    """A model as `LoadedForm.load` returns it, without the checks."""

    def __init__(self, model: Any) -> None:
        self.model = model
