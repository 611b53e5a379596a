"""Plans of models whose memory and time the planner cannot estimate: what is certain of them.

`memguard plan`     parameters, valid meshes, and what a rank stores on each
before training     a run is refused only if its storage alone exceeds a GPU's memory
"""

from dataclasses import dataclass

from memguard.config import ParallelConfig, RunConfig
from memguard.errors import ConfigError
from memguard.parallel.mesh_shape import AXES, MeshShape, list_meshes, resolve_mesh
from memguard.planner.disk import format_bytes
from memguard.planner.fit import Work
from memguard.planner.machine import Machine
from memguard.planner.storage import (
    ModelStorage,
    StorageMesh,
    StoragePlan,
    StoredAs,
    can_be_split,
    find_least_gpus,
    list_not_predicted,
    make_storage_mesh,
    rank_storage_meshes,
)

_NUM_LISTED = 20
# Bytes of a weight in nf4, without its scales.
_NF4_BYTES = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageInput:
    """Model, machine, batch and mesh that a plan is made for."""

    name: str
    model: ModelStorage
    machine: Machine
    num_gpus: int
    work: Work
    stored: StoredAs
    mesh: ParallelConfig | None
    """None: any."""


def describe_stored(work: Work, run: RunConfig | None) -> StoredAs:
    """Return how weights are stored; frozen ones are in fp32 unless adapters are trained."""
    if run is not None and run.adapter is not None and run.adapter.quantization is not None:
        return StoredAs(weight_bytes=_NF4_BYTES, is_trained=False)
    if work.adapter is not None:
        return StoredAs(weight_bytes=float(work.compute_bytes), is_trained=False)
    is_part = run is not None and run.train.trainable_modules is not None
    return StoredAs(is_trained=not is_part)


def make_storage_plan(inputs: StorageInput) -> StoragePlan:
    """Return the valid meshes, and what a rank stores on each.

    Raises:
        ConfigError: no mesh of this many GPUs, or not the requested one, is valid.
    """
    model, machine, work = inputs.model, inputs.machine, inputs.work
    order = AXES if inputs.mesh is None else inputs.mesh.order
    requested = None
    if inputs.mesh is not None:
        shape = _resolve(inputs, inputs.mesh)
        requested = make_storage_mesh(model, shape, inputs.stored, machine)
    meshes = list_meshes(inputs.num_gpus, model.sizes, batch_size=work.batch_size, order=order)
    if not meshes:
        # Raises an error that names the numbers of ranks that are valid.
        _resolve(inputs, ParallelConfig())
    ranked = rank_storage_meshes(model, meshes, inputs.stored, machine)
    num_possible = sum(mesh.can_fit for mesh in ranked)
    least = None
    if not num_possible and machine.has_gpus:
        least = find_least_gpus(model, inputs.stored, machine, batch_size=work.batch_size)
    return StoragePlan(
        model=inputs.name,
        family=model.family,
        num_parameters=model.num_parameters,
        num_active_parameters=model.num_active,
        can_be_split=can_be_split(model),
        machine=machine.name,
        gpu=machine.gpu,
        num_gpus=inputs.num_gpus,
        seq_len=work.seq_len,
        batch_size=work.batch_size,
        precision="bf16" if work.compute_bytes == 2 else "fp32",
        num_meshes=len(meshes),
        num_possible=num_possible,
        requested=requested,
        meshes=tuple(ranked[:_NUM_LISTED]),
        least_gpus=least,
        not_predicted=list_not_predicted(model),
    )


def refuse_storage(plan: StoragePlan) -> None:
    """Raise ConfigError if what is known does not fit on the requested mesh, or on any."""
    if plan.requested is not None and not plan.requested.can_fit:
        where = f"the mesh {plan.requested.describe()}"
        raise ConfigError(f"{where} {_describe_lack(plan.requested, plan)}")
    if plan.requested is None and not plan.num_possible:
        least = min(plan.meshes, key=lambda mesh: mesh.memory.at_least)
        raise ConfigError(
            f"no mesh of {plan.num_gpus:,} × {plan.gpu} can hold a step of {plan.model}: "
            f"{least.describe()} {_describe_lack(least, plan)}"
        )


def _describe_lack(mesh: StorageMesh, plan: StoragePlan) -> str:
    kinds = "weights, gradients and moments" if mesh.memory.gradients is not None else "weights"
    ways = []
    if plan.num_possible:
        ways.append(f"use the mesh {plan.meshes[0].describe()}")
    elif plan.least_gpus is not None:
        ways.append(f"use {plan.least_gpus:,} GPUs or more")
    if mesh.memory.gradients is not None:
        ways.append("train LoRA adapters instead of the weights, adapter.name=lora")
    return (
        f"needs at least {format_bytes(mesh.memory.at_least)} for {kinds}; "
        f"{format_bytes(mesh.memory.usable)} are available for tensors on each {plan.gpu}; "
        f"{' or '.join(ways) or 'use GPUs with more memory, more of them, or a smaller model'}"
    )


def _resolve(inputs: StorageInput, mesh: ParallelConfig) -> MeshShape:
    return resolve_mesh(
        mesh, inputs.num_gpus, inputs.model.sizes, batch_size=inputs.work.batch_size
    )
