"""Validation of the mesh in the settings against the model, and search for the nearest valid mesh.

    ranks = data x z x y x x     one degree may be -1 and is then computed from the others

Each degree splits, and so must divide:

    data x z   rows of an optimizer step                        batch_size
    y          residual stream: in-features of q, k, v, gate,   hidden_size
               up and the head, out-features of o and down
    x          heads and FFN width                              num_heads, intermediate_size
    y x        width of experts                                 expert_width, in multiples of
                                                                expert_unit
    y x        width of shared experts                          shared_expert_width
    y, x, y x  blocks of 64 that adamw_8bit quantises           the widths of matrices / 64
    x          key/value heads: whole heads per rank, or        num_kv_heads % x == 0, or
               equal parts of one head, gathered over           x % num_kv_heads == 0 and
               x/num_kv_heads ranks in forward                  num_kv_heads * head_dim % x == 0

Weights stored over z and the vocabulary over x may be split unevenly; every rank must have a part
of the vocabulary. A model whose layers cannot be split (`StorageOnly`) has y = x = 1. These checks
run before any process group exists and do not import torch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from memguard.config import AxisName, ParallelConfig
from memguard.errors import ConfigError
from memguard.parallel.model_sizes import ModelSizes, Sizes, StorageOnly

AXES: tuple[AxisName, ...] = ("data", "z", "y", "x")
_SPLIT: tuple[AxisName, ...] = ("y", "x")
_NUM_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A condition that the product of some degrees must satisfy."""

    axes: tuple[AxisName, ...]
    text: str
    """The predicate of a sentence about the axes."""
    holds: Callable[[int], bool]


def must_divide(axes: tuple[AxisName, ...], size: int, what: str) -> Rule:
    """Return the rule that the product of the axes' degrees divides a size."""
    return Rule(axes=axes, text=f"must divide {what}", holds=lambda degree: size % degree == 0)


def build_rules(sizes: Sizes | None, batch_size: int | None) -> list[Rule]:
    """Return the rules for a model and for the rows of a step; None adds no rules."""
    rules = []
    if batch_size is not None:
        rules.append(
            must_divide(("data", "z"), batch_size, f"'train.batch_size', {batch_size} rows")
        )
    if sizes is None:
        return rules
    if isinstance(sizes, StorageOnly):
        text = f"must be 1: layers of '{sizes.family}' are not split, only data and z are used"
        single = [
            Rule(axes=(axis,), text=text, holds=lambda degree: degree == 1) for axis in _SPLIT
        ]
        return [*rules, *single]
    heads, kv_heads = sizes.num_heads, sizes.num_kv_heads
    kv_features, vocab_size = kv_heads * sizes.head_dim, sizes.vocab_size
    hidden = sizes.hidden_size
    return [
        *rules,
        must_divide(("y",), hidden, f"the model's hidden size of {hidden}"),
        must_divide(("x",), heads, f"the model's {heads} attention heads"),
        Rule(
            axes=("x",),
            text=f"must divide the model's {kv_heads} key/value heads or be a multiple of them",
            holds=lambda x: kv_heads % x == 0 or x % kv_heads == 0,
        ),
        Rule(
            axes=("x",),
            text=f"above the number of key/value heads must divide their {kv_features} features",
            holds=lambda x: x <= kv_heads or kv_features % x == 0,
        ),
        *_build_width_rules(sizes),
        *_build_block_rules(sizes),
        Rule(
            axes=("x",),
            text=f"must leave every rank some of the model's {vocab_size} vocabulary entries",
            # FSDP2 does not reduce a gradient without elements.
            holds=lambda x: (x - 1) * math.ceil(vocab_size / x) < vocab_size,
        ),
    ]


def allows(rules: list[Rule], axes: tuple[AxisName, ...], degree: int) -> bool:
    """Return whether the rules for exactly these axes hold for the product of their degrees."""
    return all(rule.holds(degree) for rule in rules if rule.axes == axes)


def find_broken(
    degrees: Mapping[AxisName, int], rules: list[Rule], *, rest: AxisName | None = None
) -> list[str]:
    """Describe each broken rule: the condition and the given degrees.

    Rules for axes without a degree are not checked; that of ``rest`` was -1 and has been computed.
    """
    problems = []
    for rule in rules:
        given = {axis: degrees[axis] for axis in rule.axes if axis in degrees}
        if len(given) == len(rule.axes) and not rule.holds(math.prod(given.values())):
            origin = f" ('parallel.{rest}' is -1, the rest of the ranks)" if rest in given else ""
            problems.append(
                f"{format_axes(given)} {rule.text}; got {format_product(given)}{origin}"
            )
    return problems


def format_axes(degrees: Mapping[AxisName, int]) -> str:
    """Format axes as setting names: ``'parallel.data' × 'parallel.z'``."""
    return " × ".join(f"'parallel.{axis}'" for axis in degrees)


def format_product(degrees: Mapping[AxisName, int]) -> str:
    """Format degrees with their product: ``3 × 2 = 6``."""
    factors = " × ".join(map(str, degrees.values()))
    return factors if len(degrees) == 1 else f"{factors} = {math.prod(degrees.values())}"


def _build_width_rules(sizes: ModelSizes) -> list[Rule]:
    """Return the rules for widths of FFNs and experts."""
    rules = []
    width, unit = sizes.expert_width, sizes.expert_unit
    if width is None or width != sizes.intermediate_size:
        what = f"the model's FFN width of {sizes.intermediate_size}"
        rules.append(must_divide(("x",), sizes.intermediate_size, what))
    if width is not None:
        text = f"must split the experts' FFN width of {width} into multiples of {unit}"

        def holds(degree: int) -> bool:
            return degree == 1 or width % (degree * unit) == 0

        rules.append(Rule(axes=_SPLIT, text=text, holds=holds))
    if sizes.shared_expert_width:
        what = f"the shared experts' FFN width of {sizes.shared_expert_width}"
        rules.append(must_divide(_SPLIT, sizes.shared_expert_width, what))
    return rules


def _build_block_rules(sizes: ModelSizes) -> list[Rule]:
    """Return the rules for the last dimensions of matrices, of which blocks must not be cut."""
    block, widths = sizes.block, (sizes.num_heads * sizes.head_dim, sizes.intermediate_size)
    cut: list[tuple[tuple[AxisName, ...], int]] = [(("x",), width) for width in widths]
    cut += [(_SPLIT, sizes.expert_width or 1), (_SPLIT, sizes.shared_expert_width or 1)]
    what = f"blocks of {block} columns that adamw_8bit quantises"
    return [
        must_divide(axes, width // block, f"the {width // block} {what}")
        for axes, width in [(("y",), sizes.hidden_size), *cut]
        if block > 1 and width % block == 0
    ]


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
        """Number of ranks of the whole mesh."""
        return self.data * self.z * self.y * self.x

    @property
    def num_batch_ways(self) -> int:
        """Number of parts into which the rows of a step are split."""
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
    sizes: Sizes | None = None,
    *,
    batch_size: int | None = None,
) -> MeshShape:
    """Replace ``-1`` by a degree and check the mesh by every rule that the arguments allow.

    Without ``sizes`` that is only the number of ranks; without ``batch_size`` not the rows of a
    step.

    Raises:
        ConfigError: every broken rule, then the nearest meshes that work.
    """
    rest = next((axis for axis in AXES if getattr(config, axis) == -1), None)
    fixed = {axis: getattr(config, axis) for axis in AXES if axis != rest}
    num_fixed = math.prod(fixed.values())
    rules = build_rules(sizes, batch_size)
    # The smallest number of ranks, from world_size upwards, that the fixed degrees divide.
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
        way_out += f"; the requested degrees fit {fitting} ranks (--nproc {fitting})"
    raise ConfigError(*problems, way_out)


def check_mesh(shape: MeshShape, sizes: ModelSizes, *, batch_size: int | None = None) -> None:
    """Check that ``shape`` splits a model, and the rows of a step if given, without a remainder.

    Raises:
        ConfigError: every broken rule, then the nearest meshes that work.
    """
    degrees = {axis: shape.degree(axis) for axis in AXES}
    problems = find_broken(degrees, build_rules(sizes, batch_size))
    if problems:
        raise ConfigError(*problems, _describe_way_out(shape, shape.num_ranks, sizes, batch_size))


def list_meshes(
    world_size: int,
    sizes: Sizes | None,
    *,
    batch_size: int | None = None,
    order: tuple[AxisName, ...] = AXES,
) -> list[MeshShape]:
    """Return every valid mesh of ``world_size`` ranks, in a deterministic order."""
    rules = build_rules(sizes, batch_size)
    return [
        MeshShape(data=ways // z, z=z, y=y, x=world_size // (ways * y), order=order)
        for ways in _divisors(world_size)
        if allows(rules, ("data", "z"), ways)
        for y in _divisors(world_size // ways)
        if allows(rules, ("y",), y) and allows(rules, ("x",), world_size // (ways * y))
        if allows(rules, ("y", "x"), world_size // ways)
        for z in _divisors(ways)
    ]


def nearest_meshes(
    requested: ParallelConfig | MeshShape,
    world_size: int,
    sizes: Sizes | None,
    *,
    batch_size: int | None = None,
) -> list[MeshShape]:
    """Return the meshes of `list_meshes`, those nearest to ``requested`` first.

    A mesh is nearer if it changes fewer of the requested degrees (``-1`` requests none), then if it
    changes them by smaller factors. Ties prefer a mesh that keeps y, then x, then z.
    """

    def distance(shape: MeshShape) -> tuple[int, Fraction, list[Fraction]]:
        axes: tuple[AxisName, ...] = ("y", "x", "z", "data")
        pairs = [(getattr(requested, axis), shape.degree(axis)) for axis in axes]
        factors = [Fraction(max(a, b), min(a, b)) for a, b in pairs if a != -1]
        # The exact product: with sums of logarithms, rounding errors would decide ties.
        num_changed = sum(factor != 1 for factor in factors)
        return num_changed, math.prod(factors, start=Fraction(1)), factors

    return sorted(
        list_meshes(world_size, sizes, batch_size=batch_size, order=requested.order), key=distance
    )


def nearest_world_sizes(world_size: int, sizes: Sizes, *, batch_size: int) -> list[int]:
    """Return the numbers of ranks that have a valid mesh, those nearest to ``world_size`` first."""
    rules = build_rules(sizes, batch_size)
    hidden, heads = (1, 1)
    if isinstance(sizes, ModelSizes):
        hidden, heads = sizes.hidden_size, sizes.num_heads
    possible = {
        ways * y * x
        for y in _divisors(hidden)
        for x in _divisors(heads)
        if allows(rules, ("x",), x) and allows(rules, ("y", "x"), y * x)
        for ways in _divisors(batch_size)
    }
    return sorted(possible, key=lambda num_ranks: (abs(num_ranks - world_size), num_ranks))


def _describe_way_out(
    requested: ParallelConfig | MeshShape,
    world_size: int,
    sizes: Sizes | None,
    batch_size: int | None,
) -> str:
    """List the nearest valid meshes, or other settings to change if there is none."""
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    nearest = nearest_meshes(requested, world_size, sizes, batch_size=batch_size)[:_NUM_SHOWN]
    if nearest:
        return f"meshes that work on {ranks}, nearest first: {', '.join(map(str, nearest))}"
    assert sizes is not None, "without a model, y takes any number of ranks"
    assert batch_size is not None, "without a batch, data takes any number of ranks"
    others = nearest_world_sizes(world_size, sizes, batch_size=batch_size)[:_NUM_SHOWN]
    return (
        f"no mesh works on {ranks}: choose another 'train.batch_size', or start a number of ranks "
        f"that has one, nearest first: {', '.join(map(str, others))}"
    )


def _divisors(number: int) -> list[int]:
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*low, *(number // divisor for divisor in low)})
