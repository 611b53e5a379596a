"""Finds the meshes on which a step of a model fits, and changes that would make one fit. No torch.

    for every mesh that the model and the batch allow
      for each checkpointing mode: the given one, or none, selective and full
        for each micro-batch size: the given one, or the largest that fits; 1 is tried first
          needed = estimated peak + fragmentation x transient memory

Of the modes of a mesh that fit, the one with most estimated tokens a second is taken (cost.py). On
GPUs of a kind that was not measured, those that leave 15 % of the memory come first. Meshes that
fit are ranked by the same, the others by missing memory.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from memguard.config import ParallelConfig, RunConfig
from memguard.parallel.mesh_shape import AXES, MeshShape, list_meshes, resolve_mesh
from memguard.parallel.model_sizes import ModelSizes, Sizes
from memguard.planner.cost import StepEstimate, estimate_step
from memguard.planner.machine import Machine
from memguard.planner.memory import MemoryEstimate, estimate_memory
from memguard.planner.parameters import block_unit, find_trained, other_units
from memguard.planner.step_settings import (
    Checkpointing,
    StepOptions,
    StepSettings,
    Work,
    describe_work,
    limit_sizes,
)
from memguard.records.texts import format_percent

_MODES: tuple[Checkpointing, ...] = get_args(Checkpointing)
BETTER_MACHINE = "use GPUs with more memory, more of them, or a smaller model"
SCRATCH = "model.scratch"
"""Name of a model that has no path."""
_TYPES = {2: "bf16", 4: "fp32"}
_MAX_NODES_TRIED = 256
_LARGEST_FLASH_HEAD = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInputs:
    """What a plan is made for, besides the sizes of the model."""

    name: str
    """Of the model."""
    machine: Machine
    num_gpus: int
    work: Work
    mesh: ParallelConfig | None
    """None: the planner chooses."""

    @classmethod
    def for_run(cls, config: RunConfig, machine: Machine, num_gpus: int) -> "PlanInputs":
        """Return the inputs of a run's plan on the machine that it was started on."""
        return cls(
            name=config.model.path or SCRATCH,
            machine=machine,
            num_gpus=num_gpus,
            work=describe_work(config, device_type="cuda" if machine.has_gpus else "cpu"),
            mesh=config.parallel,
        )

    @property
    def may_adapt(self) -> bool:
        """Whether adapters could be trained instead of the weights."""
        return self.work.adapter is None and self.name != SCRATCH

    def list_meshes(self, sizes: Sizes) -> tuple[MeshShape | None, list[MeshShape]]:
        """Return the requested mesh, if any, and all that model and batch allow.

        Raises:
            ConfigError: no mesh of this many ranks, or not the requested one, is valid.
        """
        batch_size, requested, order = self.work.batch_size, None, AXES
        if self.mesh is not None:
            requested = resolve_mesh(self.mesh, self.num_gpus, sizes, batch_size=batch_size)
            order = self.mesh.order
        meshes = list_meshes(self.num_gpus, sizes, batch_size=batch_size, order=order)
        if not meshes:
            # Raises an error that names the violated rule and the numbers of ranks that are valid.
            resolve_mesh(ParallelConfig(), self.num_gpus, sizes, batch_size=batch_size)
        return requested, meshes

    def describe(self) -> dict[str, Any]:
        """Return the fields of `Plan` that repeat these."""
        precision, adapter = _TYPES[self.work.compute_bytes], self.work.adapter
        return {
            "model": self.name,
            "machine": self.machine.name,
            "gpu": self.machine.gpu,
            "num_gpus": self.num_gpus,
            "seq_len": self.work.seq_len,
            "batch_size": self.work.batch_size,
            "precision": precision,
            "weights": "NF4" if adapter and adapter.is_nf4 else _TYPES[self.work.stored_bytes],
            "optimizer": self.work.optimizer,
            "adapter_r": None if adapter is None else adapter.r,
        }


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
    step: StepEstimate | None = None
    """Its estimated time; None if it does not fit."""

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

    @property
    def tokens_per_s(self) -> float:
        """Estimated speed; 0 if it does not fit."""
        return self.step.tokens_per_s if self.step else 0.0

    def find_fragmentation(self, num_bytes: int) -> float | None:
        """Return the fragmentation that makes this estimate a measured memory.

        None for a step that fills less than half of the GPU, which tells little of larger ones.
        """
        if 2 * num_bytes < self.usable_bytes:
            return None
        share = (num_bytes - self.memory.peak.total) / max(1, self.memory.peak.transient)
        return min(max(share, 0.01), 1.0)

    def fits_in(self, share: float) -> bool:
        """Return whether the step needs at most this share of the memory."""
        return self.needed_bytes <= share * self.usable_bytes


def find_fit(sizes: ModelSizes, mesh: MeshShape, work: Work, machine: Machine) -> Fit:
    """Return the fastest settings that fit on a mesh, or else those that need least memory."""

    def choose(mode: Checkpointing, rows: int) -> Fit:
        settings = StepSettings(
            num_tokens=rows * work.seq_len,
            num_labels=rows * (work.seq_len - 1),
            num_micro_batches=-(-work.num_rows(mesh) // rows),
            checkpointing=mode,
            **{option.name: getattr(work, option.name) for option in fields(StepOptions)},
            has_mask=has_mask,
            has_streams=machine.has_streams,
        )
        memory = estimate_memory(sizes, mesh, settings, seq_len=work.seq_len)
        return Fit(
            mesh=mesh,
            settings=settings,
            micro_batch_size=rows,
            memory=memory,
            usable_bytes=machine.usable_bytes,
            allowance_bytes=round(machine.fragmentation * memory.peak.transient),
        )

    def choose_largest(mode: Checkpointing, share: float) -> Fit:
        fit = choose(mode, micro_batches[0])
        if not fit.fits_in(share):
            number = bisect_left(micro_batches, True, key=lambda n: choose(mode, n).fits_in(share))
            fit = choose(mode, micro_batches[number])
        step = estimate_step(sizes, mesh, fit.settings, machine, seq_len=work.seq_len)
        return replace(fit, step=step)

    has_mask = needs_mask(sizes, work, machine)
    micro_batches = list_micro_batches(work.num_rows(mesh))
    if work.facts.gradients == "unit":
        micro_batches = micro_batches[:1]
    elif work.micro_batch_size is not None:
        micro_batches = [min(work.micro_batch_size, work.num_rows(mesh))]
    modes = _MODES if work.checkpointing is None else (work.checkpointing,)
    # The smallest micro-batch has the fewest activations; one of all rows needs no fp32 sums.
    ends = (micro_batches[-1], micro_batches[0])
    pairs = [[choose(mode, rows) for rows in ends] for mode in modes]
    smallest = [min(pair, key=lambda fit: fit.needed_bytes) for pair in pairs]
    for share in (1 - machine.margin, 1.0) if machine.margin else (1.0,):
        fitting = [
            choose_largest(fit.settings.checkpointing, share)
            for fit in smallest
            if fit.fits_in(share)
        ]
        if fitting:
            # max returns the first of equally fast ones, which recomputes least.
            return max(fitting, key=lambda fit: fit.tokens_per_s)
    return min(smallest, key=lambda fit: fit.needed_bytes)


def describe_faster(sizes: ModelSizes, fit: Fit, work: Work, machine: Machine) -> str | None:
    """Return what is faster on the same mesh and leaves no margin, in a phrase; None: nothing."""
    if not machine.margin or not fit.fits:
        return None
    exact = machine.model_copy(update={"is_measured": True})
    other = find_fit(sizes, fit.mesh, work, exact)
    if other.tokens_per_s <= fit.tokens_per_s:
        return None
    return (
        f"'auto' leaves {format_percent(machine.margin, 0)} of the memory, as no step was measured "
        f"on '{machine.gpu}': activation_checkpointing {other.settings.checkpointing} with "
        f"micro_batch_size {other.micro_batch_size:,} would need {other.needed_bytes / 2**30:.1f} "
        f"of {other.usable_bytes / 2**30:.1f} GiB and reach {other.tokens_per_s:,.0f} "
        f"instead of {fit.tokens_per_s:,.0f} tokens/s"
    )


def needs_mask(sizes: ModelSizes, work: Work, machine: Machine) -> bool:
    """Return whether attention reads a mask of all pairs of tokens (parallel/attention.py)."""
    fits_flash = sizes.head_dim % 8 == 0 and sizes.head_dim <= _LARGEST_FLASH_HEAD
    return not (machine.has_flash and work.compute_bytes == 2 and fits_flash)


def rank_meshes(
    sizes: ModelSizes, meshes: Sequence[MeshShape], work: Work, machine: Machine
) -> tuple[list[Fit], list[Fit]]:
    """Return the meshes that fit, fastest first, and the others, closest to fitting first."""
    fits = [find_fit(sizes, mesh, work, machine) for mesh in meshes]
    fits.sort(key=lambda fit: (-fit.tokens_per_s, fit.needed_bytes))
    return [fit for fit in fits if fit.fits], [fit for fit in fits if not fit.fits]


def find_enough_gpus(sizes: ModelSizes, work: Work, machine: Machine) -> Fit | None:
    """Return the fastest mesh on the smallest number of GPUs that suffices; None if none is found.

    Equal parts of a node are tried first, then whole nodes, starting with the number on which
    weights, gradients and moments fit. If the batch size is given, it must be divisible.
    """
    node, limited = machine.gpus_per_node, limit_sizes(sizes, work)
    least = -(-_count_stored_bytes(sizes, work) // machine.usable_bytes)
    parts = [part for part in range(least, node) if node % part == 0]
    first = -(-least // node)
    nodes = range(first, first + _MAX_NODES_TRIED)
    for num_gpus in (*parts, *(num_nodes * node for num_nodes in nodes)):
        meshes = list_meshes(num_gpus, limited, batch_size=work.batch_size)
        # Those on which every rank stores a different part of the weights.
        promising = [mesh for mesh in meshes if mesh.data == 1]
        ranked, _ = rank_meshes(sizes, promising, work, machine)
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


def find_changed_fit(
    sizes: ModelSizes,
    meshes: Sequence[MeshShape],
    work: Work,
    machine: Machine,
    *,
    first: MeshShape | None,
) -> Fit | None:
    """Return the mesh on which another step fits: the first, or else the fastest; None: none."""
    limited, batch_size, order = limit_sizes(sizes, work), work.batch_size, meshes[0].order
    allowed = list_meshes(meshes[0].num_ranks, limited, batch_size=batch_size, order=order)
    for tried in ([] if first is None else [first], meshes):
        possible = [mesh for mesh in tried if mesh in allowed]
        ranked, _ = rank_meshes(sizes, possible, work, machine)
        if ranked:
            return ranked[0]
    return None


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
        gradients = part.stored * work.weight_bytes if work.facts.gradients == "all" else 0
        state = gradients + part.count_state(work.facts, whole)
        return work.weight_bytes * count_parameters(sizes) + state
    block = block_unit(sizes, whole, is_nf4=adapter.is_nf4)
    stored = sizes.num_layers * block.stored_bytes(work.compute_bytes)
    return stored + sum(unit.stored_bytes(work.compute_bytes) for unit in other_units(sizes, whole))


def list_micro_batches(num_rows: int) -> list[int]:
    """Return the possible micro-batch sizes of a rank's rows, largest first."""
    small = [rows for rows in range(1, math.isqrt(num_rows) + 1) if num_rows % rows == 0]
    return sorted({*small, *(num_rows // rows for rows in small)}, reverse=True)
