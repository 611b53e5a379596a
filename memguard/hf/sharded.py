"""Builds a sharded model: configuration -> meta -> shards -> storage -> weights.

    1  the model on the meta device, its buffers (rotary frequencies) real: they are in no file
    2  `shard`: roles, DTensors, what is computed again, FSDP2
    3  storage for this rank's shards only
    4  each rank reads the rectangles it stores, straight into them

Steps 1 and 2 need no memory to speak of, whatever the model.
"""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.tensor import DTensor

from memguard.errors import ModelError
from memguard.hf.safetensors import WeightSource, copy_rectangle, match_names
from memguard.model.causal_lm import VocabLayer
from memguard.model.checks import check_causal, has_known_head
from memguard.parallel.hf_plan import PLACEMENTS, ShardingPlan, plan_sharding
from memguard.parallel.layout import find_rectangle
from memguard.parallel.linear import to_local
from memguard.parallel.mesh import Mesh4D
from memguard.parallel.mesh_shape import ModelSizes, check_mesh
from memguard.parallel.shard import (
    Checkpointing,
    checkpoint_blocks,
    compile_blocks,
    shard_model,
    wrap_fsdp,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How a model is put on a mesh."""

    mesh: Mesh4D
    device: torch.device
    """Of this rank's shards."""
    dtype: torch.dtype = torch.float32
    """Of the stored weights."""
    compute_dtype: torch.dtype | None = None
    """Of gathered weights and arithmetic; None computes in ``dtype``."""
    chunk_tokens: int = 1024
    reshard_after_forward: bool = True
    checkpointing: Checkpointing = "none"
    compile: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedLayer:
    """A sharded model and what it was built by."""

    vocab: VocabLayer
    plan: ShardingPlan
    sharding: Sharding


def build_meta_layer(config: Any, sharding: Sharding, *, attn: str | None = None) -> ShardedLayer:
    """Shard a model of this configuration without giving it storage.

    Args:
        config: a transformers configuration.
        sharding: mesh and dtypes.
        attn: attention implementation; None takes what transformers chooses.

    Raises:
        ModelError: a family that cannot be sharded, or one with dropout.
        ConfigError: a mesh that this model cannot run on.
    """
    check_mesh(sharding.mesh.shape, ModelSizes.from_config(config))
    with init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attn, dtype=sharding.dtype
        )
    # After the class is known: a configuration of another kind of model is refused as that.
    _refuse_dropout(config)
    model.tie_weights()
    plan = plan_sharding(model)
    shard_model(model, plan, sharding.mesh)
    checkpoint_blocks(model, sharding.checkpointing)
    if sharding.compile:
        compile_blocks(model)
    vocab = VocabLayer(
        model,
        chunk_tokens=sharding.chunk_tokens,
        mesh=sharding.mesh,
        compute_dtype=sharding.compute_dtype,
    )
    vocab.freed_units = wrap_fsdp(
        vocab,
        model,
        plan,
        sharding.mesh,
        param_dtype=sharding.compute_dtype,
        reshard_after_forward=sharding.reshard_after_forward,
    )
    return ShardedLayer(vocab=vocab, plan=plan, sharding=sharding)


def fill_layer(layer: ShardedLayer, source: WeightSource, *, name: str) -> list[str]:
    """Give a sharded model storage and this rank's weights; in evaluation mode afterwards.

    Args:
        layer: from `build_meta_layer`.
        source: full tensors by name.
        name: of the model, for messages.

    Returns:
        Stored names that the model has no place for.

    Raises:
        ModelError: weights that are missing or have other shapes.
    """
    model = layer.vocab.model
    wanted = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    stored, unexpected = match_names(
        wanted,
        _aliases(model),
        source.shapes,
        prefix=model.base_model_prefix,
        model=name,
    )
    allocate(layer)
    mesh = layer.sharding.mesh
    here = {axis: mesh.axis(axis).rank for axis in ("z", "y", "x")}
    for key, parameter in model.named_parameters():
        module, _, leaf = key.rpartition(".")
        placements = PLACEMENTS[layer.plan.roles[module], leaf]
        rectangle = find_rectangle(parameter.shape, placements, mesh.shape, here)
        copy_rectangle(_Renamed(source, stored), key, rectangle, to_local(parameter.data))
    model.eval()
    return unexpected


def check_layer(layer: ShardedLayer) -> None:
    """Run the filled model on random tokens: is it a causal LM whose head we know?

    Takes the memory of a forward, which is more than loading takes.

    Raises:
        ModelError: it is not, or its head does more than is known here.
    """
    if not has_known_head(layer.vocab):
        raise ModelError(
            f"{type(layer.vocab.model).__name__} does something after its head that memguard does "
            "not know: it can run on one process only"
        )
    check_causal(layer.vocab)


def allocate(layer: ShardedLayer) -> None:
    """Give this rank's shards storage, without values, and move the buffers beside them."""
    vocab, device = layer.vocab, layer.sharding.device
    to_storage: Any = vocab._apply
    to_storage(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    model = vocab.model
    if layer.plan.is_tied:
        # Each module was given storage of its own.
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


@dataclass(frozen=True, slots=True)
class _Renamed:
    """A source under the model's names."""

    source: WeightSource
    stored: dict[str, str]

    @property
    def shapes(self) -> Any:
        return {name: self.source.shapes[key] for name, key in self.stored.items()}

    def read(self, name: str, rectangle: Any) -> torch.Tensor:
        return self.source.read(self.stored[name], rectangle)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return the other names of tied parameters -> the name they are listed under."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return aliases


def _refuse_dropout(config: Any) -> None:
    """Refuse dropout: ranks that share activations would drop different ones."""
    dropping = [
        f"{field}={value}"
        for field, value in config.get_text_config().to_dict().items()
        if "drop" in field and isinstance(value, int | float) and value > 0
    ]
    if dropping:
        raise ModelError(
            f"dropout must be 0 on a mesh; the model's configuration has {', '.join(dropping)}. "
            "Set it to 0 there, or train on one process"
        )


def count_sharded_parameters(layer: ShardedLayer) -> int:
    """Return the number of distinct parameters of the whole model."""
    return sum(
        torch.Size(parameter.shape).numel()
        for parameter in layer.vocab.model.parameters()
        if isinstance(parameter, DTensor)
    )
