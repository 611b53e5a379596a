"""Finds the meshes on which a step of a model fits, and changes that would make one fit. No torch.

    for every mesh that the model and the batch allow
      for each checkpointing mode: the given one, or none, selective and full
        for each micro-batch size: the given one, or the largest that fits; 1 is tried first
          needed = estimated peak + fragmentation x transient memory

Of the modes of a mesh that fit, the one with most estimated tokens a second is taken (cost.py).
Meshes that fit are ranked by the same, the others by missing memory.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from memguard.config import RunConfig
from memguard.config.mitigations import DpSgdConfig, find_mitigation
from memguard.parallel.mesh_shape import MeshShape, list_meshes, resolve_mesh
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.cost import StepEstimate, estimate_step
from memguard.planner.machine import Machine
from memguard.planner.memory import MemoryEstimate, estimate_memory
from memguard.planner.step_settings import (
    AdapterSizes,
    Checkpointing,
    StepSettings,
    Work,
    describe_work,
    limit_sizes,
)
from memguard.planner.trained import find_trained
from memguard.planner.units import block_unit, other_units

_MODES: tuple[Checkpointing, ...] = get_args(Checkpointing)
_MAX_NODES_TRIED = 256
_LARGEST_FLASH_HEAD = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A mesh and the settings that it would use on a machine."""

    mesh: MeshShape
    settings: StepSettings
    micro_batch_size: int
    """Rows of a forward pass on one rank."""
    memory: MemoryEstimate
    usable_bytes: int
    """Memory of a GPU that is available for tensors."""
    allowance_bytes: int
    """Memory that the allocator may lose to fragmentation."""

    @property
    def needed_bytes(self) -> int:
        """Sum of peak and allowance."""
        return self.memory.peak.total + self.allowance_bytes

    @property
    def headroom_bytes(self) -> int:
        """Memory left; negative if memory is missing."""
        return self.usable_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        """Whether the step fits in memory."""
        return self.headroom_bytes >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """A mesh that fits, and its estimated step time."""

    fit: Fit
    step: StepEstimate


def find_fit(sizes: ModelSizes, mesh: MeshShape, work: Work, machine: Machine) -> Fit:
    """Return the fastest settings that fit on a mesh, or else those that need least memory.

    Args:
        sizes: sizes of the model.
        mesh: a mesh that `check_mesh` accepts.
        work: the step.
        machine: the machine; each GPU runs one rank.
    """

    def choose(mode: Checkpointing, rows: int) -> Fit:
        settings = replace(_build_settings(mesh, work, mode, rows), has_mask=has_mask)
        memory = estimate_memory(sizes, mesh, settings, seq_len=work.seq_len)
        return Fit(
            mesh=mesh,
            settings=settings,
            micro_batch_size=rows,
            memory=memory,
            usable_bytes=machine.usable_bytes,
            allowance_bytes=round(machine.fragmentation * memory.peak.transient),
        )

    has_mask = needs_mask(sizes, work, machine)
    fitting: list[Fit] = []
    too_large: list[Fit] = []
    micro_batches = list_micro_batches(work.num_rows(mesh))
    if work.micro_batch_size is not None:
        micro_batches = [min(work.micro_batch_size, work.num_rows(mesh))]
    for mode in _MODES if work.checkpointing is None else (work.checkpointing,):
        # The smallest micro-batch needs least memory, so it shows whether any size fits.
        fit = choose(mode, micro_batches[-1])
        if fit.fits:
            largest = bisect_left(micro_batches, True, key=lambda rows: choose(mode, rows).fits)
            fitting.append(choose(mode, micro_batches[largest]))
        else:
            too_large.append(fit)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        # Of equally fast ones the first, which recomputes least.
        return max(fitting, key=lambda fit: _time(sizes, fit, machine, work).tokens_per_s)
    return min(too_large, key=lambda fit: fit.needed_bytes)


def needs_mask(sizes: ModelSizes, work: Work, machine: Machine) -> bool:
    """Return whether attention reads a mask of all pairs of tokens (parallel/attention.py)."""
    fits_flash = sizes.head_dim % 8 == 0 and sizes.head_dim <= _LARGEST_FLASH_HEAD
    return not (machine.has_flash and work.compute_bytes == 2 and fits_flash)


def rank_meshes(
    sizes: ModelSizes, meshes: Sequence[MeshShape], work: Work, machine: Machine
) -> tuple[list[Ranked], list[Fit]]:
    """Return the meshes that fit, fastest first, and the others, closest to fitting first.

    Args:
        sizes: sizes of the model.
        meshes: meshes that `check_mesh` accepts.
        work: the step.
        machine: the machine.
    """
    fits = [find_fit(sizes, mesh, work, machine) for mesh in meshes]
    ranked = [Ranked(fit=fit, step=_time(sizes, fit, machine, work)) for fit in fits if fit.fits]
    ranked.sort(key=lambda each: (-each.step.tokens_per_s, each.fit.needed_bytes))
    others = sorted((fit for fit in fits if not fit.fits), key=lambda fit: fit.needed_bytes)
    return ranked, others


def find_enough_gpus(sizes: ModelSizes, work: Work, machine: Machine) -> Ranked | None:
    """Return the fastest mesh on the smallest number of GPUs that suffices; None if none is found.

    Equal parts of a node are tried first, then whole nodes, starting with the number on which
    weights, gradients and moments fit. If the batch size is given, it must be divisible.
    """
    node = machine.gpus_per_node
    least = -(-_count_stored_bytes(sizes, work) // machine.usable_bytes)
    parts = [part for part in range(least, node) if node % part == 0]
    first = -(-least // node)
    nodes = range(first, first + _MAX_NODES_TRIED)
    for num_gpus in (*parts, *(num_nodes * node for num_nodes in nodes)):
        meshes = _list_promising(sizes, num_gpus, work)
        ranked, _ = rank_meshes(sizes, meshes, work, machine)
        if ranked:
            return ranked[0]
    return None


def list_remedies(sizes: ModelSizes, mesh: MeshShape, work: Work, machine: Machine) -> list[str]:
    """Return the settings of which each, changed alone, would make the step fit on a mesh."""
    remedies = []
    for mode in _MODES:
        if work.checkpointing not in (None, mode):
            tried = replace(work, checkpointing=mode)
            if find_fit(sizes, mesh, tried, machine).fits:
                remedies.append(f"train.activation_checkpointing={mode}")
                break
    if work.micro_batch_size is not None and work.micro_batch_size > 1:
        fit = find_fit(sizes, mesh, replace(work, micro_batch_size=None), machine)
        if fit.fits:
            remedies.append(f"train.micro_batch_size={fit.micro_batch_size}")
    narrow = replace(work, compute_bytes=2)
    if work.compute_bytes > 2 and find_fit(sizes, mesh, narrow, machine).fits:
        remedies.append("train.precision=bf16")
    shorter = work.seq_len // 2
    while shorter >= 128:
        if find_fit(sizes, mesh, replace(work, seq_len=shorter), machine).fits:
            remedies.append(f"data.seq_len={shorter}")
            break
        shorter //= 2
    return remedies


def find_adapter_fit(
    sizes: ModelSizes,
    meshes: Sequence[MeshShape],
    work: Work,
    machine: Machine,
    *,
    r: int,
    first: MeshShape | None,
) -> Ranked | None:
    """Return the mesh on which training LoRA adapters instead of the weights fits.

    Args:
        sizes: sizes of the model.
        meshes: meshes that `check_mesh` accepts.
        work: the step, without adapters.
        machine: the machine.
        r: rank of the adapters.
        first: a mesh that is preferred if it fits.

    Returns:
        The first mesh or the fastest; None if the step fits on no mesh.
    """
    work = replace(work, adapter=AdapterSizes(r=r))
    if first is not None:
        ranked, _ = rank_meshes(sizes, [first], work, machine)
        if ranked:
            return ranked[0]
    ranked, _ = rank_meshes(sizes, meshes, work, machine)
    return ranked[0] if ranked else None


def count_parameters(sizes: ModelSizes) -> int:
    """Return the number of distinct parameters of the whole model."""
    whole = MeshShape()
    blocks = sizes.num_layers * block_unit(sizes, whole).stored
    return blocks + sum(unit.stored for unit in other_units(sizes, whole))


def _count_stored_bytes(sizes: ModelSizes, work: Work) -> int:
    """Return the least that all ranks store together: weights, gradients and moments (bytes)."""
    whole, adapter = MeshShape(), work.adapter
    part = find_trained(sizes, whole, adapter, work.trained_modules)
    if adapter is None:
        return 4 * count_parameters(sizes) + 12 * part.stored
    block = block_unit(sizes, whole, is_nf4=adapter.is_nf4)
    stored = sizes.num_layers * block.stored_bytes(work.compute_bytes)
    return stored + sum(unit.stored_bytes(work.compute_bytes) for unit in other_units(sizes, whole))


def _time(sizes: ModelSizes, fit: Fit, machine: Machine, work: Work) -> StepEstimate:
    return estimate_step(sizes, fit.mesh, fit.settings, machine, seq_len=work.seq_len)


def _build_settings(mesh: MeshShape, work: Work, mode: Checkpointing, rows: int) -> StepSettings:
    """Return the settings of a step with micro-batches of this number of rows."""
    return StepSettings(
        num_tokens=rows * work.seq_len,
        num_labels=rows * (work.seq_len - 1),
        num_micro_batches=-(-work.num_rows(mesh) // rows),
        chunk_tokens=work.chunk_tokens,
        compute_bytes=work.compute_bytes,
        checkpointing=mode,
        reshard_after_forward=work.reshard_after_forward,
        is_compiled=work.is_compiled,
        adapter=work.adapter,
        trained_modules=work.trained_modules,
    )


def list_micro_batches(num_rows: int) -> list[int]:
    """Return the possible micro-batch sizes of a rank's rows, largest first."""
    small = [rows for rows in range(1, math.isqrt(num_rows) + 1) if num_rows % rows == 0]
    return sorted({*small, *(num_rows // rows for rows in small)}, reverse=True)


def _list_promising(sizes: ModelSizes, num_gpus: int, work: Work) -> list[MeshShape]:
    """Return the meshes on which every rank stores a different part of the weights."""
    return [
        mesh
        for mesh in list_meshes(
            num_gpus, limit_sizes(sizes, work.adapter), batch_size=work.batch_size
        )
        if mesh.data == 1
    ]


# -- `auto` in the settings of a run ---------------------------------------------------------------
#
#     setting                   GPU                                        CPU
#     precision                 bf16                                       fp32
#     micro_batch_size          the largest that fits by the planner       null: all rows
#     activation_checkpointing  the fastest that fits by the planner       none
#
# Where the planner cannot estimate the memory of a model, a GPU uses micro-batches of one row and
# full checkpointing.


def resolve_auto(
    config: RunConfig,
    *,
    device_type: str,
    sizes: ModelSizes | None,
    machine: Machine | None,
    world_size: int,
) -> RunConfig:
    """Return the settings without `auto`.

    Args:
        config: the run's settings.
        device_type: "cuda" or "cpu".
        sizes: sizes of the model; None if its memory cannot be estimated.
        machine: the machine that the run uses; None if its memory is not known.
        world_size: number of ranks.

    Raises:
        ConfigError: the mesh does not match the number of ranks or the model.
    """
    train, is_gpu = config.train, device_type == "cuda"
    work = describe_work(config, device_type=device_type)
    changes: dict[str, Any] = {}
    if train.precision == "auto":
        changes["precision"] = "bf16" if work.compute_bytes == 2 else "fp32"
    if "auto" in (train.micro_batch_size, train.activation_checkpointing):
        rows, mode = (1, "full") if is_gpu else (None, "none")
        if is_gpu and sizes is not None and machine is not None:
            batch_size = train.batch_size
            mesh = resolve_mesh(config.parallel, world_size, sizes, batch_size=batch_size)
            fit = find_fit(sizes, mesh, work, machine)
            rows, mode = fit.micro_batch_size, fit.settings.checkpointing
        if train.micro_batch_size == "auto":
            # With dp_sgd each row has its own backward pass, and a micro-batch size is refused.
            is_private = find_mitigation(config.mitigations, DpSgdConfig) is not None
            changes["micro_batch_size"] = None if is_private else rows
        if train.activation_checkpointing == "auto":
            changes["activation_checkpointing"] = mode
    return config.model_copy(update={"train": train.model_copy(update=changes)})
