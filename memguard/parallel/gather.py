"""Puts a sharded tensor together on one rank, without a copy of the model anywhere.

    shard [N/(y z), K/x]   of each rank of data replica 0, cast, on the CPU
    full  [N, K]           on one rank: each rectangle is received from the first rank that has it

Point-to-point over the default group, whose CPU side is gloo; other replicas do not take part.
"""

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor.placement_types import Placement

from memguard.parallel.linear import to_local
from memguard.parallel.mesh import Mesh4D
from memguard.parallel.rectangles import Rectangle, all_rectangles


def list_replica_ranks(mesh: Mesh4D) -> list[int]:
    """Return the ranks of data replica 0, x fastest: together they hold the model once."""
    ranks: list[int] = mesh.device_mesh.mesh[0].flatten().tolist()
    return ranks


def gather_tensor(
    source: Tensor,
    placements: tuple[Placement, Placement],
    mesh: Mesh4D,
    *,
    dtype: torch.dtype,
    to_rank: int,
) -> Tensor | None:
    """Return the whole tensor, on the CPU, on one rank; None on the others.

    All ranks of data replica 0 call this in the same order.

    Args:
        source: a parameter whose shards are not gathered.
        placements: over (y, x).
        mesh: the ranks.
        dtype: of the result; shards are cast before they are sent.
        to_rank: one of `list_replica_ranks`.
    """
    rank = dist.get_rank()
    local = to_local(source.detach()).to("cpu", dtype)
    shape = tuple(source.shape)
    owners = _find_owners(shape, placements, mesh)
    if rank != to_rank:
        if rank in owners.values():
            dist.send(local.contiguous(), to_rank)
        return None
    full = torch.empty(shape, dtype=dtype)
    for rectangle, owner in owners.items():
        target = full[rectangle.slices]
        if owner == rank:
            target.copy_(local)
        elif target.is_contiguous():
            dist.recv(target, owner)
        else:
            piece = torch.empty(rectangle.shape, dtype=dtype)
            dist.recv(piece, owner)
            target.copy_(piece)
    return full


def _find_owners(
    shape: tuple[int, ...], placements: tuple[Placement, Placement], mesh: Mesh4D
) -> dict[Rectangle, int]:
    """Return the rectangles that make up a tensor and the first rank that stores each."""
    owners: dict[Rectangle, int] = {}
    stored = all_rectangles(shape, placements, mesh.shape)
    for rank, (_, rectangle) in zip(list_replica_ranks(mesh), stored, strict=True):
        if rectangle.num_elements:
            owners.setdefault(rectangle, rank)
    return owners
