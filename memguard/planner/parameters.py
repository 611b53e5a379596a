"""Parameters of one rank: how they are stored, and which of them a step trains. No torch.

Units of storage are parameters that FSDP2 gathers and reduces together: a decoder block, the
embedding, the head, the last norm (tied weights: the last three together). Each parameter has the
rows and row length that it has over y and x, and is cut along its rows over z, the last pieces
padded to the first's size. A weight in NF4 (`parallel.nf4`) is stored as blocks of 64 weights, 36
bytes each, which are cut over z instead of its rows.

                               weights with gradients           adapters
    full training              all                              -
    adapter                    none                             of the layers named by its targets
    train.trainable_modules    those in modules of these names  -

Gradients, their reductions, the optimizer's moments and the update are those of this part. Backward
ends at the first block that has some of it, or at the embedding; the blocks before run forward
only, keep no activations and gather their weights once. Names with a number are those of one block,
others those of every block.

Adapters on one rank; they are replicated over data and z. The base is frozen and stored in the
precision of the run, or in NF4.

                                          plain layer            transposed layer (o, down)
    A [R, K]    fp32, over y or x         K/y                    K/x
    B [N, R]    the same                  N/x                    N/y
    m [N]       only with DoRA            N/x                    N/y
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Literal, TypeVar

from memguard.config.adapters import matches_target
from memguard.config.optimizers import OptimizerFacts, is_quantised
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.step_settings import AdapterSizes

ValueT = TypeVar("ValueT")

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
NF4_BLOCK, NF4_BLOCK_BYTES = 64, 36
"""Weights with a common scale in NF4, and the bytes of their 4-bit indices and their scale."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The parameters of one unit of storage on one rank."""

    name: str
    shapes: tuple[tuple[int, int], ...]
    """Rows and row length of each parameter, over y and x."""
    z: int
    parameters: tuple[str, ...] = ()
    """Their names; of a block's, without those of the block."""
    nf4_blocks: tuple[int, ...] = ()
    """Blocks of each weight in NF4; these weights are not in ``shapes``."""

    @cached_property
    def stored(self) -> int:
        """Elements that this rank stores, padding included, without weights in NF4."""
        return sum(-(-rows // self.z) * length for rows, length in self.shapes)

    @property
    def gathered(self) -> int:
        """Elements once gathered over z, padding included, without weights in NF4."""
        return self.stored * self.z

    def stored_bytes(self, element_bytes: int) -> int:
        """Return what this rank stores (bytes)."""
        pieces = sum(-(-blocks // self.z) for blocks in self.nf4_blocks)
        return self.stored * element_bytes + NF4_BLOCK_BYTES * pieces

    def gathered_bytes(self, element_bytes: int) -> int:
        """Return the size once gathered over z (bytes)."""
        return self.z * self.stored_bytes(element_bytes)

    def only(self, is_chosen: Callable[[str], bool]) -> "Unit":
        """Return the unit with some of its parameters, by their names."""
        pairs = zip(self.parameters, self.shapes, strict=True)
        kept = [(name, shape) for name, shape in pairs if is_chosen(name)]
        names, shapes = (tuple(pair[i] for pair in kept) for i in (0, 1))
        return replace(self, parameters=names, shapes=shapes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSizes:
    """Sizes of a model on one rank."""

    features: int
    """Of the residual stream, over y."""
    queries: int
    """Features of the queries of its heads, over x."""
    keys: int
    """Features of its keys, over x; part of a head if several ranks share one."""
    width: int
    """Of the MLP, over x."""
    vocab: int
    """Rows of the embedding, over x; the largest rank's."""

    @classmethod
    def of(cls, sizes: ModelSizes, mesh: MeshShape) -> "RankSizes":
        """Return the sizes on a mesh that `check_mesh` accepts."""
        return cls(
            features=sizes.hidden_size // mesh.y,
            queries=sizes.num_heads * sizes.head_dim // mesh.x,
            keys=sizes.num_kv_heads * sizes.head_dim // mesh.x,
            width=sizes.intermediate_size // mesh.x,
            vocab=-(-sizes.vocab_size // mesh.x),
        )

    def list_linear(self) -> dict[str, tuple[int, int]]:
        """Return out- and in-features of each linear layer of a block."""
        return {
            "self_attn.q_proj": (self.queries, self.features),
            "self_attn.k_proj": (self.keys, self.features),
            "self_attn.v_proj": (self.keys, self.features),
            "self_attn.o_proj": (self.features, self.queries),
            "mlp.gate_proj": (self.width, self.features),
            "mlp.up_proj": (self.width, self.features),
            "mlp.down_proj": (self.features, self.width),
        }


def block_unit(sizes: ModelSizes, mesh: MeshShape, *, is_nf4: bool = False) -> Unit:
    """Return the unit that each decoder block is; ``is_nf4``: its linear layers are in NF4."""
    rank = RankSizes.of(sizes, mesh)
    features, matrices = rank.features, rank.list_linear()
    vectors = {"input_layernorm.weight": features, "post_attention_layernorm.weight": features}
    if sizes.has_qkv_bias:
        names = ("q_proj", "k_proj", "v_proj")
        vectors |= {f"self_attn.{name}.bias": matrices[f"self_attn.{name}"][0] for name in names}
    if sizes.has_output_bias:
        vectors["self_attn.o_proj.bias"] = features
    if sizes.has_mlp_bias:
        names = ("gate_proj", "up_proj", "down_proj")
        vectors |= {f"mlp.{name}.bias": matrices[f"mlp.{name}"][0] for name in names}
    if sizes.has_head_norms:
        vectors |= dict.fromkeys(
            ("self_attn.q_norm.weight", "self_attn.k_norm.weight"), sizes.head_dim
        )
    shapes = {} if is_nf4 else {f"{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {name: (length, 1) for name, length in vectors.items()}
    weights = [rows * length for rows, length in matrices.values()] if is_nf4 else []
    return Unit(
        name="a block",
        shapes=tuple(shapes.values()),
        z=mesh.z,
        parameters=tuple(shapes),
        nf4_blocks=tuple(-(-count // NF4_BLOCK) for count in weights),
    )


def other_units(sizes: ModelSizes, mesh: MeshShape) -> tuple[Unit, ...]:
    """Return the units of embedding, head and last norm; of tied weights one."""
    rank = RankSizes.of(sizes, mesh)
    norm, table = (rank.features, 1), (rank.vocab, rank.features)
    last = "model.norm.weight"
    if sizes.is_tied:
        return (
            Unit(
                name="embedding = head, last norm",
                shapes=(norm, table),
                z=mesh.z,
                parameters=(last, _EMBEDDING),
            ),
        )
    return (
        Unit(name="embedding", shapes=(table,), z=mesh.z, parameters=(_EMBEDDING,)),
        Unit(name="head", shapes=(table,), z=mesh.z, parameters=(_HEAD,)),
        Unit(name="last norm", shapes=(norm,), z=mesh.z, parameters=(last,)),
    )


# -- what a step trains ----------------------------------------------------------------------------


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

    def count_state(self, facts: OptimizerFacts, mesh: MeshShape) -> int:
        """Return the optimizer's state on this rank (bytes); that of adapters is not quantised."""
        units = [*((unit, 1) for unit in self.others), *((b.unit, n) for b, n in self.kinds)]
        num_quantised = sum(
            count * -(-rows // unit.z) * length
            for unit, count in units
            for name, (rows, length) in zip(unit.parameters, unit.shapes, strict=True)
            # A matrix has its rows over one of x and y, its columns over the other.
            if is_quantised((rows * mesh.x * mesh.y, length), is_embedding=name == _EMBEDDING)
        )
        return round(facts.count_state(self.stored, num_quantised=num_quantised))

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
    """Return what a step trains: adapters if there are any, or weights of the chosen modules."""
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

    Names are of modules; parts that are numbers select a block.
    """
    numbers = {int(part) for name in names for part in name.split(".") if part.isdigit()}
    rest = [number for number in range(num_blocks) if number not in numbers]
    shared = [compute(rest[0])] if rest else []
    return [compute(number) if number in numbers else shared[0] for number in range(num_blocks)]


def list_adapted(
    sizes: ModelSizes, mesh: MeshShape, adapter: AdapterSizes, block: int
) -> list[AdaptedLayer]:
    """Return the layers of a block, by its number, that have an adapter."""
    layers = []
    for path, (outs, ins) in RankSizes.of(sizes, mesh).list_linear().items():
        if matches_target(f"model.layers.{block}.{path}", adapter.targets):
            name = path.rpartition(".")[2]
            in_axis: Literal["y", "x"] = "x" if name in ("o_proj", "down_proj") else "y"
            layers.append(AdaptedLayer(name=name, ins=ins, outs=outs, in_axis=in_axis))
    return layers


def count_adapted(adapter: AdapterSizes, layers: Iterable[AdaptedLayer]) -> int:
    """Return the elements of the adapters of some layers that one rank stores."""
    per_feature = adapter.r + (1 if adapter.use_dora else 0)
    return sum(adapter.r * layer.ins + per_feature * layer.outs for layer in layers)
