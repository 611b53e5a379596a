"""Meshes of ranks that remain for several calls."""

import functools

from memguard.parallel.mesh import Mesh4D, build_mesh
from memguard.parallel.mesh_shape import MeshShape


@functools.cache
def mesh_of(shape: MeshShape, device_type: str = "cpu") -> Mesh4D:
    """Return a mesh of this rank; each that is built has process groups and threads of its own."""
    return build_mesh(shape, device_type)
