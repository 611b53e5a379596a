"""Builds a sharded model: configuration -> meta -> shards -> storage -> weights.

    1  the model on the meta device; its buffers (rotary frequencies) are real, as no file has them
    2  `shard`: roles, DTensors, adapters, activation checkpointing, FSDP2
    3  storage for this rank's shards only
    4  each rank reads its rectangles directly into this storage

Steps 1 and 2 need almost no memory, whatever the size of the model.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from memguard.errors import ModelError
from memguard.hf.meta_build import build_on_meta, outline_model
from memguard.hf.nf4_base import fill_nf4, list_nf4, outline_nf4
from memguard.hf.safetensors import WeightSource, copy_rectangle, match_names
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import check_causal, has_known_head, warn_of_unknown_head
from memguard.model.dropout import list_dropout, set_dropout
from memguard.model.trainable import freeze_others
from memguard.parallel.fused import find_orders
from memguard.parallel.hf_plan import ShardingPlan, plan_sharding, plan_storage
from memguard.parallel.layout import ShardSlice, find_rectangle
from memguard.parallel.linear import to_local
from memguard.parallel.lora import LoraSpec, attach_lora, fill_lora, is_adapter_parameter
from memguard.parallel.mesh import Mesh4D
from memguard.parallel.mesh_shape import check_mesh
from memguard.parallel.model_sizes import ESTIMATED_FAMILIES, ModelSizes, Sizes, StorageOnly
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
    quantization: Literal["nf4"] | None = None
    """Form of the linear layers' frozen weights; needs adapters and y = x = 1."""
    trainable_modules: tuple[str, ...] | None = None
    """Modules whose weights are trained, see `freeze_others`; None trains all."""
    is_trained: bool = True
    """False for an audit, in which nothing is dropped."""
    without_dropout: bool = False
    """Whether the rates of the model's dropout are set to 0; False leaves them."""


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
        ModelError: the family cannot be split over this mesh, or drops activations on it; or it
            has no dropout to set to 0.
        ConfigError: the model cannot run on this mesh.
    """
    is_split = sharding.mesh.shape.y * sharding.mesh.shape.x > 1
    if is_split:
        check_mesh(sharding.mesh.shape, ModelSizes.from_config(config))
    model = build_on_meta(config, attn=attn, dtype=sharding.dtype)
    plan = _choose_plan(model, is_split=is_split)
    if sharding.is_trained:
        _refuse_dropout(model, is_split=is_split, without_dropout=sharding.without_dropout)
    shard_model(model, plan, sharding.mesh)
    if sharding.quantization is not None:
        outline_nf4(model)
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
    if sharding.without_dropout:
        set_dropout(model, 0.0)
    lm.freed_units = wrap_fsdp(
        lm,
        model,
        plan,
        sharding.mesh,
        param_dtype=sharding.compute_dtype,
        reshard_after_forward=sharding.reshard_after_forward,
    )
    return ShardedLayer(lm=lm, plan=plan, sharding=sharding)


def find_sizes(config: Any) -> Sizes:
    """Return what determines the valid meshes of a model.

    Args:
        config: a transformers configuration.

    Raises:
        ModelError: the configuration does not describe a causal language model.
    """
    family = config.get_text_config().model_type
    if family not in ESTIMATED_FAMILIES:
        model = outline_model(config, name=f"the model of type '{family}'")
        if not _choose_plan(model, is_split=False).is_split:
            return StorageOnly(family=family)
    try:
        return ModelSizes.from_config(config)
    except ModelError:
        return StorageOnly(family=family)


def _choose_plan(model: Any, *, is_split: bool) -> ShardingPlan:
    """Return the plan of a model; of a family that cannot be split, one for storage only."""
    try:
        return plan_sharding(model)
    except ModelError:
        if is_split:
            raise
        return plan_storage(model)


def fill_layer(layer: ShardedLayer, source: WeightSource, *, name: str) -> list[str]:
    """Allocate a sharded model, read this rank's weights and switch to evaluation mode.

    Args:
        layer: from `build_meta_layer`.
        source: full tensors by their names in the unsharded model.
        name: name of the model, for messages.

    Returns:
        Stored names that are not part of the model.

    Raises:
        ModelError: weights are missing or have other shapes.
    """
    model = layer.lm.model
    quantised = list_nf4(model)
    own = {id(part) for nf4 in quantised.values() for part in (nf4.packed, nf4.scales)}
    wanted = {
        key: tuple(parameter.shape)
        for key, parameter in model.named_parameters()
        if not is_adapter_parameter(key) and id(parameter) not in own
    }
    wanted |= {key: tuple(nf4.weight.shape) for key, nf4 in quantised.items()}
    buffers = _list_stored_buffers(model, source)
    wanted |= {key: tuple(buffer.shape) for key, buffer in buffers.items()}
    stored, unexpected = match_names(wanted, _aliases(model), source, model=name)
    allocate(layer)
    mesh = layer.sharding.mesh
    here = {axis: mesh.axis(axis).rank for axis in ("z", "y", "x")}
    orders = find_orders(model)
    for key, parameter in model.named_parameters():
        if key not in wanted:
            continue
        placements = layer.plan.placements(key)
        rectangle = find_rectangle(parameter.shape, placements, mesh.shape, here)
        local = to_local(parameter.data)
        if key not in orders:
            copy_rectangle(source, stored[key], rectangle, local)
            continue
        for piece in orders[key].split(rectangle):
            copy_rectangle(source, stored[key], piece.file, local[piece.mesh.slices])
    for key, nf4 in quantised.items():
        fill_nf4(nf4, source, stored[key], mesh.axis("z"))
    for key in buffers:
        # Every rank has the whole buffer. Some are in fp32 in a model of a less precise dtype.
        buffer = model.get_buffer(key)
        module, _, leaf = key.rpartition(".")
        dtype = _find_dtype(model, key, layer.sharding.dtype) or buffer.dtype
        target = torch.empty_like(buffer, dtype=dtype)
        whole = ShardSlice(start=(0,) * buffer.ndim, shape=tuple(buffer.shape))
        copy_rectangle(source, stored[key], whole, target)
        model.get_submodule(module)._buffers[leaf] = target
    if source.origin is not None:
        # The export reverts them, as that of transformers does.
        model._weight_conversions = list(source.origin.conversions)
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
    layer.lm.own_head = has_known_head(layer.lm)
    if not layer.lm.own_head and layer.plan.is_split:
        raise ModelError(explain_head(layer.lm.model))
    check_causal(layer.lm)
    if not layer.lm.own_head:
        warn_of_unknown_head(layer.lm)


def explain_head(model: Any) -> str:
    """Return why a model with this head cannot be split over y and x."""
    return (
        f"{type(model).__name__} transforms the output of its head in a way that memguard does "
        "not support over x and y: it can use the axes data and z"
    )


def allocate(layer: ShardedLayer) -> None:
    """Allocate this rank's shards, uninitialized, and move the buffers to the same device."""
    lm, device = layer.lm, layer.sharding.device
    aliases = _aliases(lm.model)
    to_storage: Any = lm._apply
    to_storage(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for name, first in aliases.items():
        # `_apply` allocated separate storage for each module.
        module, _, leaf = name.rpartition(".")
        setattr(lm.model.get_submodule(module), leaf, lm.model.get_parameter(first))


def _list_stored_buffers(model: Any, source: WeightSource) -> dict[str, torch.Tensor]:
    """Return the buffers that checkpoints have; not those that transformers lets them lack."""
    state, optional = model.state_dict(), model._keys_to_ignore_on_load_missing or ()
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in state
        and (name in source.shapes or not any(re.search(pattern, name) for pattern in optional))
    }


def _find_dtype(model: Any, name: str, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype that transformers gives a tensor in a model of ``dtype``, if another."""
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    patterns = {pattern.replace("*", ".*"): kept for pattern, kept in plan.items()}
    return next((kept for text, kept in patterns.items() if re.search(text, name)), None)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return a mapping from the other names of tied parameters to their first name."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return aliases


def _refuse_dropout(model: Any, *, is_split: bool, without_dropout: bool) -> None:
    """Refuse what ranks draw differently: activations that they share, and layers left out."""
    noise = {
        name: value
        for module in model.modules()
        for name, value in vars(module).items()
        if "jitter" in name and isinstance(value, float) and value > 0
    }
    rates = list_dropout(model)
    # A rank that leaves out a layer would not take part in its collectives.
    layers = {name: rate for name, rate in rates.items() if "layerdrop" in name}
    dropping = layers if without_dropout or not is_split else rates
    if is_split:
        dropping = {**dropping, **noise}
    if dropping:
        in_run = dropping.keys().isdisjoint({*layers, *noise})
        where = "Set 'train.dropout' to 0" if in_run else "Set it to 0 in the model's configuration"
        listed = ", ".join(f"{name}={rate:g}" for name, rate in dropping.items())
        way_out = "use the axes data and z" if is_split else "train on one process"
        raise ModelError(
            f"{type(model).__name__} must not drop activations, or add noise to those of routers, "
            f"on this mesh; it has {listed}. {where}, or {way_out}"
        )


def count_sharded_parameters(layer: ShardedLayer) -> int:
    """Return the number of distinct parameters of the whole, unsharded model."""
    return sum(
        torch.Size(parameter.shape).numel()
        for parameter in layer.lm.model.parameters()
        if isinstance(parameter, DTensor)
    )
