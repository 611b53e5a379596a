"""What both rooms check before torch is imported: paths, mesh, processes, one model's settings.

One message lists all missing paths. Hub ids are not checked; loading them reports errors.
"""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from memguard.config import AuditConfig, AxisName, Document, ParallelConfig, RunConfig, validate
from memguard.config.mitigations import DpSgdConfig, find_mitigation
from memguard.data import sources
from memguard.errors import (
    MAX_PATH,
    ConfigError,
    DataError,
    ModelError,
    check_name,
    escape_name,
    list_first,
    shorten,
)
from memguard.hf import adapter_files, checkpoint_files
from memguard.hf.config_fields import is_ternary
from memguard.records.texts import shorten_paths
from memguard.runtime.environment import count_gpus, is_cpu_build

_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_MOST_MISSING = 20
"""Maximum number of paths in one message."""
_DEVICE_MAP_ALONE = "'audit.device_map' needs one process: several split the model over their mesh"


def make_command(*arguments: str) -> str:
    """Return the user's command for a record, with absolute paths shortened to their end.

    Records are shared with others; full local paths must not be.
    """
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    if not arguments and name != "memguard":
        return "memguard.api, called by another program"
    words = map(shorten_paths, map(escape_name, arguments or sys.argv[1:]))
    return shlex.join(["memguard", *words])


def read_mesh(text: str, *, command: str) -> ParallelConfig:
    """Parse a mesh, ``z=2,x=2``; axes that are not given have one rank."""
    names: tuple[str, ...] = get_args(AxisName)
    parts = [part.partition("=") for part in text.split(",")]
    degrees: dict[str, Any] = {axis.strip(): degree.strip() for axis, _, degree in parts}
    unknown = [axis for axis in degrees if axis not in names]
    if unknown or len(degrees) < len(parts):
        raise ConfigError(
            f"'--mesh' must give each of {', '.join(names)} at most once, as in z=2,x=2; "
            f"got '{text}'"
        )
    place = Document(path=f"memguard {command} --mesh", values={}, places={})
    return validate(ParallelConfig, {"data": 1, "z": 1} | degrees, place)


def check_paths(
    documents: Mapping[str, Sequence[str]],
    models: Mapping[str, str | None],
    tokenizers: Mapping[str, str | None] = {},
) -> None:
    """Raise one error that names all missing paths; then check the models' folders.

    Documents, models and tokenizers by setting, ``data.train`` or ``--members``.
    """
    for setting, given in documents.items():
        for source in given:
            check_name(source, setting, DataError)
    for setting, model in {**models, **tokenizers}.items():
        if model is not None:
            check_name(model, setting, ModelError)
    no_documents = [
        f"'{setting}': {lacking}"
        for setting, given in documents.items()
        for source in given
        if (lacking := sources.describe_missing(source))
    ]
    no_models = [
        f"'{setting}': there is no folder '{shorten(path, MAX_PATH)}'"
        for setting, path in {**models, **tokenizers}.items()
        if path is not None and checkpoint_files.is_missing(path)
    ]
    missing = [*no_documents, *no_models]
    if missing:
        kind = DataError if no_documents else ModelError
        way_out = "Correct the path." if len(missing) == 1 else "Correct the paths."
        raise kind(f"{list_first(missing, _MOST_MISSING, join='; ')}. {way_out}")
    for setting, given in documents.items():
        for source in given:
            sources.check_source(source, setting=setting)
    for path in models.values():
        if path is not None:
            adapter_files.check_model(path)


def count_usable_gpus() -> int:
    """Return the number of GPUs that processes started here would have; 0 under torchrun."""
    return 0 if "LOCAL_RANK" in os.environ or is_cpu_build() else count_gpus()


def count_processes(nproc: int) -> int:
    """Return the number of processes, from `--nproc` (`nproc`) or from torchrun."""
    if nproc > 1 or not all(os.environ.get(name, "").isdigit() for name in _RANK_NAMES):
        return nproc
    return int(os.environ["WORLD_SIZE"])


def explain_one_process(config: RunConfig) -> str | None:
    """Return which setting of a run needs a single process, and why; None if there is none."""
    if find_mitigation(config.mitigations, DpSgdConfig) is not None:
        return "'mitigations': dp_sgd clips row by row and needs one process"
    if config.train.dropout:
        return (
            f"'train.dropout' {config.train.dropout:g} needs one process: ranks that share "
            "activations would drop different ones"
        )
    if config.audit.enabled and config.audit.device_map is not None:
        return _DEVICE_MAP_ALONE
    return None


def check_device_map(settings: AuditConfig, *, world_size: int, is_adapter: bool) -> None:
    """Reject device_map with an adapter, which is merged on one device, or several processes."""
    if settings.device_map is None or not (is_adapter or world_size > 1):
        return
    raise ConfigError(
        "'audit.device_map' cannot be combined with an adapter, which is merged on one device. "
        "Split the model over several processes (--nproc), or merge it with memguard export "
        "--merge and audit the result"
        if is_adapter
        else f"{_DEVICE_MAP_ALONE}; got {world_size}. Remove the setting, or use one process"
    )


def has_ternary_weights(path: str) -> bool:
    """Return whether a local model, or an adapter's base, rounds its weights in each forward."""
    return is_ternary(read_local_config(path).get("quantization_config"))


def read_local_config(path: str) -> dict[str, Any]:
    """Return the fields of a model's config.json; empty if it is not a readable local file."""
    try:
        fields = json.loads(adapter_files.find_config(path).read_bytes())
    except (OSError, ValueError, RecursionError, ModelError):
        return {}
    return fields if isinstance(fields, dict) else {}
