"""Assembles the model that is trained or audited, on one process and on a mesh.

    assemble           all steps from a model of transformers to the one that is trained
    assemble_loaded    of a model that has its weights, on one process
    build_meta_layer   of a configuration, without storage
    fill_layer         storage for this rank's shards; each rank reads its rectangles into it

On the meta device parameters have no storage, but buffers (rotary frequencies) have their values,
as no file has them. Building a model there needs almost no memory, whatever its size.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from memguard.config import TrainConfig
from memguard.errors import ModelError
from memguard.hf import adapter_files
from memguard.hf.from_config import build_on_meta, describe_model
from memguard.hf.nf4_base import fill_nf4, list_nf4, outline_nf4
from memguard.hf.safetensors import WeightSource, copy_rectangle, match_names
from memguard.model.causal_lm import CausalLM
from memguard.model.checks import check_causal_lm
from memguard.model.trainable import freeze_others, list_dropout, set_dropout
from memguard.parallel.fused import find_orders
from memguard.parallel.hf_plan import ShardingPlan, plan_sharding, plan_storage
from memguard.parallel.layout import ShardSlice, find_rectangle
from memguard.parallel.linear import to_local
from memguard.parallel.lora import LoraSpec, attach_lora, fill_lora, is_adapter_parameter
from memguard.parallel.mesh import Axis, Mesh4D
from memguard.parallel.mesh_shape import MeshShape, check_mesh
from memguard.parallel.model_sizes import ESTIMATED_FAMILIES, ModelSizes, Sizes, StorageOnly
from memguard.parallel.shard import (
    Checkpointing,
    checkpoint_blocks,
    compile_blocks,
    shard_model,
    wrap_fsdp,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembly:
    """How a model is assembled: its mesh, its dtypes, and what is trained."""

    mesh: Mesh4D | None
    """None for a single process, which uses plain modules."""
    device: torch.device
    """Device of this rank's weights."""
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
    """Form of the linear layers' frozen weights; needs y = x = 1, and adapters if trained."""
    trainable_modules: tuple[str, ...] | None = None
    """Modules whose weights are trained, see `freeze_others`; None trains all."""
    is_trained: bool = True
    """False for an audit, in which nothing is dropped."""
    dropout: float | None = None
    """Rate of the model's dropout, 0 on a mesh; None leaves the rates of its configuration."""

    @classmethod
    def for_training(
        cls,
        train: TrainConfig,
        *,
        mesh: Mesh4D | None,
        device: torch.device,
        adapter: LoraSpec | None = None,
        quantization: Literal["nf4"] | None = None,
        reshard_after_forward: bool = True,
    ) -> "Assembly":
        """Return how a run's model is assembled.

        Weights that are trained are stored in `train.weights`. On one process with those in fp32
        bf16 is left to autocast.
        """
        is_bf16 = train.precision == "bf16"
        is_narrow = adapter is not None or train.weights == "bf16"
        return cls(
            mesh=mesh,
            device=device,
            dtype=torch.bfloat16 if is_bf16 and is_narrow else torch.float32,
            compute_dtype=torch.bfloat16 if is_bf16 and mesh is not None else None,
            chunk_tokens=train.nll_chunk_tokens,
            reshard_after_forward=reshard_after_forward,
            checkpointing=train.checkpointing,
            compile=train.compile is True,
            adapter=adapter,
            quantization=quantization,
            trainable_modules=train.trainable_modules,
            dropout=train.dropout,
        )


def assemble(model: Any, assembly: Assembly, plan: ShardingPlan | None = None) -> CausalLM:
    """Make a model of transformers the one that is trained or audited, in place.

    The model is on the meta device; without a mesh, and without a plan, it may have its weights.

    Raises:
        ModelError: the family has no dropout to set, no activation checkpointing, or no adapters.
        ConfigError: the adapters or the modules name what the model does not have.
    """
    mesh = assembly.mesh
    assert (mesh is None) == (plan is None), "a model is planned if there is a mesh"
    if mesh is not None and plan is not None:
        shard_model(model, plan, mesh)
    lm = CausalLM(
        model,
        chunk_tokens=assembly.chunk_tokens,
        mesh=mesh,
        compute_dtype=assembly.compute_dtype,
        device_type=assembly.device.type,
    )
    # After the attention kernel is chosen, which copies of the configuration inherit; before the
    # adapters, which have a dropout of their own.
    if assembly.dropout is not None:
        set_dropout(model, assembly.dropout)
    if assembly.quantization is not None:
        if problem := adapter_files.refuse_nf4_over_z(1 if mesh is None else mesh.shape.z):
            raise ModelError(problem)
        outline_nf4(model)
    choose_trained(model, assembly.adapter, assembly.trainable_modules, mesh)
    checkpoint_blocks(model, assembly.checkpointing)
    if assembly.compile:
        compile_blocks(model)
    if mesh is not None and plan is not None:
        lm.freed_units = wrap_fsdp(
            lm,
            model,
            plan,
            mesh,
            param_dtype=assembly.compute_dtype,
            reshard_after_forward=assembly.reshard_after_forward,
        )
    return lm


def choose_trained(
    model: Any, adapter: LoraSpec | None, modules: Sequence[str] | None, mesh: Mesh4D | None = None
) -> None:
    """Attach the adapters, or freeze what is not trained; see `Assembly`."""
    if adapter is not None:
        attach_lora(model, adapter, mesh)
    if modules is not None:
        freeze_others(model, modules)


def assemble_loaded(model: Any, assembly: Assembly) -> CausalLM:
    """Assemble a model that has its weights, on one process, and check the result."""
    lm = assemble(model, assembly)
    if assembly.adapter is not None:
        fill_lora(model, assembly.adapter)
    check_causal_lm(lm)
    return lm


@dataclass(frozen=True, kw_only=True, slots=True)
class AssembledModel:
    """A model with its settings and, on a mesh, its sharding plan."""

    lm: CausalLM
    assembly: Assembly
    plan: ShardingPlan | None = None

    @property
    def is_split(self) -> bool:
        """Whether its layers are split over y and x."""
        return self.plan is not None and self.plan.is_split


def build_meta_layer(config: Any, assembly: Assembly, *, attn: str | None = None) -> AssembledModel:
    """Assemble a model of this configuration without allocating storage.

    Raises:
        ModelError: the family cannot be split over this mesh, or drops activations on it; or see
            `assemble`.
        ConfigError: the model cannot run on this mesh; or see `assemble`.
    """
    shape = MeshShape() if assembly.mesh is None else assembly.mesh.shape
    is_split = shape.y * shape.x > 1
    if is_split:
        check_mesh(shape, ModelSizes.from_config(config))
    model, plan = build_on_meta(config, attn=attn, dtype=assembly.dtype), None
    if assembly.mesh is not None:
        plan = _choose_plan(model, is_split=is_split)
        if assembly.is_trained:
            _refuse_dropout(model, is_split=is_split, without_dropout=assembly.dropout == 0)
    for name, parameter in model.named_parameters() if plan is None else ():
        # As `from_pretrained` does; the units of a mesh have one dtype.
        if (dtype := _find_dtype(model, name, assembly.dtype)) is not None:
            parameter.data = parameter.data.to(dtype)
    return AssembledModel(lm=assemble(model, assembly, plan), plan=plan, assembly=assembly)


def find_sizes(config: Any) -> Sizes:
    """Return what determines the valid meshes of a model.

    Raises:
        ModelError: the configuration does not describe a causal language model.
    """
    family = config.get_text_config().model_type
    if family not in ESTIMATED_FAMILIES:
        model = describe_model(config, name=f"the model of type '{family}'")
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


def fill_layer(layer: AssembledModel, source: WeightSource, *, name: str) -> list[str]:
    """Allocate a model, read this rank's weights tensor by tensor, switch to evaluation mode.

    ``layer`` is from `build_meta_layer`; ``source`` has full tensors by their names in the
    unsharded model ``name``. A layer in NF4 is read dense and quantised on the device, one layer at
    a time.

    Returns:
        Stored names that are not part of the model.

    Raises:
        ModelError: weights are missing or have other shapes.
    """
    model, assembly, plan = layer.lm.model, layer.assembly, layer.plan
    mesh = assembly.mesh
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
    stored, unexpected = match_names(wanted, find_aliases(model), source, model=name)
    allocate(layer.lm, assembly.device)
    orders = find_orders(model)
    z = Axis(name="z") if mesh is None else mesh.axis("z")
    for key, parameter in model.named_parameters():
        if key not in wanted:
            continue
        rectangle = ShardSlice.whole(parameter.shape)
        if mesh is not None and plan is not None:
            here = {"z": z.rank, "y": mesh.axis("y").rank, "x": mesh.axis("x").rank}
            placements = plan.placements(key)
            rectangle = find_rectangle(parameter.shape, placements, mesh.shape, here)
        local = to_local(parameter.data)
        if key not in orders:
            copy_rectangle(source, stored[key], rectangle, local)
            continue
        for piece in orders[key].split(rectangle):
            copy_rectangle(source, stored[key], piece.file, local[piece.mesh.slices])
    for key, nf4 in quantised.items():
        fill_nf4(nf4, source, stored[key], z)
    for key in buffers:
        # Every rank has the whole buffer. Some are in fp32 in a model of a less precise dtype.
        buffer = model.get_buffer(key)
        module, _, leaf = key.rpartition(".")
        dtype = _find_dtype(model, key, assembly.dtype) or buffer.dtype
        target = torch.empty_like(buffer, dtype=dtype)
        copy_rectangle(source, stored[key], ShardSlice.whole(buffer.shape), target)
        model.get_submodule(module)._buffers[leaf] = target
    if assembly.adapter is not None and assembly.is_trained:
        fill_lora(model, assembly.adapter, mesh)
    model.eval()
    return unexpected


def allocate(lm: CausalLM, device: torch.device) -> None:
    """Allocate this rank's weights, uninitialized, and move the buffers to the same device."""
    aliases = find_aliases(lm.model)
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


def find_aliases(model: nn.Module) -> dict[str, str]:
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
