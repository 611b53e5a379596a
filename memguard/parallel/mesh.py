"""The mesh of processes: one process group for each axis, created once.

    rank          0 1 2 3 4 5 6 7      (data=1, z=2, y=2, x=2), x fastest
    z             0 0 0 0 1 1 1 1      shards stored weights and the batch
    y             0 0 1 1 0 0 1 1      shards the residual stream's features
    x             0 1 0 1 0 1 0 1      shards heads, FFN width and vocabulary

A rank creates the groups that it is in, at most five, and no others: with torch's default every
rank takes part in the creation of every group, thousands on large meshes. Axes of one rank share a
group of this rank alone. On GPUs the collectives over x and y, for which computation waits, run on
streams of high priority; otherwise matmuls that overlap them could fill the GPU first.

The same code runs over gloo on CPUs, NCCL on GPUs and a fake group in tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from memguard.config import AxisName
from memguard.parallel.layout import ShardSlice, find_rectangle
from memguard.parallel.mesh_shape import AXES, MeshShape

CONNECT_BYTES = 16 * 2**20
"""Of the messages that connect a process group; those of layers have tens to hundreds of MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """This rank's coordinate along one axis; collectives over an axis of one rank do nothing."""

    name: str
    degree: int = 1
    """Ranks along the axis."""
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def group_name(self) -> str:
        """Name of the process group, which functional collectives take as an argument."""
        assert self.group is not None, "collectives over an axis of one rank are left out"
        return self.group.group_name


def world_axis() -> Axis:
    """Return all ranks as an axis."""
    return Axis(
        name="world", degree=dist.get_world_size(), rank=dist.get_rank(), group=dist.group.WORLD
    )


class Mesh4D:
    """All axes of this rank, and the two submeshes over which parameters are distributed."""

    def __init__(self, shape: MeshShape, device_mesh: DeviceMesh, timeout: timedelta) -> None:
        """Wrap a device mesh; use `build_mesh` to create one."""
        self.shape = shape
        self.device_mesh = device_mesh
        # A data axis of one rank would still cost an all-reduce of every gradient.
        batch_axes = ("data", "z") if shape.data > 1 else ("z",)
        self.batch_mesh: DeviceMesh = device_mesh[batch_axes]
        """Used by FSDP2: replicates over data, shards over z."""
        self.tensor_mesh: DeviceMesh = device_mesh["y", "x"]
        """Every parameter is a DTensor on this mesh."""
        self._axes = {
            name: Axis(
                name=name,
                degree=shape.degree(name),
                rank=device_mesh.get_local_rank(name),
                group=device_mesh.get_group(name),
            )
            for name in AXES
        }
        self._timeout = timeout
        self._kv_replicas: dict[int, Axis] = {}

    def axis(self, name: AxisName) -> Axis:
        """Return this rank's coordinate along an axis."""
        return self._axes[name]

    @property
    def batch_rank(self) -> int:
        """Index of the part of the batch, out of ``data * z``, that this rank processes."""
        return self.axis("data").rank * self.shape.z + self.axis("z").rank

    def cut_gathered(
        self, shape: Sequence[int], placements: tuple[Placement, Placement]
    ) -> ShardSlice:
        """Return this rank's rectangle of a tensor gathered over z, as a forward uses it."""
        here = {"x": self.axis("x").rank, "y": self.axis("y").rank}
        return find_rectangle(shape, placements, self.shape, here, over_z=False)

    def kv_replicas(self, num_kv_heads: int) -> Axis:
        """Return the ranks along x that share one key/value head; one rank if x has enough heads.

        The first call creates the process group: call this while sharding, never in a forward.
        """
        x = self.axis("x")
        replicas = max(1, x.degree // num_kv_heads)
        if replicas == 1:
            return Axis(name="x")
        if replicas not in self._kv_replicas:
            members = _ranks_along(self.device_mesh.mesh, "x")
            first = x.rank // replicas * replicas
            group = self._join(members[first : first + replicas], "kv_replicas")
            self._kv_replicas[replicas] = Axis(
                name="kv_replicas", degree=replicas, rank=x.rank % replicas, group=group
            )
        return self._kv_replicas[replicas]

    def _join(self, ranks: Sequence[int], name: str) -> Any:
        return _join_group(ranks, name, self.device_mesh.device_type, self._timeout)

    def connect(self, device: torch.device) -> None:
        """Connect every process group now.

        NCCL connects a group at its first use, which for some groups is the end of the first step:
        after hours of preparation, and when no memory is left for its buffers. It connects each
        kind of collective, for large messages as for small ones, when one is sent.
        """
        dist.all_reduce(torch.zeros(1, device=device))
        for axis in (self.axis(name) for name in AXES):
            if axis.degree > 1:
                part = torch.zeros(CONNECT_BYTES // 4 // axis.degree, device=device)
                whole = part.new_zeros(len(part) * axis.degree)
                dist.all_gather_into_tensor(whole, part, group=axis.group)
                dist.reduce_scatter_tensor(part, whole, group=axis.group)
                dist.all_reduce(whole, group=axis.group)


def build_mesh(
    shape: MeshShape, device_type: str, *, timeout: timedelta = timedelta(minutes=30)
) -> Mesh4D:
    """Create the mesh over all ranks of the default process group; every rank calls this.

    ``shape`` has been checked by `resolve_mesh`; ``timeout`` is the longest wait of a collective
    over an axis.
    """
    assert dist.get_world_size() == shape.num_ranks, "resolve_mesh compares them first"
    ordered = torch.arange(shape.num_ranks).reshape([shape.degree(name) for name in shape.order])
    # Permutes from the order in which ranks are numbered to the order of the axes.
    ranks = ordered.permute([shape.order.index(name) for name in AXES]).contiguous()
    groups: list[Any] = []
    alone: Any = None
    for name in AXES:
        if shape.degree(name) > 1:
            groups.append(_join_group(_ranks_along(ranks, name), name, device_type, timeout))
        else:
            alone = alone or _join_group([dist.get_rank()], "alone", device_type, timeout)
            groups.append(alone)
    device_mesh = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=AXES)
    return Mesh4D(shape, device_mesh, timeout)


def _ranks_along(ranks: torch.Tensor, name: AxisName) -> list[int]:
    """Return the ranks that differ from this one at most in the coordinate of one axis."""
    dim = AXES.index(name)
    lines = ranks.movedim(dim, -1).flatten(0, -2)
    (line,) = lines[(lines == dist.get_rank()).any(-1)].tolist()
    return [int(rank) for rank in line]


# Axes whose collectives computation waits for.
_URGENT = ("y", "x", "kv_replicas")


def _join_group(ranks: Sequence[int], name: str, device_type: str, timeout: timedelta) -> Any:
    """Create the group of these ranks; only they call this.

    NCCL splits the communicator of all ranks, so every rank creates a group of this name at the
    same time, with its own ranks.
    """
    is_urgent = device_type == "cuda" and name in _URGENT
    if len(ranks) == dist.get_world_size() and not is_urgent:
        return dist.group.WORLD
    options: Any = None
    if is_urgent:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout  # Otherwise torch warns that they differ.
    return dist.new_group(
        ranks,
        timeout=timeout,
        backend="nccl" if device_type == "cuda" else None,
        pg_options=options,
        # Only the members wait for each other.
        use_local_synchronization=True,
        group_desc=f"mesh_{name}",
    )
