"""What one training step sends, recorded without sending it: fake process group, fake tensors.

    with fake_mesh(MeshShape(z=2, x=8)) as mesh:                 in a rank of the fixture `ranks`
        record_forward_backward(build_meta_layer(...), ...)
    Counter({("forward", "x", "all_reduce", 4096): 3, ...})      phase, axis, operation, bytes

Bytes are those of the larger buffer: an all-reduce's own, an all-gather's result, what a
reduce-scatter is given. Those over an axis of one rank are recorded like others.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from memguard.parallel.assemble import ShardedLayer, allocate
from memguard.parallel.mesh import Mesh4D
from memguard.parallel.mesh_shape import AXES, ModelSizes

Calls = Counter[tuple[str, str, str, int]]

_OPERATIONS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
}


class Recorder(TorchDispatchMode):
    """Counts the collectives that are called under it; to be entered inside a fake mode."""

    def __init__(self, axes: dict[str, str]) -> None:
        """Take the axis of each group's name."""
        super().__init__()
        self.axes = axes
        self.phase = "forward"
        self.calls: Calls = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation.namespace in ("c10d", "_c10d_functional"):
            name = operation._schema.name.split("::")[1]
            if name != "wait_tensor":
                given = [*args, *(kwargs or {}).values()]
                (axis,) = {self.axes[group] for each in given for group in self._groups(each)}
                num_bytes = max(t.numel() * t.element_size() for t in _tensors([*given, result]))
                self.calls[self.phase, axis, _OPERATIONS[name], num_bytes] += 1
        return result

    def _groups(self, value: Any) -> Iterator[str]:
        if isinstance(value, str) and value in self.axes:
            yield value
        elif isinstance(value, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(value)
            except RuntimeError:  # Another object, such as the kind of reduction.
                return
            yield group.group_name


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def name_groups(mesh: Mesh4D, num_kv_heads: int) -> dict[str, str]:
    """Return the axis of each group of a mesh by the group's name."""
    axes = [mesh.axis(name) for name in AXES]
    replicas = mesh.kv_replicas(num_kv_heads)
    axes += [replicas] if replicas.degree > 1 else []
    return {dist.group.WORLD.group_name: "world"} | {axis.group_name: axis.name for axis in axes}


def record_forward_backward(
    layer: ShardedLayer, *, num_rows: int, seq_len: int, sums_nll: bool = True
) -> Calls:
    """Record a forward and a backward pass of a layer from `build_meta_layer`."""
    vocab, mesh = layer.vocab, layer.sharding.mesh
    axes = name_groups(mesh, ModelSizes.from_config(vocab.model.config).num_kv_heads)
    with FakeTensorMode(allow_non_fake_inputs=True):
        allocate(layer)
        vocab.model.train()
        ids_BT = torch.zeros(num_rows, seq_len, dtype=torch.long)
        positions_BT = torch.arange(seq_len).expand(num_rows, seq_len)
        labels_N = torch.zeros(num_rows * (seq_len - 1), dtype=torch.long)

        def work() -> torch.Tensor:
            hidden_BTD = vocab.hidden_states(ids_BT, positions_BT)
            hidden_ND = hidden_BTD[:, :-1].flatten(0, 1)
            if sums_nll:
                return vocab.sum_nll(hidden_ND, labels_N)
            return vocab.token_terms(hidden_ND, labels_N).nll_N.sum()

        with Recorder(axes) as recorder:
            loss = vocab(work)
            recorder.phase = "backward"
            loss.backward()
    return recorder.calls
