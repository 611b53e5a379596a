"""Checks of a run's settings and processes that do not need torch.

`train_run` repeats those of processes, for programs that do not use the command line.
"""

import json
import math
from typing import Any

from memguard.config import AuditConfig, RunConfig
from memguard.config.adapters import matches_target, refuse_target
from memguard.config.mitigations import DeduplicateConfig, DpSgdConfig, find_mitigation
from memguard.errors import ConfigError, ModelError, require_library
from memguard.hf.adapter_files import find_config, is_adapter
from memguard.hf.config_fields import check_positions, is_ternary
from memguard.parallel.mesh_shape import AXES
from memguard.parallel.model_sizes import ESTIMATED_FAMILIES, ModelSizes


def check_processes(config: RunConfig, num_processes: int) -> None:
    """Reject settings that do not work with this number of processes.

    Raises:
        ConfigError: a setting that needs one process; a quantised base on y or x; a missing
            library; an adapter of an adapter.
    """
    why = explain_one_process(config)
    if num_processes > 1 and why is not None:
        raise ConfigError(f"{why}; got {num_processes}. Remove the setting, or use one process")
    check_adapter(config)
    check_quantization(config, world_size=num_processes)
    if (dp_sgd := find_mitigation(config.mitigations, DpSgdConfig)) is not None:
        dp_sgd.check_library()
    if config.audit.enabled:
        check_device_map(config.audit, world_size=1, is_adapter=config.adapter is not None)


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


_DEVICE_MAP_ALONE = "'audit.device_map' needs one process: several split the model over their mesh"


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


_LINEAR_LAYERS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
"""Of each block of `ESTIMATED_FAMILIES`."""


def check_targets(config: RunConfig) -> None:
    """Reject a name in `adapter.target_modules` that matches no layer of a known family.

    Models whose configuration is not a local file, and other families, are checked once torch is
    imported (`setup.check_layers`).

    Raises:
        ConfigError: names the layers that exist.
    """
    if config.adapter is None or config.adapter.target_modules == "all-linear":
        return
    fields = _read_local_config(config.model.path or "")
    family, num_blocks = fields.get("model_type"), fields.get("num_hidden_layers")
    if family not in ESTIMATED_FAMILIES or not isinstance(num_blocks, int) or num_blocks > 10**4:
        return
    layers = [f"model.layers.{i}.{name}" for i in range(num_blocks) for name in _LINEAR_LAYERS]
    for target in config.adapter.target_modules:
        if not any(matches_target(layer, (target,)) for layer in layers):
            raise refuse_target(target, family, layers)


def check_quantization(config: RunConfig, *, world_size: int) -> None:
    """Reject a quantised base over y or x, of ternary weights, or without its library.

    Raises:
        ConfigError: says how to fix it.
    """
    if config.adapter is None or config.adapter.quantization is None:
        return
    degrees = {axis: getattr(config.parallel, axis) for axis in AXES}
    rest = world_size // math.prod(degree for degree in degrees.values() if degree != -1)
    split = [axis for axis in AXES[2:] if (degrees[axis] if degrees[axis] != -1 else rest) > 1]
    if split and world_size > 1:
        names = " and ".join(f"'parallel.{axis}'" for axis in split)
        got = ", ".join(str(degrees[axis]) for axis in split)
        raise ConfigError(
            f"{names} must be 1 with 'adapter.quantization'; got {got}: weights in nf4 are split "
            "over z only. Use the axes data and z, or remove the setting"
        )
    path = config.model.path
    if path is not None and has_ternary_weights(path):
        raise ConfigError(
            f"'adapter.quantization' must not be set for '{path}', whose layers already round "
            "their weights ('quantization_config' in its config.json) and have no adapters: "
            "remove 'adapter' to train its weights"
        )
    require_library("bitsandbytes", "'adapter.quantization': nf4", extra="quant")


def check_device_map(settings: AuditConfig, *, world_size: int, is_adapter: bool) -> None:
    """Reject device_map with several processes, which split the model over their mesh.

    Args:
        settings: of the audit.
        world_size: number of processes.
        is_adapter: whether the audited model is an adapter, which is merged in memory.

    Raises:
        ConfigError: says how to fix it.
    """
    if settings.device_map is not None and is_adapter:
        raise ConfigError(
            "'audit.device_map' cannot be combined with an adapter, which is merged on one device. "
            "Split the model over several processes (--nproc), or merge it with memguard export "
            "--merge and audit the result"
        )
    if settings.device_map is not None and world_size > 1:
        raise ConfigError(
            f"{_DEVICE_MAP_ALONE}; got {world_size}. Remove the setting, or use one process"
        )


def check_documents_libraries(config: RunConfig) -> None:
    """Reject the removal of near-copies if rensa, which finds them, is missing.

    Raises:
        ConfigError: rensa is not installed.
    """
    deduplicate = find_mitigation(config.mitigations, DeduplicateConfig)
    if deduplicate is not None:
        deduplicate.check_library()


def check_row_length(config: RunConfig) -> None:
    """Reject rows longer than the model's positions, if its configuration is a local file.

    Raises:
        ModelError: names the maximum.
    """
    check_positions(_find_max_positions(config), config.data.seq_len)


def _find_max_positions(config: RunConfig) -> Any:
    """Return max_position_embeddings of the model's configuration; None if not available."""
    if config.model.scratch is not None:
        return config.model.scratch.config.get("max_position_embeddings")
    fields = _read_local_config(config.model.path or "")
    text = fields.get("text_config")
    return (text if isinstance(text, dict) else fields).get("max_position_embeddings")


def read_local_sizes(config: RunConfig) -> ModelSizes | None:
    """Return the sizes of a model in a local folder.

    None if the model is not there, or if its memory cannot be estimated.
    """
    if config.model.path is None or config.model.attn_implementation == "eager":
        return None
    try:
        return ModelSizes.from_json(_read_local_config(config.model.path))
    except (ValueError, ModelError):
        return None


def has_ternary_weights(path: str) -> bool:
    """Return whether a local model, or an adapter's base, rounds its weights in each forward."""
    return is_ternary(_read_local_config(path).get("quantization_config"))


def _read_local_config(path: str) -> dict[str, Any]:
    """Return the fields of a model's config.json; empty if it is not a readable local file."""
    try:
        fields = json.loads(find_config(path).read_bytes())
    except (OSError, ValueError, RecursionError, ModelError):
        return {}
    return fields if isinstance(fields, dict) else {}
