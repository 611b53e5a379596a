"""Which parameters are stored, gathered and reduced together, as arithmetic. No torch.

FSDP2 handles the parameters of a unit at once: a decoder block, the embedding, the head, the last
norm (tied weights: the last three together). Each has the rows and row length that it has over y
and x, and is cut along its rows over z, the last pieces padded to the first's size. Where the
vocabulary is uneven over x, sizes are rank 0's, the largest.
"""

from dataclasses import dataclass

from memguard.parallel.mesh_shape import MeshShape, ModelSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """The parameters of one unit of storage on one rank."""

    name: str
    shapes: tuple[tuple[int, int], ...]
    """Rows and row length of each parameter, as they lie over y and x."""
    z: int

    @property
    def stored(self) -> int:
        """Elements that this rank stores, padding included."""
        return sum(-(-rows // self.z) * length for rows, length in self.shapes)

    @property
    def gathered(self) -> int:
        """Elements once gathered over z, padding included."""
        return self.stored * self.z


def block_unit(sizes: ModelSizes, mesh: MeshShape) -> Unit:
    """Return the unit that each decoder block is."""
    features = sizes.hidden_size // mesh.y
    queries = sizes.num_heads * sizes.head_dim // mesh.x
    keys = sizes.num_kv_heads * sizes.head_dim // mesh.x
    width = sizes.intermediate_size // mesh.x
    matrices = [
        (queries, features),
        (keys, features),
        (keys, features),
        (features, queries),
        (width, features),
        (width, features),
        (features, width),
    ]
    vectors = [features] * 2
    if sizes.has_qkv_bias:
        vectors += [queries, keys, keys]
    if sizes.has_output_bias:
        vectors += [features]
    if sizes.has_mlp_bias:
        vectors += [width, width, features]
    if sizes.has_head_norms:
        vectors += [sizes.head_dim] * 2
    shapes = (*matrices, *((length, 1) for length in vectors))
    return Unit(name="a block", shapes=shapes, z=mesh.z)


def other_units(sizes: ModelSizes, mesh: MeshShape) -> tuple[Unit, ...]:
    """Return the units of embedding, head and last norm."""
    features, vocab = sizes.hidden_size // mesh.y, -(-sizes.vocab_size // mesh.x)
    norm, table = (features, 1), (vocab, features)
    if sizes.is_tied:
        return (Unit(name="embedding = head, last norm", shapes=(norm, table), z=mesh.z),)
    return (
        Unit(name="embedding", shapes=(table,), z=mesh.z),
        Unit(name="head", shapes=(table,), z=mesh.z),
        Unit(name="last norm", shapes=(norm,), z=mesh.z),
    )
