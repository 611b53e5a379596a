"""One rank of a mesh of any size, without the other ranks and without allocating memory.

    with simulated_mesh(MeshShape(data=8, z=128, y=2, x=8), rank=5) as mesh:
        layer = build_meta_layer(config, Assembly(mesh=mesh, ...))
        sent, memory = SentCollectives(mesh, config), Allocations()
        with observe(sent, memory):
            allocate(layer.lm, layer.assembly.device)
            ...                                     the engine's own forward, backward, update
    sent.calls, memory.peak_bytes

The process group is torch's fake one: nothing is sent and nothing waits. Tensors are fake: they
have shapes but no values, and reading a scalar returns 1.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest import mock

import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from memguard.parallel.mesh import Mesh4D, build_mesh
from memguard.parallel.mesh_shape import AXES, MeshShape
from memguard.parallel.model_sizes import ModelSizes

Calls = Counter[tuple[str, str, str, int]]
"""Number of calls by phase, axis, operation and payload (bytes), as `traffic` counts them."""

_OPERATIONS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
}


@contextmanager
def simulated_mesh(shape: MeshShape, rank: int = 0) -> Iterator[Mesh4D]:
    """Act as one rank of a mesh without other ranks; destroys an existing process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=shape.num_ranks, store=FakeStore())
    try:
        yield build_mesh(shape, "cpu")
    finally:
        dist.destroy_process_group()


class Observer(Protocol):
    """An observer that is called for every operation."""

    def see(self, operation: Any, given: list[Any], result: Any) -> None:
        """Receive an operation, its arguments and its result."""


@contextmanager
def observe(*observers: Observer) -> Iterator[None]:
    """Make tensors fake inside the block, and report each operation to the observers."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Watch(observers))
        yield


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatches operations, and handles those that fake tensors do not support."""

    def __init__(self, observers: tuple[Observer, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observers = observers

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # Called very often: full dispatch would double the time.
        if operation is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if operation is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # Real tensors return the same object; fake ones would return a new one.
        result = operation(*args, **(kwargs or {}))
        given = [*args, *kwargs.values()] if kwargs else args
        for observer in self._observers:
            observer.see(operation, given, result)
        return result


class SentCollectives:
    """Counts collectives, including those over an axis of one rank."""

    def __init__(self, mesh: Mesh4D | None, hf_config: Any) -> None:
        """Start at zero for a mesh (None: one process, no collectives) and a model."""
        self.calls: Calls = Counter()
        self._axes: dict[str, str] = {}
        if mesh is not None:
            self._axes = _name_groups(mesh, ModelSizes.from_config(hf_config).num_kv_heads)

    def see(self, operation: Any, given: list[Any], result: Any) -> None:
        """Count the operation if it is a collective."""
        if operation.namespace in ("c10d", "_c10d_functional"):
            self._record(operation._schema.name.split("::")[1], given, result)

    def _record(self, name: str, given: list[Any], result: Any) -> None:
        (axis,) = {self._axes[group] for value in given for group in self._groups(value)}
        num_bytes = max(t.numel() * t.element_size() for t in find_tensors([*given, result]))
        # Recomputation runs inside backward. Only sums of the update are in float64.
        in_backward = torch._C._current_graph_task_id() != -1
        is_wide = any(t.dtype == torch.float64 for t in find_tensors(given))
        in_update = axis == "world" or is_wide
        phase = "update" if in_update else "backward" if in_backward else "forward"
        self.calls[phase, axis, _OPERATIONS[name], num_bytes] += 1

    def _groups(self, value: Any) -> Iterator[str]:
        if isinstance(value, str) and value in self._axes:
            yield value
        elif isinstance(value, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(value)
            except RuntimeError:  # Another object, such as the reduction operation.
                return
            yield group.group_name


def find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_tensors(item)


def _name_groups(mesh: Mesh4D, num_kv_heads: int) -> dict[str, str]:
    """Return a mapping from group names to the axes of a mesh."""
    # Axes of one rank share a group, through which only FSDP2 sends, over z.
    axes = sorted((mesh.axis(name) for name in AXES), key=lambda axis: axis.name == "z")
    replicas = mesh.kv_replicas(num_kv_heads)
    axes += [replicas] if replicas.degree > 1 else []
    world: Any = dist.group.WORLD
    return {world.group_name: "world"} | {axis.group_name: axis.name for axis in axes}


class Allocations:
    """Tracks the memory of tensors, operation by operation; an observer for `observe`.

        with memory.following_resizes(), observe(memory):
            ...
        memory.current_bytes, memory.peak_bytes

    Counts the storage of every tensor that an operation returns until it is freed; for a fake
    tensor, the storage it would need. Not counted: workspace inside kernels, and rounding by the
    allocator.
    """

    def __init__(self) -> None:
        self.current_bytes = 0
        self.peak_bytes = 0
        self.peak_origins: Counter[str] = Counter()
        """Bytes at the peak, by the operation that allocated the storage."""
        self._sizes: dict[int, int] = {}
        self._origin_of: dict[int, str] = {}
        self._origins: Counter[str] = Counter()

    def see(self, operation: Any, given: list[Any], result: Any) -> None:
        """Count the storage that an operation has allocated."""
        if not operation.is_view:  # A view shares the storage of its base.
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
        """Reset the peak to the current state."""
        self.peak_bytes = self.current_bytes
        self.peak_origins = self._origins.copy()

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Track storages that are resized in place, as in FSDP2, which no operation reports."""
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
