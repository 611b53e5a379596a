"""A sharded tensor on any one rank: put together from pieces, each taken from one rank."""

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from memguard.hf.export import gather_tensor, list_replica_ranks
from memguard.parallel.layout import find_rectangle
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import AxisName, MeshShape

# Matrices and vectors; 7 and 5 are multiples of nothing, 1 leaves most ranks without a piece.
CASES: list[tuple[tuple[int, ...], Any]] = [
    ((7, 5), (Shard(1), Shard(0))),
    ((7, 5), (Shard(0), Shard(1))),
    ((1, 4), (Shard(1), Shard(0))),
    ((7,), (Shard(0), Replicate())),
    ((5,), (Replicate(), Replicate())),
]


def gather_everywhere(degrees: Any, order: tuple[AxisName, ...], dtype: torch.dtype) -> list[str]:
    """On a rank: gather each case on each rank in turn; return what is wrong."""
    names = ("data", "z", "y", "x")
    shape = MeshShape(**dict(zip(names, degrees, strict=True)), order=order)
    mesh = build_mesh(shape, "cpu")
    ranks = list_replica_ranks(mesh)
    wrong = [] if len(ranks) == shape.z * shape.y * shape.x else [f"replica is {ranks}"]
    if (dist.get_rank() in ranks) != (mesh.axis("data").rank == 0):
        wrong.append("not the first replica")
    if dist.get_rank() not in ranks:
        return wrong
    here = {axis: mesh.axis(axis).rank for axis in ("z", "y", "x")}  # type: ignore[arg-type]
    for size, placements in CASES:
        full = torch.randn(size, generator=torch.Generator().manual_seed(0))
        local = full[find_rectangle(size, placements, shape, here).slices].clone()
        source = to_dtensor(local, size, placements, mesh)
        for to_rank in ranks:
            found = gather_tensor(source, placements, mesh, dtype=dtype, to_rank=to_rank)
            if dist.get_rank() != to_rank:
                if found is not None:
                    wrong.append(f"{size} on another rank than {to_rank}")
            elif found is None or found.dtype != dtype or not torch.equal(found, full.to(dtype)):
                wrong.append(f"{size} {placements} to {to_rank}")
    return wrong


def to_dtensor(local: Any, size: Any, placements: Any, mesh: Any) -> Any:
    stride = torch.empty(size).stride()
    # Only its local piece and the shape of the whole are read.
    return DTensor.from_local(
        local, mesh.tensor_mesh, placements, run_check=False, shape=size, stride=stride
    )


@pytest.mark.parametrize(
    ("degrees", "order"),
    [
        ((1, 2, 2, 2), ("data", "z", "y", "x")),
        ((2, 1, 2, 2), ("x", "y", "data", "z")),
        ((1, 1, 1, 1), ("data", "z", "y", "x")),
    ],
)
def test_a_tensor_is_put_together_on_any_rank(ranks: Any, degrees: Any, order: Any) -> None:
    num_ranks = torch.Size(degrees).numel()
    for dtype in (torch.float32, torch.bfloat16):
        assert ranks(gather_everywhere, num_ranks, degrees, order, dtype) == [[]] * num_ranks
