"""Builds a sharded model: configuration -> meta -> shards -> storage -> weights.

    1  the model on the meta device; its buffers (rotary frequencies) are real, as no file has them
    2  `shard`: roles, DTensors, adapters, activation checkpointing, FSDP2
    3  storage for this rank's shards only
    4  each rank reads its rectangles directly into this storage

Steps 1 and 2 need almost no memory, whatever the size of the model.
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
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import check_causal, has_known_head
from memguard.model.trainable import freeze_others
from memguard.parallel.hf_plan import PLACEMENTS, ShardingPlan, plan_sharding
from memguard.parallel.layout import find_rectangle
from memguard.parallel.linear import to_local
from memguard.parallel.lora import LoraSpec, attach_lora, fill_lora, is_adapter_parameter
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
    """How a model is sharded over a mesh."""

    mesh: Mesh4D
    device: torch.device
    """Device of this rank's shards."""
    dtype: torch.dtype = torch.float32
    """Dtype of the stored weights."""
    compute_dtype: torch.dtype | None = None
    """Dtype of gathered weights and arithmetic; None computes in ``dtype``."""
    chunk_tokens: int = 1024
    reshard_after_forward: bool = True
    checkpointing: Checkpointing = "none"
    compile: bool = False
    adapter: LoraSpec | None = None
    """Adapters to train instead of the weights; None trains the weights."""
    trainable_modules: tuple[str, ...] | None = None
    """Modules whose weights are trained, see `freeze_others`; None trains all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedLayer:
    """A sharded model with its sharding plan and settings."""

    lm: CausalLM
    plan: ShardingPlan
    sharding: Sharding


def build_meta_layer(config: Any, sharding: Sharding, *, attn: str | None = None) -> ShardedLayer:
    """Shard a model of this configuration without allocating storage.

    Args:
        config: a transformers configuration.
        sharding: mesh and dtypes.
        attn: attention implementation; None uses transformers' default.

    Raises:
        ModelError: the family cannot be sharded, or the configuration has dropout.
        ConfigError: the model cannot run on this mesh.
    """
    check_mesh(sharding.mesh.shape, ModelSizes.from_config(config))
    with init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attn, dtype=sharding.dtype
        )
    # Not earlier: a configuration of another kind of model must be refused for that reason.
    _refuse_dropout(config)
    model.tie_weights()
    plan = plan_sharding(model)
    shard_model(model, plan, sharding.mesh)
    if sharding.adapter is not None:
        attach_lora(model, sharding.adapter, sharding.mesh)
    if sharding.trainable_modules is not None:
        freeze_others(model, sharding.trainable_modules)
    checkpoint_blocks(model, sharding.checkpointing)
    if sharding.compile:
        compile_blocks(model)
    lm = CausalLM(
        model,
        chunk_tokens=sharding.chunk_tokens,
        mesh=sharding.mesh,
        compute_dtype=sharding.compute_dtype,
        device_type=sharding.device.type,
    )
    lm.freed_units = wrap_fsdp(
        lm,
        model,
        plan,
        sharding.mesh,
        param_dtype=sharding.compute_dtype,
        reshard_after_forward=sharding.reshard_after_forward,
    )
    return ShardedLayer(lm=lm, plan=plan, sharding=sharding)


def fill_layer(layer: ShardedLayer, source: WeightSource, *, name: str) -> list[str]:
    """Allocate a sharded model, read this rank's weights and switch to evaluation mode.

    Args:
        layer: from `build_meta_layer`.
        source: full tensors by name.
        name: name of the model, for messages.

    Returns:
        Stored names that are not part of the model.

    Raises:
        ModelError: weights are missing or have other shapes.
    """
    model = layer.lm.model
    wanted = {
        key: tuple(parameter.shape)
        for key, parameter in model.named_parameters()
        if not is_adapter_parameter(key)
    }
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
        if is_adapter_parameter(key):
            continue
        module, _, leaf = key.rpartition(".")
        placements = PLACEMENTS[layer.plan.roles[module], leaf]
        rectangle = find_rectangle(parameter.shape, placements, mesh.shape, here)
        copy_rectangle(_Renamed(source, stored), key, rectangle, to_local(parameter.data))
    if layer.sharding.adapter is not None:
        fill_lora(model, layer.sharding.adapter, mesh)
    model.eval()
    return unexpected


def check_layer(layer: ShardedLayer) -> None:
    """Run the model on random tokens to check that it is a causal LM with a supported head.

    This needs the memory of a forward pass, which is more than loading needs.

    Raises:
        ModelError: the model is not causal, or its head is not supported.
    """
    if not has_known_head(layer.lm):
        raise ModelError(
            f"{type(layer.lm.model).__name__} transforms the output of its head in a way that "
            "memguard does not support on a mesh: it can run on one process only"
        )
    check_causal(layer.lm)


def allocate(layer: ShardedLayer) -> None:
    """Allocate this rank's shards, uninitialized, and move the buffers to the same device."""
    lm, device = layer.lm, layer.sharding.device
    to_storage: Any = lm._apply
    to_storage(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    model = lm.model
    if layer.plan.is_tied:
        # `_apply` allocated separate storage for each module.
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


@dataclass(frozen=True, slots=True)
class _Renamed:
    """A source whose tensors have the model's names."""

    source: WeightSource
    stored: dict[str, str]

    @property
    def shapes(self) -> Any:
        return {name: self.source.shapes[key] for name, key in self.stored.items()}

    def read(self, name: str, rectangle: Any) -> torch.Tensor:
        return self.source.read(self.stored[name], rectangle)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return a mapping from the other names of tied parameters to their first name."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return aliases


def _refuse_dropout(config: Any) -> None:
    """Refuse dropout: ranks that share activations would drop different elements."""
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
    """Return the number of distinct parameters of the whole, unsharded model."""
    return sum(
        torch.Size(parameter.shape).numel()
        for parameter in layer.lm.model.parameters()
        if isinstance(parameter, DTensor)
    )
