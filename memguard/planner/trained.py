"""The part of a model that a step trains on one rank, and how far its backward goes. No torch.

                               weights with gradients           adapters
    full training              all                              -
    adapter                    none                             of the layers named by its targets
    train.trainable_modules    those in modules of these names  -

Gradients, their reductions, the optimizer's moments and the update are those of this part. Backward
ends at the first block that has some of it, or at the embedding; the blocks before run forward
only, keep no activations and gather their weights once. Names with a number are those of one block,
others those of every block.

Adapters on one rank; they are replicated over data and z. The base is frozen and stored in the
precision of the run, or in NF4 (`units`).

                                          plain layer            transposed layer (o, down)
    A [R, K]    fp32, over y or x         K/y                    K/x
    B [N, R]    the same                  N/x                    N/y
    m [N]       only with DoRA            N/x                    N/y
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Literal, TypeVar

from memguard.config.adapters import matches_target
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.step_settings import LINEAR_LAYERS, AdapterSizes
from memguard.planner.units import Unit, block_unit, other_units

ValueT = TypeVar("ValueT")

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_IN_ATTENTION = LINEAR_LAYERS[:4]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedLayer:
    """A layer with an adapter on one rank."""

    name: str
    ins: int
    """In-features of this rank."""
    outs: int
    """Out-features of this rank."""
    in_axis: Literal["y", "x"]
    """The axis that shards the in-features, over which B's gradient is partial; A's is over the
    other."""

    @property
    def out_axis(self) -> Literal["y", "x"]:
        """The axis that shards the out-features."""
        return "x" if self.in_axis == "y" else "y"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedBlock:
    """What is trained of one block."""

    unit: Unit
    """Its weights; without parameters if all are frozen."""
    adapted: tuple[AdaptedLayer, ...]
    stored: int
    """Elements that this rank stores of both."""
    learns: frozenset[str]
    """Last parts of the names of modules whose weight, or adapter, has a gradient."""


@dataclass(frozen=True, kw_only=True)
class TrainedPart:
    """What a step trains."""

    blocks: tuple[TrainedBlock, ...]
    others: tuple[Unit, ...]
    """The trained weights of each unit outside the blocks, in the order of `other_units`."""
    kinds: tuple[tuple[TrainedBlock, int], ...]
    """The different blocks, and how many there are of each."""
    stored: int
    """Elements that this rank trains."""

    @cached_property
    def first(self) -> int:
        """Number of the first block that backward reaches; the number of blocks if it has none."""
        if self.has_embedding:
            return 0
        trained = (number for number, block in enumerate(self.blocks) if block.stored)
        return next(trained, len(self.blocks))

    @property
    def num_reached(self) -> int:
        """Number of blocks that backward reaches."""
        return len(self.blocks) - self.first

    @cached_property
    def stored_after(self) -> tuple[int, ...]:
        """Elements that this rank trains of block i and all later ones, for each i; then 0."""
        backwards = accumulate((block.stored for block in reversed(self.blocks)), initial=0)
        return tuple(backwards)[::-1]

    @cached_property
    def typical(self) -> TrainedBlock:
        """The block with most to train."""
        return max((block for block, _ in self.kinds), key=lambda block: block.stored)

    @cached_property
    def has_embedding(self) -> bool:
        """Whether the embedding is trained."""
        return self._has(_EMBEDDING)

    @cached_property
    def has_head(self) -> bool:
        """Whether the head is trained; tied weights are the embedding's."""
        return self._has(_HEAD) or (len(self.others) == 1 and self.has_embedding)

    def _has(self, parameter: str) -> bool:
        return any(parameter in unit.parameters for unit in self.others)


# Memory, computing and communication of each setting that is tried on a mesh have the same part.
@lru_cache(maxsize=2)
def find_trained(
    sizes: ModelSizes,
    mesh: MeshShape,
    adapter: AdapterSizes | None = None,
    modules: tuple[str, ...] | None = None,
) -> TrainedPart:
    """Return what a step trains.

    Args:
        sizes: of the model.
        mesh: one that `check_mesh` accepts.
        adapter: adapters that are trained instead of the weights; None trains weights.
        modules: see `train.trainable_modules`; None trains all weights.
    """
    block = block_unit(sizes, mesh)
    names = modules if adapter is None else adapter.targets

    def is_trained(prefix: str, parameter: str) -> bool:
        path = f".{prefix}{parameter}"
        is_named = modules is None or any(f".{name}." in path for name in modules)
        return adapter is None and is_named

    def find(number: int) -> TrainedBlock:
        if adapter is None:
            unit = block.only(partial(is_trained, f"model.layers.{number}."))
            names = (name.rpartition(".") for name in unit.parameters)
            learns = frozenset(path.split(".")[-1] for path, _, leaf in names if leaf == "weight")
            return TrainedBlock(unit=unit, adapted=(), stored=unit.stored, learns=learns)
        adapted = tuple(list_adapted(sizes, mesh, adapter, number))
        stored = count_adapted(adapter, adapted)
        return TrainedBlock(
            unit=block.only(lambda _: False),
            adapted=adapted,
            stored=stored,
            learns=frozenset(layer.name for layer in adapted),
        )

    blocks = for_each_block(names or (), sizes.num_layers, find)
    others = tuple(unit.only(partial(is_trained, "")) for unit in other_units(sizes, mesh))
    counts = Counter(map(id, blocks))
    kinds = tuple((block, counts.pop(id(block))) for block in blocks if id(block) in counts)
    stored = sum(count * block.stored for block, count in kinds)
    return TrainedPart(
        blocks=tuple(blocks),
        others=others,
        kinds=kinds,
        stored=stored + sum(unit.stored for unit in others),
    )


def for_each_block(
    names: Sequence[str], num_blocks: int, compute: Callable[[int], ValueT]
) -> list[ValueT]:
    """Return a value for each block, computed once for all blocks that no name has the number of.

    Args:
        names: of modules; parts that are numbers select a block.
        num_blocks: of the model.
        compute: returns the value of the block with this number.
    """
    numbers = {int(part) for name in names for part in name.split(".") if part.isdigit()}
    rest = [number for number in range(num_blocks) if number not in numbers]
    shared = [compute(rest[0])] if rest else []
    return [compute(number) if number in numbers else shared[0] for number in range(num_blocks)]


def list_adapted(
    sizes: ModelSizes, mesh: MeshShape, adapter: AdapterSizes, block: int
) -> list[AdaptedLayer]:
    """Return the layers of a block, by its number, that have an adapter."""
    features, width = sizes.hidden_size // mesh.y, sizes.intermediate_size // mesh.x
    queries = sizes.num_heads * sizes.head_dim // mesh.x
    keys = sizes.num_kv_heads * sizes.head_dim // mesh.x
    plain = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": width}
    plain["up_proj"] = width
    transposed = {"o_proj": queries, "down_proj": width}
    layers = []
    for name in LINEAR_LAYERS:
        module = "self_attn" if name in _IN_ATTENTION else "mlp"
        if not matches_target(f"model.layers.{block}.{module}.{name}", adapter.targets):
            continue
        if name in plain:
            layer = AdaptedLayer(name=name, ins=features, outs=plain[name], in_axis="y")
        else:
            layer = AdaptedLayer(name=name, ins=transposed[name], outs=features, in_axis="x")
        layers.append(layer)
    return layers


def count_adapted(adapter: AdapterSizes, layers: Iterable[AdaptedLayer]) -> int:
    """Return the elements of the adapters of some layers that one rank stores."""
    per_feature = adapter.r + (1 if adapter.use_dora else 0)
    return sum(adapter.r * layer.ins + per_feature * layer.outs for layer in layers)
