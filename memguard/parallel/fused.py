"""The order of features in parameters that are several projections side by side.

transformers' code cuts the output of such a layer (q|k|v, gate|up) into its parts. Each rank along
x needs an equal share of every part, so a mesh stores the features in another order than files and
one process do:

    file                   q0 q1 q2 q3 k0 k1 v0 v1                 4 query heads, 2 key/value heads
    mesh, x = 2            q0 q1 k0 v0 | q2 q3 k1 v1
    mesh, x = 4            q0 k0' v0' | q1 k0" v0" | q2 k1' v1' | q3 k1" v1"

k0' and k0" are halves of one head, which ranks gather in forward as those of any key/value head.
Falcon's layers repeat q..q|k|v for each key/value head: then x, up to their number, cuts between
groups, which keeps the order of the file. Gate and up of experts are cut by y and x together.

A parameter has the same name and shape in both orders. `Parts.order` lists the runs of the file in
the mesh's order; whatever reads or writes files (weights, export, adapters, checkpoints) translates
rectangles with it. One layer remains one parameter, one matmul and one collective.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from memguard.parallel.layout import ShardSlice


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A rectangle that is contiguous in both orders."""

    mesh: ShardSlice
    """Its place in the rectangle that was split."""
    file: ShardSlice
    """Its place in the tensor as files store it."""


@dataclass(frozen=True, slots=True)
class FeatureOrder:
    """How one dimension of a parameter is ordered on a mesh."""

    dim: int
    runs: tuple[tuple[int, int], ...]
    """Start in the file and length of each run of features, in the mesh's order."""

    def split(self, rectangle: ShardSlice) -> Iterator[Piece]:
        """Yield the pieces of a rectangle of the tensor in the mesh's order."""
        begin = rectangle.start[self.dim]
        end = begin + rectangle.shape[self.dim]
        origin = ShardSlice.whole(rectangle.shape)
        place = 0
        for start, size in self.runs:
            first, num = max(begin, place), min(end, place + size) - max(begin, place)
            if num > 0:
                yield Piece(
                    mesh=_replace(origin, self.dim, first - begin, num),
                    file=_replace(rectangle, self.dim, start + first - place, num),
                )
            place += size


def _replace(rectangle: ShardSlice, dim: int, start: int, size: int) -> ShardSlice:
    """Return a rectangle with another extent along one dimension."""
    starts, shape = list(rectangle.start), list(rectangle.shape)
    starts[dim], shape[dim] = start, size
    return ShardSlice(start=tuple(starts), shape=tuple(shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts of the output of one layer."""

    sizes: tuple[int, ...]
    """Features of each part of one group."""
    num_groups: int = 1
    """How often the parts repeat."""
    key_value: tuple[int, ...] = ()
    """Numbers of the parts that are keys or values."""

    def local_sizes(self, degree: int) -> tuple[int, ...]:
        """Return the features of each part on one of the ranks, if ranks share a group."""
        return tuple(size // (degree // self.num_groups) for size in self.sizes)

    def order(self, degree: int, dim: int) -> FeatureOrder | None:
        """Return the order along ``dim``, that of the out-features; None if it is the file's.

        ``degree`` ranks share the parts; `mesh_shape` has checked that the shares are equal.
        """
        if self.num_groups % degree == 0:
            return None
        runs = []
        for group in range(self.num_groups):
            for rank in range(degree // self.num_groups):
                start = group * sum(self.sizes)
                for size, local in zip(self.sizes, self.local_sizes(degree), strict=True):
                    runs.append((start + rank * local, local))
                    start += size
        return FeatureOrder(dim, tuple(runs))


def find_orders(model: nn.Module) -> dict[str, FeatureOrder]:
    """Return the parameters that a mesh stores in another order than files, by name.

    Modules with such parameters have a method ``find_order``.
    """
    orders = {}
    for name, module in model.named_modules():
        find_order: Callable[[str], FeatureOrder | None] | None
        find_order = getattr(module, "find_order", None)
        if find_order is not None:
            for leaf, _ in module.named_parameters():
                order = find_order(leaf)
                if order is not None:
                    orders[f"{name}.{leaf}"] = order
    return orders
