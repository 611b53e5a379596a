"""Replaces `auto` in a run's settings by values for its device, before anything reads them.

    setting                   GPU                                        CPU
    precision                 bf16                                       fp32
    micro_batch_size          the largest that fits by the planner       null: all rows
    activation_checkpointing  the fastest that fits by the planner       none

Where the planner cannot estimate the memory of a model, a GPU uses micro-batches of one row and
full checkpointing. Does not import torch.
"""

from typing import Any

from memguard.config import RunConfig
from memguard.config.mitigations import DpSgdConfig, find_mitigation
from memguard.parallel.mesh_shape import resolve_mesh
from memguard.parallel.model_sizes import ModelSizes
from memguard.planner.adapters import AdapterSizes
from memguard.planner.fit import Work, find_fit
from memguard.planner.machine import Machine


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
    train = config.train
    changes: dict[str, Any] = {}
    if train.precision == "auto":
        changes["precision"] = _choose_precision(device_type)
    if "auto" in (train.micro_batch_size, train.activation_checkpointing):
        rows, mode = None, "none"
        if device_type == "cuda":
            rows, mode = _fit(config, sizes, machine, world_size)
        if train.micro_batch_size == "auto":
            changes["micro_batch_size"] = rows
        if train.activation_checkpointing == "auto":
            changes["activation_checkpointing"] = mode
    return config.model_copy(update={"train": train.model_copy(update=changes)})


def _fit(
    config: RunConfig, sizes: ModelSizes | None, machine: Machine | None, world_size: int
) -> tuple[int | None, str]:
    """Return the rows of a micro-batch on a GPU and the checkpointing mode."""
    rows, mode = 1, "full"
    if sizes is not None and machine is not None:
        mesh = resolve_mesh(config.parallel, world_size, sizes, batch_size=config.train.batch_size)
        fit = find_fit(sizes, mesh, describe_work(config, device_type="cuda"), machine)
        rows, mode = fit.micro_batch_size, fit.settings.checkpointing
    # With dp_sgd each row has its own backward pass, and a micro-batch size is refused.
    return (None if _is_private(config) else rows), mode


def describe_work(config: RunConfig, *, device_type: str) -> Work:
    """Return a run's optimizer step for the planner, which on a GPU chooses what is `auto`.

    Args:
        config: the run's settings.
        device_type: "cuda" or "cpu".
    """
    train, is_gpu = config.train, device_type == "cuda"
    rows = train.micro_batch_size
    if rows == "auto":
        rows = None if is_gpu else train.batch_size
    elif rows is None:
        rows = train.batch_size
    mode = train.activation_checkpointing
    precision = _choose_precision(device_type) if train.precision == "auto" else train.precision
    return Work(
        seq_len=config.data.seq_len,
        batch_size=train.batch_size,
        micro_batch_size=1 if _is_private(config) else rows,
        checkpointing=mode if mode != "auto" else None if is_gpu else "none",
        compute_bytes=2 if precision == "bf16" else 4,
        chunk_tokens=train.nll_chunk_tokens,
        reshard_after_forward=config.parallel.reshard_after_forward,
        is_compiled=train.compile,
        adapter=AdapterSizes.from_settings(config.adapter),
        trained_modules=train.trainable_modules,
    )


def _choose_precision(device_type: str) -> str:
    return "bf16" if device_type == "cuda" else "fp32"


def _is_private(config: RunConfig) -> bool:
    return find_mitigation(config.mitigations, DpSgdConfig) is not None
