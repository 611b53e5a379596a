"""The rectangle of each full tensor that a rank stores.

    full tensor [N, K]  ->  y and x split the dimensions their placements name, like torch.chunk
                        ->  z splits dimension 0 of the result, like torch.chunk (FSDP2)

Pieces have the sizes that torch.chunk gives: the last may be smaller, or empty. FSDP2 pads each to
the size of the first. Of 8 experts, 16 ranks along z would each store one, twice as much as their
share: z splits another dimension of tensors with three or more if it does not divide the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor.placement_types import Placement, Shard

from memguard.parallel.mesh_shape import MeshShape


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSlice:
    """A rectangle of a full tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "ShardSlice":
        """Return the rectangle of a whole tensor."""
        return cls(start=(0,) * len(shape), shape=tuple(shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that select the rectangle from the full tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    @property
    def num_elements(self) -> int:
        """Number of elements of the rectangle."""
        return torch.Size(self.shape).numel()


def cut(rectangle: ShardSlice, dim: int, rank: int, degree: int) -> ShardSlice:
    """Return piece ``rank`` of ``degree`` along a dimension."""
    size = rectangle.shape[dim]
    piece = -(-size // degree)
    first = min(rank * piece, size)
    start, shape = list(rectangle.start), list(rectangle.shape)
    start[dim] += first
    shape[dim] = min(piece, size - first)
    return ShardSlice(start=tuple(start), shape=tuple(shape))


def find_storage_dim(shape: Sequence[int], degree: int) -> int:
    """Return the dimension that z splits, of a tensor that y and x have split.

    ``shape`` is that of the tensor gathered over z.
    """
    if len(shape) < 3 or shape[0] % degree == 0:
        return 0
    # FSDP2 splits other dimensions only evenly.
    others = [dim for dim in range(1, len(shape)) if shape[dim] % degree == 0]
    return max(others, key=lambda dim: shape[dim], default=0)


def find_rectangle(
    shape: Sequence[int],
    placements: tuple[Placement, Placement],
    mesh: MeshShape,
    ranks: Mapping[str, int],
    *,
    over_z: bool = True,
) -> ShardSlice:
    """Return the rectangle of a tensor that one rank stores.

    Args:
        shape: shape of the full tensor.
        placements: placements over (y, x).
        mesh: degrees of the axes.
        ranks: the rank's coordinates along ``z``, ``y`` and ``x``.
        over_z: False for the parameter gathered over z, as a forward uses it.
    """
    rectangle = ShardSlice.whole(shape)
    for axis, placement in zip(("y", "x"), placements, strict=True):
        if isinstance(placement, Shard):
            degree = mesh.degree(axis)  # type: ignore[arg-type]
            rectangle = cut(rectangle, placement.dim, ranks[axis], degree)
    if not over_z:
        return rectangle
    return cut(rectangle, find_storage_dim(rectangle.shape, mesh.z), ranks["z"], mesh.z)
