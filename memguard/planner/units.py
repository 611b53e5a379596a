"""Units of storage on one rank: parameters that FSDP2 gathers and reduces together. No torch.

A decoder block, the embedding, the head, the last norm (tied weights: the last three together).
Each parameter has the rows and row length that it has over y and x, and is cut along its rows over
z, the last pieces padded to the first's size. A weight in NF4 (`parallel.nf4`) is stored as blocks
of 64 weights, 36 bytes each, which are cut over z instead of its rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import ModelSizes

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


def block_unit(sizes: ModelSizes, mesh: MeshShape, *, is_nf4: bool = False) -> Unit:
    """Return the unit that each decoder block is; ``is_nf4``: its linear layers are in NF4."""
    features = sizes.hidden_size // mesh.y
    queries = sizes.num_heads * sizes.head_dim // mesh.x
    keys = sizes.num_kv_heads * sizes.head_dim // mesh.x
    width = sizes.intermediate_size // mesh.x
    matrices = {
        "self_attn.q_proj": (queries, features),
        "self_attn.k_proj": (keys, features),
        "self_attn.v_proj": (keys, features),
        "self_attn.o_proj": (features, queries),
        "mlp.gate_proj": (width, features),
        "mlp.up_proj": (width, features),
        "mlp.down_proj": (features, width),
    }
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
    features, vocab = sizes.hidden_size // mesh.y, -(-sizes.vocab_size // mesh.x)
    norm, table = (features, 1), (vocab, features)
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    embedding, head, last = names
    if sizes.is_tied:
        return (
            Unit(
                name="embedding = head, last norm",
                shapes=(norm, table),
                z=mesh.z,
                parameters=(last, embedding),
            ),
        )
    return (
        Unit(name="embedding", shapes=(table,), z=mesh.z, parameters=(embedding,)),
        Unit(name="head", shapes=(table,), z=mesh.z, parameters=(head,)),
        Unit(name="last norm", shapes=(norm,), z=mesh.z, parameters=(last,)),
    )
