"""Meshes of ranks that remain for several calls, and what their ranks store."""

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from memguard.parallel.fused import FeatureOrder
from memguard.parallel.layout import ShardSlice, find_rectangle
from memguard.parallel.mesh import Mesh4D, build_mesh
from memguard.parallel.mesh_shape import MeshShape


@functools.cache
def mesh_of(shape: MeshShape, device_type: str = "cpu") -> Mesh4D:
    """Return a mesh of this rank; each that is built has process groups and threads of its own."""
    return build_mesh(shape, device_type)


def to_mesh(order: FeatureOrder, tensor: Tensor) -> Tensor:
    """Return a whole tensor, in the order of files, in the order of the mesh."""
    return torch.cat([tensor.narrow(order.dim, *run) for run in order.runs], order.dim)


def to_file(order: FeatureOrder, tensor: Tensor) -> Tensor:
    """Return a whole tensor, in the order of the mesh, in the order of files."""
    index = to_mesh(order, torch.arange(tensor.numel()).view(tensor.shape))
    ordered = torch.empty_like(tensor)
    ordered.view(-1)[index.flatten()] = tensor.flatten()
    return ordered


def all_rectangles(
    shape: Sequence[int], placements: tuple[Placement, Placement], mesh: MeshShape
) -> Iterator[tuple[dict[str, int], ShardSlice]]:
    """Yield the coordinates of each rank of one replica and the rectangle it stores.

    Replicated pieces appear once for each rank that stores them.
    """
    for z in range(mesh.z):
        for y in range(mesh.y):
            for x in range(mesh.x):
                ranks = {"z": z, "y": y, "x": x}
                yield ranks, find_rectangle(shape, placements, mesh, ranks)
