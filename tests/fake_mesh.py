"""One rank of a mesh of any size, without the others: nothing is sent, and nothing waits."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from memguard.parallel.mesh import Mesh4D, build_mesh
from memguard.parallel.mesh_shape import MeshShape


@contextmanager
def fake_mesh(shape: MeshShape, rank: int = 0) -> Iterator[Mesh4D]:
    """Be one rank of a mesh; to be called on a rank of the fixture `ranks`, whose group it ends."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=shape.num_ranks, store=FakeStore())
    yield build_mesh(shape, "cpu")
