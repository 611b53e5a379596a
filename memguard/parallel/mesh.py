"""The mesh of processes: one process group for each axis, created once.

    rank          0 1 2 3 4 5 6 7      (data=1, z=2, y=2, x=2), x fastest
    z             0 0 0 0 1 1 1 1      shards stored weights and the batch
    y             0 0 1 1 0 0 1 1      shards the residual stream's features
    x             0 1 0 1 0 1 0 1      shards heads, FFN width and vocabulary

The same code runs over gloo on CPUs, NCCL on GPUs and a fake group in simulation.
"""

from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from memguard.config import AxisName
from memguard.parallel.mesh_shape import AXES, MeshShape


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


class Mesh4D:
    """All axes of this rank, and the two submeshes over which parameters are distributed."""

    def __init__(self, shape: MeshShape, device_mesh: DeviceMesh) -> None:
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
        self._kv_replicas: dict[int, Axis] = {}

    def axis(self, name: AxisName) -> Axis:
        """Return this rank's coordinate along an axis."""
        return self._axes[name]

    @property
    def batch_rank(self) -> int:
        """Index of the part of the batch, out of ``data * z``, that this rank processes."""
        return self.axis("data").rank * self.shape.z + self.axis("z").rank

    def kv_replicas(self, num_kv_heads: int) -> Axis:
        """Return the ranks along x that share one key/value head; one rank if x has enough heads.

        The first call creates the process group: call this while sharding, never in a forward.
        """
        x = self.axis("x")
        replicas = max(1, x.degree // num_kv_heads)
        if replicas == 1:
            return Axis(name="x")
        if replicas not in self._kv_replicas:
            ranks = self.device_mesh.mesh.reshape(-1, x.degree // replicas, replicas)
            mesh = DeviceMesh(
                self.device_mesh.device_type,
                ranks,
                mesh_dim_names=("rest", "kv_heads", "kv_replicas"),
            )
            self._kv_replicas[replicas] = Axis(
                name="kv_replicas",
                degree=replicas,
                rank=x.rank % replicas,
                group=mesh.get_group("kv_replicas"),
            )
        return self._kv_replicas[replicas]

    def connect(self, device: torch.device) -> None:
        """Connect every process group now.

        NCCL connects a group at its first use, which for some groups is the end of the first step:
        after hours of preparation, and when no memory is left for its buffers.
        """
        groups = [*(self.axis(name).group for name in AXES), dist.group.WORLD]
        for group in groups:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def build_mesh(shape: MeshShape, device_type: str) -> Mesh4D:
    """Create the mesh over all ranks of the default process group.

    Args:
        shape: degrees whose product is the number of ranks; checked by `resolve_mesh`.
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    assert dist.get_world_size() == shape.num_ranks, "resolve_mesh compares them first"
    ordered = torch.arange(shape.num_ranks).reshape([shape.degree(name) for name in shape.order])
    # Permutes from the order in which ranks are numbered to the order of the axes.
    ranks = ordered.permute([shape.order.index(name) for name in AXES])
    return Mesh4D(shape, DeviceMesh(device_type, ranks, mesh_dim_names=AXES))
