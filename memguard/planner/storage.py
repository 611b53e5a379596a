"""What is certain of any family: stored weights, gradients and moments of a rank. No torch.

The formulas of `memory` and `cost` are of families with the layers of Llama. Of others the planner
knows the parameters, counted on the meta device, and how the sharding plan splits them:

    elements of a rank = sum over parameters of numel / (y if split over y) / (x if over x) / z
    bytes              = 4 of a weight, 4 of its gradient, 8 of AdamW's moments; of a frozen weight
                         only those of its dtype

This is the mean over ranks, so that the fullest rank stores at least as much. All are allocated at
the update of a step. A run is refused before training only if its storage alone exceeds a GPU's
memory.
"""

from dataclasses import dataclass
from typing import Literal

from memguard.errors import ConfigError
from memguard.parallel.mesh_shape import MeshShape, list_meshes
from memguard.parallel.model_sizes import ModelSizes, Sizes
from memguard.planner.disk import format_bytes
from memguard.planner.fit import PlanInputs
from memguard.planner.machine import Machine
from memguard.planner.plan import (
    BETTER_MACHINE,
    NUM_LISTED,
    MeshRecord,
    PlanRecord,
    degrees_of,
)
from memguard.planner.step_settings import Work
from memguard.records.record import Record

_TRAINED_BYTES = 4
_MOMENTS_BYTES = 8
_NF4_BYTES = 0.5
"""Of a weight, without the scales."""
_MAX_NODES_TRIED = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStorage:
    """The parameters of a model, by the axes that split them."""

    family: str
    """Its ``model_type``."""
    sizes: Sizes
    """What determines its valid meshes."""
    num_parameters: int
    """Tied parameters are counted once."""
    num_active: int | None
    """Parameters that one token uses; None if unknown. All, without experts."""
    elements: tuple[tuple[bool, bool, int], ...]
    """(split over y, split over x, number of elements)."""
    unknown: str
    """Why memory and time cannot be estimated."""

    def count_stored(self, mesh: MeshShape) -> int:
        """Return the elements that the fullest rank stores at least."""
        total = sum(
            count / (mesh.y if over_y else 1) / (mesh.x if over_x else 1)
            for over_y, over_x, count in self.elements
        )
        return int(total / mesh.z)


class StorageMemory(Record):
    """Memory of a rank, as far as it is known (bytes)."""

    weights: int
    gradients: int | None
    """null if only a part of the weights, or an adapter, is trained."""
    optimizer: int | None
    activations: None = None
    nll_chunk: None = None
    buffers: None = None
    needed: None = None
    at_least: int
    """Sum of what is known."""
    usable: int
    """Memory of a GPU that is available for tensors."""


class StorageMesh(MeshRecord):
    """One valid mesh and what a rank stores on it."""

    can_fit: bool
    """Whether what is known fits; false is certain, true is not."""
    memory: StorageMemory
    speed: None = None


class StoragePlan(PlanRecord):
    """The valid meshes of a model whose memory and time cannot be estimated."""

    kind: Literal["storage_plan"] = "storage_plan"
    family: str
    num_active_parameters: int | None
    """Parameters that one token uses; null if unknown."""
    can_be_split: bool
    """Whether y and x may be more than 1."""
    num_possible: int
    """Meshes on which what is known fits."""
    requested: StorageMesh | None
    """The mesh that was requested."""
    meshes: tuple[StorageMesh, ...]
    """The least split ones first, then those that store least on a rank."""
    least_gpus: int | None
    """Smallest number of GPUs on which what is known fits; searched only if no mesh can fit."""
    not_predicted: dict[str, str]
    """What is not predicted, and why."""

    def refuse_misfit(self) -> None:
        """Raise ConfigError if what is known does not fit on the requested mesh, or on any."""
        if self.requested is not None and not self.requested.can_fit:
            where = f"the mesh {self.requested.describe()}"
            raise ConfigError(f"{where} {self._describe_lack(self.requested)}")
        if self.requested is None and not self.num_possible:
            least = min(self.meshes, key=lambda mesh: mesh.memory.at_least)
            raise ConfigError(
                f"no mesh of {self.num_gpus:,} × {self.gpu} can hold a step of {self.model}: "
                f"{least.describe()} {self._describe_lack(least)}"
            )

    def _describe_lack(self, mesh: StorageMesh) -> str:
        is_trained = mesh.memory.gradients is not None
        kinds = "weights, gradients and moments" if is_trained else "weights"
        ways = []
        if self.num_possible:
            ways.append(f"use the mesh {self.meshes[0].describe()}")
        elif self.least_gpus is not None:
            ways.append(f"use {self.least_gpus:,} GPUs or more")
        if is_trained:
            ways.append("train LoRA adapters instead of the weights, adapter.name=lora")
        return (
            f"needs at least {format_bytes(mesh.memory.at_least)} for {kinds}; "
            f"{format_bytes(mesh.memory.usable)} are available for tensors on each {self.gpu}; "
            f"{' or '.join(ways) or BETTER_MACHINE}"
        )


def make_storage_plan(model: ModelStorage, inputs: PlanInputs) -> StoragePlan:
    """Return the valid meshes, and what a rank stores on each.

    Raises:
        ConfigError: no mesh of this many GPUs, or not the requested one, is valid.
    """
    machine, work = inputs.machine, inputs.work
    requested, meshes = inputs.list_meshes(model.sizes)
    ranked = rank_storage_meshes(model, meshes, work, machine)
    num_possible = sum(mesh.can_fit for mesh in ranked)
    least = None
    if not num_possible and machine.has_gpus:
        least = find_least_gpus(model, work, machine)
    return StoragePlan(
        **inputs.describe(),
        family=model.family,
        num_parameters=model.num_parameters,
        num_active_parameters=model.num_active,
        can_be_split=isinstance(model.sizes, ModelSizes),
        num_meshes=len(meshes),
        num_possible=num_possible,
        requested=requested and make_storage_mesh(model, requested, work, machine),
        meshes=tuple(ranked[:NUM_LISTED]),
        least_gpus=least,
        not_predicted=list_not_predicted(model),
    )


def make_storage_mesh(
    model: ModelStorage, mesh: MeshShape, work: Work, machine: Machine
) -> StorageMesh:
    """Return what a rank stores on a mesh; frozen weights are in fp32, those of adapters not."""
    count, weight_bytes = model.count_stored(mesh), 4.0
    if work.adapter is not None:
        weight_bytes = _NF4_BYTES if work.adapter.is_nf4 else work.compute_bytes
    is_trained = work.adapter is None and work.trained_modules is None
    weights = int(weight_bytes * count)
    gradients = _TRAINED_BYTES * count if is_trained else None
    optimizer = _MOMENTS_BYTES * count if is_trained else None
    at_least = weights + (gradients or 0) + (optimizer or 0)
    return StorageMesh(
        **degrees_of(mesh),
        can_fit=at_least <= machine.usable_bytes,
        memory=StorageMemory(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            at_least=at_least,
            usable=machine.usable_bytes,
        ),
    )


def rank_storage_meshes(
    model: ModelStorage,
    meshes: list[MeshShape],
    work: Work,
    machine: Machine,
) -> list[StorageMesh]:
    """Return meshes that can fit, then the others; the least split and best shared ones first."""
    plans = [make_storage_mesh(model, mesh, work, machine) for mesh in meshes]
    return sorted(plans, key=lambda plan: (not plan.can_fit, plan.y * plan.x, -plan.z, plan.x))


def find_least_gpus(model: ModelStorage, work: Work, machine: Machine) -> int | None:
    """Return the smallest number of GPUs, parts of a node or nodes, that can hold what is known."""
    node = machine.gpus_per_node
    numbers = [part for part in range(1, node) if node % part == 0]
    numbers += [count * node for count in range(1, _MAX_NODES_TRIED + 1)]
    # On the mesh that shares all, no rank can store less than an equal part.
    whole = make_storage_mesh(model, MeshShape(), work, machine).memory.at_least
    for number in numbers:
        if whole > number * machine.usable_bytes:
            continue
        for mesh in list_meshes(number, model.sizes, batch_size=work.batch_size):
            if mesh.data == 1 and make_storage_mesh(model, mesh, work, machine).can_fit:
                return number
    return None


def list_not_predicted(model: ModelStorage) -> dict[str, str]:
    """Return what a plan of a model leaves out, and why."""
    names = ("activations", "nll_chunk", "buffers", "needed", "traffic", "speed")
    unknown = dict.fromkeys(names, model.unknown)
    if model.num_active is None:
        unknown["num_active_parameters"] = (
            "the share of a token's experts does not follow from its configuration"
        )
    return unknown
