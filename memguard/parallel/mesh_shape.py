"""Which mesh runs: asked for, checked against the model, or the nearest that would do.

    ranks = data x z x y x x     one degree may be left open and takes the rest

All of it is arithmetic, done before any process group and without torch; what each degree must
divide is in mesh_rules.py.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from memguard.config import AxisName as AxisName
from memguard.config import ParallelConfig
from memguard.errors import ConfigError
from memguard.parallel.mesh_rules import ModelSizes as ModelSizes
from memguard.parallel.mesh_rules import (
    allows,
    build_rules,
    find_broken,
    format_axes,
    format_product,
)

AXES: tuple[AxisName, ...] = ("data", "z", "y", "x")

_NUM_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """The degree of each axis, and how ranks are laid out along them."""

    data: int = 1
    z: int = 1
    y: int = 1
    x: int = 1
    order: tuple[AxisName, ...] = AXES
    """Axes from slowest to fastest: consecutive ranks are neighbours along the last."""

    def __post_init__(self) -> None:
        assert min(self.data, self.z, self.y, self.x) >= 1, "a degree is 1 or more"
        assert sorted(self.order) == sorted(AXES), "the order names each axis once"

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return self.data * self.z * self.y * self.x

    @property
    def num_batch_ways(self) -> int:
        """Parts into which the rows of a step are split."""
        return self.data * self.z

    def degree(self, axis: AxisName) -> int:
        """Return the number of ranks along ``axis``."""
        degree: int = getattr(self, axis)
        return degree

    def __str__(self) -> str:
        return f"({', '.join(f'{axis}={self.degree(axis)}' for axis in AXES)})"


def resolve_mesh(
    config: ParallelConfig,
    world_size: int,
    sizes: ModelSizes | None = None,
    *,
    batch_size: int | None = None,
) -> MeshShape:
    """Fill in the ``-1`` and check the mesh by every rule that the arguments allow.

    Args:
        config: what was asked.
        world_size: ranks that run.
        sizes: of the model; None checks the number of ranks alone.
        batch_size: rows of an optimizer step; None leaves that rule out.

    Raises:
        ConfigError: every broken rule, then the nearest meshes that work.
    """
    rest = next((axis for axis in AXES if _asked(config, axis) == -1), None)
    fixed = {axis: _asked(config, axis) for axis in AXES if axis != rest}
    num_fixed = math.prod(fixed.values())
    rules = build_rules(sizes, batch_size)
    # The number of ranks, from this one upwards, for which the open degree comes out whole.
    fitting = num_fixed if rest is None else math.ceil(world_size / num_fixed) * num_fixed
    degrees = fixed if rest is None else {**fixed, rest: fitting // num_fixed}
    if fitting == world_size:
        problems = find_broken(degrees, rules, rest=rest)
        if not problems:
            return MeshShape(**degrees, order=config.order)
    else:
        must = (
            f"be the number of ranks started, {world_size}"
            if rest is None
            else f"divide the number of ranks started, {world_size}, because 'parallel.{rest}' is "
            "-1, the rest of them"
        )
        problems = [f"{format_axes(fixed)} must {must}; got {format_product(fixed)}"]
        problems += find_broken(fixed, rules)
    way_out = _describe_way_out(config, world_size, sizes, batch_size)
    if fitting != world_size and not find_broken(degrees, rules):
        way_out += f"; what was asked fits {fitting} ranks (--nproc {fitting})"
    raise ConfigError(*problems, way_out)


def check_mesh(shape: MeshShape, sizes: ModelSizes, *, batch_size: int | None = None) -> None:
    """Check that ``shape`` splits a model, and the rows of a step, without a remainder.

    Args:
        shape: the mesh.
        sizes: of the model.
        batch_size: rows of an optimizer step; None leaves that rule out.

    Raises:
        ConfigError: every broken rule, then the nearest meshes that work.
    """
    degrees = {axis: shape.degree(axis) for axis in AXES}
    problems = find_broken(degrees, build_rules(sizes, batch_size))
    if problems:
        raise ConfigError(*problems, _describe_way_out(shape, shape.num_ranks, sizes, batch_size))


def list_meshes(
    world_size: int,
    sizes: ModelSizes | None,
    *,
    batch_size: int | None = None,
    order: tuple[AxisName, ...] = AXES,
) -> list[MeshShape]:
    """Return every mesh of ``world_size`` ranks that breaks no rule, always in the same order."""
    rules = build_rules(sizes, batch_size)
    return [
        MeshShape(data=ways // z, z=z, y=y, x=world_size // (ways * y), order=order)
        for ways in _divisors(world_size)
        if allows(rules, ("data", "z"), ways)
        for y in _divisors(world_size // ways)
        if allows(rules, ("y",), y) and allows(rules, ("x",), world_size // (ways * y))
        for z in _divisors(ways)
    ]


def nearest_meshes(
    asked: ParallelConfig | MeshShape,
    world_size: int,
    sizes: ModelSizes | None,
    *,
    batch_size: int | None = None,
) -> list[MeshShape]:
    """Return the meshes of `list_meshes`, those nearest to ``asked`` first.

    Near is a mesh that changes few of the degrees asked for (``-1`` asks for none), then one that
    changes them by small factors; between equals, one that leaves y, then x, then z as it is.
    """

    def distance(shape: MeshShape) -> tuple[int, Fraction, list[Fraction]]:
        pairs = [(_asked(asked, axis), shape.degree(axis)) for axis in ("y", "x", "z", "data")]
        factors = [Fraction(max(a, b), min(a, b)) for a, b in pairs if a != -1]
        # The exact product, because rounding would decide between equal sums of logarithms.
        return sum(each != 1 for each in factors), math.prod(factors, start=Fraction(1)), factors

    return sorted(
        list_meshes(world_size, sizes, batch_size=batch_size, order=asked.order), key=distance
    )


def nearest_world_sizes(world_size: int, sizes: ModelSizes, *, batch_size: int) -> list[int]:
    """Return the numbers of ranks that have a mesh, those nearest to ``world_size`` first."""
    rules = build_rules(sizes, batch_size)
    possible = {
        ways * y * x
        for y in _divisors(sizes.hidden_size)
        for x in _divisors(sizes.num_heads)
        if allows(rules, ("x",), x)
        for ways in _divisors(batch_size)
    }
    return sorted(possible, key=lambda num_ranks: (abs(num_ranks - world_size), num_ranks))


def _describe_way_out(
    asked: ParallelConfig | MeshShape,
    world_size: int,
    sizes: ModelSizes | None,
    batch_size: int | None,
) -> str:
    """List the nearest meshes, or what else to change where there is none."""
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    nearest = nearest_meshes(asked, world_size, sizes, batch_size=batch_size)[:_NUM_SHOWN]
    if nearest:
        return f"meshes that work on {ranks}, nearest first: {', '.join(map(str, nearest))}"
    assert sizes is not None, "without a model, y takes any number of ranks"
    assert batch_size is not None, "without a batch, data takes any number of ranks"
    others = nearest_world_sizes(world_size, sizes, batch_size=batch_size)[:_NUM_SHOWN]
    return (
        f"no mesh works on {ranks}: choose another 'train.batch_size', or start a number of ranks "
        f"that has one, nearest first: {', '.join(map(str, others))}"
    )


def _asked(asked: ParallelConfig | MeshShape, axis: AxisName) -> int:
    degree: int = getattr(asked, axis)
    return degree


def _divisors(number: int) -> list[int]:
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*low, *(number // divisor for divisor in low)})
