"""Which meshes hold a model and a step, how tightly, and what would make one fit. No torch.

    for every mesh that the model and the batch allow
      for what is recomputed: as asked, or none, selective, full until it fits
        for micro-batches: as asked, or the largest that fits
          needed = estimated peak + fragmentation x what comes and goes

Meshes that fit are ranked by tokens a second (cost.py), the others by what they lack.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from memguard.parallel.mesh_shape import MeshShape, ModelSizes, list_meshes
from memguard.planner.cost import StepEstimate, estimate_step
from memguard.planner.machine import Machine
from memguard.planner.memory import MemoryEstimate, estimate_memory
from memguard.planner.traffic import StepSettings, block_unit, other_units

Checkpointing = Literal["none", "selective", "full"]
_MODES: tuple[Checkpointing, ...] = get_args(Checkpointing)
_MAX_NODES_TRIED = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One optimizer step, as asked; None leaves a choice to the planner."""

    seq_len: int
    """Length of a row (tokens)."""
    batch_size: int | None = None
    """Rows of a step; None: one row on each rank that splits the batch."""
    micro_batch_size: int | None = None
    """Rows of a forward pass on one rank; None: as many as fit."""
    checkpointing: Checkpointing | None = None
    compute_bytes: int = 2
    chunk_tokens: int = 1024
    reshard_after_forward: bool = True

    def num_rows(self, mesh: MeshShape) -> int:
        """Return the rows of a step on one rank."""
        return 1 if self.batch_size is None else -(-self.batch_size // mesh.num_batch_ways)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A mesh with the settings it would run with on a machine."""

    mesh: MeshShape
    settings: StepSettings
    micro_batch_size: int
    """Rows of a forward pass on one rank."""
    memory: MemoryEstimate
    usable_bytes: int
    """What a GPU has for tensors."""
    allowance_bytes: int
    """What the allocator may lose to fragments."""

    @property
    def needed_bytes(self) -> int:
        """Peak and allowance."""
        return self.memory.peak.total + self.allowance_bytes

    @property
    def headroom_bytes(self) -> int:
        """What is left over; below 0, what is missing."""
        return self.usable_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        """Whether it runs."""
        return self.headroom_bytes >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """A mesh that fits, and how fast it is thought to be."""

    fit: Fit
    step: StepEstimate


def find_fit(sizes: ModelSizes, mesh: MeshShape, work: Work, machine: Machine) -> Fit:
    """Return how a mesh runs a step: with the first settings that fit, or else the smallest.

    Args:
        sizes: of the model.
        mesh: one that `check_mesh` accepts.
        work: the step.
        machine: whose GPUs each hold a rank.
    """

    def choose(mode: Checkpointing, rows: int) -> Fit:
        settings = _build_settings(mesh, work, mode, rows)
        memory = estimate_memory(sizes, mesh, settings, seq_len=work.seq_len)
        return Fit(
            mesh=mesh,
            settings=settings,
            micro_batch_size=rows,
            memory=memory,
            usable_bytes=machine.usable_bytes,
            allowance_bytes=round(machine.fragmentation * memory.peak.transient),
        )

    too_large: list[Fit] = []
    for mode in _MODES if work.checkpointing is None else (work.checkpointing,):
        whole, *parts = _list_micro_batches(work.num_rows(mesh), work.micro_batch_size)
        fit = choose(mode, whole)
        if not fit.fits and parts:
            too_large.append(fit)
            # Of several micro-batches, those of fewer rows need less: one row shows whether any do.
            fit = choose(mode, parts[-1])
            if fit.fits:
                largest = bisect_left(parts, True, key=lambda rows: choose(mode, rows).fits)
                fit = choose(mode, parts[largest])
        if fit.fits:
            return fit
        too_large.append(fit)
    return min(too_large, key=lambda fit: fit.needed_bytes)


def rank_meshes(
    sizes: ModelSizes, meshes: Sequence[MeshShape], work: Work, machine: Machine
) -> tuple[list[Ranked], list[Fit]]:
    """Return the meshes that fit, the fastest first, and the others, the nearest to fitting first.

    Args:
        sizes: of the model.
        meshes: those that `check_mesh` accepts.
        work: the step.
        machine: where.
    """
    fits = [find_fit(sizes, mesh, work, machine) for mesh in meshes]
    ranked = [
        Ranked(
            fit=fit,
            step=estimate_step(sizes, fit.mesh, fit.settings, machine, seq_len=work.seq_len),
        )
        for fit in fits
        if fit.fits
    ]
    ranked.sort(key=lambda each: (-each.step.tokens_per_s, each.fit.needed_bytes))
    others = sorted((fit for fit in fits if not fit.fits), key=lambda fit: fit.needed_bytes)
    return ranked, others


def find_enough_gpus(sizes: ModelSizes, work: Work, machine: Machine) -> Ranked | None:
    """Return the fastest mesh on the fewest GPUs that hold one; None: not found.

    Tried are equal parts of a node, then whole nodes, from where weights, gradients and moments
    fit. Where the batch is given, the number must leave it whole rows.
    """
    node = machine.gpus_per_node
    least = -(-16 * count_parameters(sizes) // machine.usable_bytes)
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
    """Return what, changed alone, lets a mesh run the step, as a user would set it."""
    found = []
    for mode in _MODES:
        if work.checkpointing not in (None, mode):
            tried = replace(work, checkpointing=mode)
            if find_fit(sizes, mesh, tried, machine).fits:
                found.append(f"train.activation_checkpointing={mode}")
                break
    if work.micro_batch_size is not None and work.micro_batch_size > 1:
        fit = find_fit(sizes, mesh, replace(work, micro_batch_size=None), machine)
        if fit.fits:
            found.append(f"train.micro_batch_size={fit.micro_batch_size}")
    narrow = replace(work, compute_bytes=2)
    if work.compute_bytes > 2 and find_fit(sizes, mesh, narrow, machine).fits:
        found.append("train.precision=bf16")
    shorter = work.seq_len // 2
    while shorter >= 128:
        if find_fit(sizes, mesh, replace(work, seq_len=shorter), machine).fits:
            found.append(f"data.seq_len={shorter}")
            break
        shorter //= 2
    return found


def count_parameters(sizes: ModelSizes) -> int:
    """Return the number of distinct parameters of the whole model."""
    whole = MeshShape()
    blocks = sizes.num_layers * block_unit(sizes, whole).stored
    return blocks + sum(unit.stored for unit in other_units(sizes, whole))


def _build_settings(mesh: MeshShape, work: Work, mode: Checkpointing, rows: int) -> StepSettings:
    """Return the settings of a step in micro-batches of so many rows."""
    return StepSettings(
        num_tokens=rows * work.seq_len,
        num_labels=rows * (work.seq_len - 1),
        num_micro_batches=-(-work.num_rows(mesh) // rows),
        chunk_tokens=work.chunk_tokens,
        compute_bytes=work.compute_bytes,
        checkpointing=mode,
        reshard_after_forward=work.reshard_after_forward,
    )


def _list_micro_batches(num_rows: int, asked: int | None) -> list[int]:
    """Return the sizes that a rank's rows may be split into, all of them first."""
    if asked is not None:
        return [min(asked, num_rows)]
    small = [rows for rows in range(1, math.isqrt(num_rows) + 1) if num_rows % rows == 0]
    return sorted({*small, *(num_rows // rows for rows in small)}, reverse=True)


def _list_promising(sizes: ModelSizes, num_gpus: int, work: Work) -> list[MeshShape]:
    """Return meshes whose weights lie in as many pieces as there are ranks."""
    return [
        mesh for mesh in list_meshes(num_gpus, sizes, batch_size=work.batch_size) if mesh.data == 1
    ]
