"""Sizes of low-rank adapters on one rank, from the settings. No torch.

                                          plain layer            transposed layer (o, down)
    A [R, K]    fp32, over y or x         K/y                    K/x
    B [N, R]    the same                  N/x                    N/y
    m [N]       only with DoRA            N/x                    N/y

Adapters are replicated over data and z; the base is frozen and stored in the precision of the run,
or in NF4 (`units`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from memguard.config.adapters import LoraConfig, matches_target
from memguard.parallel.mesh_shape import MeshShape
from memguard.parallel.model_sizes import NF4_BASE, ModelSizes, Sizes

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a block of the families whose memory is estimated."""

_IN_ATTENTION = LINEAR_LAYERS[:4]

ADAPTER_BYTES = 4
"""Of an element of an adapter, of its gradient and of each of its two moments (bytes)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSizes:
    """What determines the size of the adapters of a model."""

    r: int
    targets: tuple[str, ...] = LINEAR_LAYERS
    """Layers that have an adapter: their names, or the last parts of them."""
    use_dora: bool = False
    has_dropout: bool = False
    is_nf4: bool = False
    """Whether the frozen linear layers are stored in NF4."""

    @classmethod
    def from_settings(cls, config: LoraConfig | None) -> "AdapterSizes | None":
        """Read the sizes from the settings of a run; None if it trains the weights."""
        if config is None:
            return None
        targets: tuple[str, ...] = LINEAR_LAYERS
        if config.target_modules != "all-linear":
            targets = tuple(config.target_modules)
        return cls(
            r=config.r,
            targets=targets,
            use_dora=config.use_dora,
            has_dropout=config.lora_dropout > 0,
            is_nf4=config.quantization == "nf4",
        )


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


def limit_sizes(sizes: ModelSizes, adapter: AdapterSizes | None) -> Sizes:
    """Return the sizes that determine the valid meshes: a base in NF4 takes data and z only."""
    return NF4_BASE if adapter is not None and adapter.is_nf4 else sizes


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
