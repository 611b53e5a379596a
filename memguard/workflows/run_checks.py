"""What of a run's settings and processes is refused before torch is imported.

Each is checked again where it matters, which programs reach that do not start on the command line.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from memguard.config import AuditConfig, RunConfig, TrainConfig
from memguard.config.mitigations import DeduplicateConfig, DpSgdConfig, find_mitigation
from memguard.errors import ConfigError, ModelError

_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def count_processes(nproc: int) -> int:
    """Return the number of processes: those of `--nproc`, or of torchrun.

    Args:
        nproc: as given.
    """
    if nproc > 1 or not all(os.environ.get(name, "").isdigit() for name in _RANK_NAMES):
        return nproc
    return int(os.environ["WORLD_SIZE"])


def check_processes(config: RunConfig, num_processes: int) -> None:
    """Refuse settings that this number of processes cannot train or audit.

    Raises:
        ConfigError: dropout or dp_sgd on several; device_map; a missing library.
    """
    check_dropout(config.train, world_size=num_processes)
    if find_mitigation(config.mitigations, DpSgdConfig) is not None:
        if num_processes > 1:
            raise ConfigError(
                f"'mitigations': dp_sgd clips row by row on one process, and this is on "
                f"{num_processes}. Train on one process, or leave it out"
            )
        if find_spec("opacus") is None:
            raise ConfigError("'mitigations': dp_sgd needs opacus: pip install 'memguard[dp]'")
    if config.audit.enabled:
        check_device_map(config.audit, world_size=num_processes)


def check_dropout(train: TrainConfig, *, world_size: int) -> None:
    """Refuse dropout where ranks that share activations would drop different ones.

    Raises:
        ConfigError: with the way out.
    """
    if train.dropout and world_size > 1:
        raise ConfigError(
            f"'train.dropout' is for one process; got {train.dropout:g} on {world_size}. Leave it "
            "out, or train on one"
        )


def check_device_map(settings: AuditConfig, *, world_size: int) -> None:
    """Refuse a model spread by one process where several split it.

    Raises:
        ConfigError: with the way out.
    """
    if settings.device_map is not None and world_size > 1:
        raise ConfigError(
            f"'audit.device_map' spreads a model from one process; this audit has {world_size}, "
            "which split it over their mesh. Leave one of the two out."
        )


def check_documents_libraries(config: RunConfig) -> None:
    """Refuse near-copies to be removed without the library that finds them.

    Raises:
        ConfigError: it is not installed.
    """
    deduplicate = find_mitigation(config.mitigations, DeduplicateConfig)
    if deduplicate is not None and deduplicate.similarity != "exact" and find_spec("rensa") is None:
        raise ConfigError(
            "'mitigations': deduplicate needs rensa: pip install 'memguard[dedup]', or set "
            "'similarity: exact'"
        )


def check_row_length(config: RunConfig) -> None:
    """Refuse rows longer than the model has positions for, where its settings are at hand.

    Raises:
        ModelError: with the most.
    """
    limit = _find_max_positions(config)
    if isinstance(limit, int) and 0 < limit < config.data.seq_len:
        raise ModelError(
            f"'data.seq_len' must be at most {limit}, the model's max_position_embeddings; "
            f"got {config.data.seq_len}"
        )


def _find_max_positions(config: RunConfig) -> Any:
    """Return what the model's own settings say; None where they are not here, or do not say."""
    if config.model.scratch is not None:
        return config.model.scratch.config.get("max_position_embeddings")
    try:
        fields = json.loads((Path(config.model.path or "") / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    text = fields.get("text_config")
    return (text if isinstance(text, dict) else fields).get("max_position_embeddings")
