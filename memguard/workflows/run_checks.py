"""Checks of a run's settings and processes that do not need torch.

Each check is repeated where it matters, for programs that do not use the command line.
"""

import json
import os
from importlib.util import find_spec
from typing import Any

from memguard.config import AuditConfig, RunConfig, TrainConfig
from memguard.config.mitigations import DeduplicateConfig, DpSgdConfig, find_mitigation
from memguard.errors import ConfigError, ModelError
from memguard.hf.adapter_files import find_config, is_adapter

_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def count_processes(nproc: int) -> int:
    """Return the number of processes, from `--nproc` or from torchrun.

    Args:
        nproc: value of the option.
    """
    if nproc > 1 or not all(os.environ.get(name, "").isdigit() for name in _RANK_NAMES):
        return nproc
    return int(os.environ["WORLD_SIZE"])


def check_processes(config: RunConfig, num_processes: int) -> None:
    """Reject settings that do not work with this number of processes.

    Raises:
        ConfigError: dropout, dp_sgd or device_map with several processes; a missing library; an
            adapter of an adapter.
    """
    check_dropout(config.train, world_size=num_processes)
    check_adapter(config)
    if find_mitigation(config.mitigations, DpSgdConfig) is not None:
        if num_processes > 1:
            raise ConfigError(
                f"'mitigations': dp_sgd clips row by row and needs one process; got "
                f"{num_processes}. Train on one process, or remove dp_sgd"
            )
        if find_spec("opacus") is None:
            raise ConfigError("'mitigations': dp_sgd needs opacus: pip install 'memguard[dp]'")
    if config.audit.enabled:
        check_device_map(config.audit, world_size=num_processes)


def check_dropout(train: TrainConfig, *, world_size: int) -> None:
    """Reject dropout on several ranks, which share activations but would draw different masks.

    Raises:
        ConfigError: says how to fix it.
    """
    if train.dropout and world_size > 1:
        raise ConfigError(
            f"'train.dropout' needs one process; got {train.dropout:g} on {world_size}. Remove "
            "it, or train on one process"
        )


def check_adapter(config: RunConfig) -> None:
    """Reject an adapter on a model that is itself an adapter, which peft could not load.

    Raises:
        ConfigError: says how to fix it.
    """
    path = config.model.path
    if config.adapter is not None and path is not None and is_adapter(path):
        raise ConfigError(
            f"'model.path' must not be an adapter if 'adapter' is set: '{path}' would be the base "
            "of another adapter. Merge it first with memguard export --merge"
        )


def check_device_map(settings: AuditConfig, *, world_size: int) -> None:
    """Reject device_map with several processes, which split the model over their mesh.

    Raises:
        ConfigError: says how to fix it.
    """
    if settings.device_map is not None and world_size > 1:
        raise ConfigError(
            f"'audit.device_map' needs one process; this audit has {world_size}, which split the "
            "model over their mesh. Remove the setting, or use one process."
        )


def check_documents_libraries(config: RunConfig) -> None:
    """Reject the removal of near-copies if rensa, which finds them, is missing.

    Raises:
        ConfigError: rensa is not installed.
    """
    deduplicate = find_mitigation(config.mitigations, DeduplicateConfig)
    if deduplicate is not None and deduplicate.similarity != "exact" and find_spec("rensa") is None:
        raise ConfigError(
            "'mitigations': deduplicate needs rensa: pip install 'memguard[dedup]', or set "
            "'similarity: exact'"
        )


def check_row_length(config: RunConfig) -> None:
    """Reject rows longer than the model's positions, if its configuration is a local file.

    Raises:
        ModelError: names the maximum.
    """
    limit = _find_max_positions(config)
    if isinstance(limit, int) and 0 < limit < config.data.seq_len:
        raise ModelError(
            f"'data.seq_len' must be at most {limit}, the model's max_position_embeddings; "
            f"got {config.data.seq_len}"
        )


def _find_max_positions(config: RunConfig) -> Any:
    """Return max_position_embeddings of the model's configuration; None if not available."""
    if config.model.scratch is not None:
        return config.model.scratch.config.get("max_position_embeddings")
    try:
        fields = json.loads(find_config(config.model.path or "").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    text = fields.get("text_config")
    return (text if isinstance(text, dict) else fields).get("max_position_embeddings")
