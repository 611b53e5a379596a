"""Reads adapter_config.json of a peft folder and locates the base that it names, without torch.

Fields that do not change the merged weights are ignored. Any other field, and any value of a known
one that would change the model in another way, is refused by name.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard.config import RunConfig, load_run_config
from memguard.errors import MAX_PATH, MemguardError, ModelError, shorten
from memguard.hf.checkpoint_files import ADAPTER_CONFIG, CONFIG, is_missing, quote, read_json

_MAX_CONFIG_BYTES = 4 << 20
_MAX_RANK = 1 << 16
_MAX_ALPHA = 10**6
_MAX_TEXT = 4096
# Initialisations that leave the base as it is; the others (pissa, olora, corda, loftq, ...) change
# its weights, and the saved adapter is relative to the changed ones.
_INITS = (True, False, None, "gaussian", "orthogonal")
_READ = (
    *("peft_type", "task_type", "base_model_name_or_path", "revision", "r", "lora_alpha"),
    *("use_rslora", "use_dora", "init_lora_weights", "bias", "rank_pattern"),
)
# Fields of training, of other libraries, and those whose result is in the tensors.
_WITHOUT_EFFECT = (
    *("auto_mapping", "peft_version", "inference_mode", "lora_dropout", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core"),
    *("qalora_group_size", "runtime_config", "ensure_weight_tying"),
)
_NEUTRAL: tuple[Any, ...] = (None, False, "", [], {})
_TASKS = (None, "CAUSAL_LM")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """The fields of adapter_config.json that determine the merged weights."""

    base: str
    """Path or hub id of the base model, as written."""
    revision: str | None
    """Of a hub id."""
    r: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    has_rank_pattern: bool
    """Layers may have other ranks than `r`; their tensors show which."""


def read_config(folder: Path, name: str) -> AdapterConfig:
    """Read and check the configuration of an adapter.

    Args:
        folder: with the adapter.
        name: of the adapter, for messages.

    Raises:
        ModelError: a field is invalid, or changes the model in a way that is not supported.
    """
    fields = _read_fields(folder, name)
    base, revision = fields.get("base_model_name_or_path"), fields.get("revision")
    if not isinstance(base, str) or not _is_text(base):
        raise _refused(name, "base_model_name_or_path", base, "must name the base model")
    if revision is not None and not _is_text(revision):
        raise _refused(name, "revision", revision, "must be a revision of the base model")
    return AdapterConfig(
        base=base,
        revision=revision,
        r=_read_rank(fields, name),
        alpha=_read_alpha(fields, name),
        use_rslora=_read_flag(fields, "use_rslora", name),
        use_dora=_read_flag(fields, "use_dora", name),
        has_rank_pattern=bool(fields.get("rank_pattern")),
    )


def _read_fields(folder: Path, name: str) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ModelError(
            f"model '{name}': {ADAPTER_CONFIG} must be at most {_MAX_CONFIG_BYTES >> 20} MiB; it "
            f"has {path.stat().st_size >> 20}"
        )
    fields = read_json(path, name=name)
    if not isinstance(fields, dict):
        raise ModelError(f"model '{name}': {ADAPTER_CONFIG} must be a JSON object")
    if fields.get("peft_type") != "LORA":
        raise _refused(name, "peft_type", fields.get("peft_type"), "must be LORA")
    if fields.get("task_type") not in _TASKS:
        raise _refused(name, "task_type", fields["task_type"], "must be CAUSAL_LM")
    if fields.get("bias", "none") != "none":
        rule = "must be none, as trained biases are not read; merge the adapter with peft"
        raise _refused(name, "bias", fields["bias"], rule)
    init = fields.get("init_lora_weights")
    if not any(init is value or (isinstance(init, str) and init == value) for value in _INITS):
        rule = (
            "must be true, false, gaussian or orthogonal: others change the base, so that the "
            "adapter does not belong to the plain one. peft converts it "
            "(path_initial_model_for_weight_conversion)"
        )
        raise _refused(name, "init_lora_weights", init, rule)
    for field, value in fields.items():
        if field not in (*_READ, *_WITHOUT_EFFECT) and value not in _NEUTRAL:
            raise _refused(name, field, value, "is not supported; merge the adapter with peft")
    return fields


def _read_flag(fields: Mapping[str, Any], field: str, name: str) -> bool:
    value = fields.get(field, False)
    if not isinstance(value, bool):
        raise _refused(name, field, value, "must be true or false")
    return value


def _read_rank(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get("r")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_RANK:
        raise _refused(name, "r", value, f"must be a whole number from 1 to {_MAX_RANK:,}")
    return value


def _read_alpha(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get("lora_alpha")
    # NaN fails the comparison, and so do integers that no float can hold.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not is_number or not -_MAX_ALPHA <= value <= _MAX_ALPHA:
        rule = f"must be a number from -{_MAX_ALPHA:,} to {_MAX_ALPHA:,}"
        raise _refused(name, "lora_alpha", value, rule)
    return float(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_TEXT and value.isprintable()


def _refused(name: str, field: str, value: Any, rule: str) -> ModelError:
    return ModelError(f"model '{name}': {ADAPTER_CONFIG}: '{field}' {rule}; got {quote(value)}")


def find_base(folder: Path, base: str, name: str, *, named: str | None = None) -> str:
    """Return the base's folder, or the name itself if it may be a hub id.

    A relative path is read as peft does, from the current folder, and then from the adapter's. The
    base of a run may have been moved together with the run.

    Args:
        folder: with the adapter.
        base: path or hub id in the adapter's configuration.
        name: of the adapter, for messages.
        named: path or hub id given by the user; no other is tried.

    Raises:
        ModelError: the path does not exist, or it is an adapter itself.
    """
    if named is not None:
        base = located = named
        way_out = "Correct '--base'"
    else:
        candidates = [Path(base), folder / base]
        located = next((str(candidate) for candidate in candidates if candidate.is_dir()), base)
        if located == base and not Path(base).exists():
            located = _find_base_of_run(folder) or base
        way_out = f"Restore that folder, or {say_where_base_is(folder)}"
    if located == base and is_missing(base):
        raise ModelError(
            f"adapter '{name}': its base model '{shorten(base, MAX_PATH)}' is missing. {way_out}"
        )
    if (Path(located) / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"adapter '{name}': its base model '{shorten(located, MAX_PATH)}' is an adapter itself "
            f"({ADAPTER_CONFIG}). Merge that one first (memguard export --merge)"
        )
    return located


def say_where_base_is(folder: Path) -> str:
    """Return how the user names the location of an adapter's base, a clause for messages."""
    if (run := find_run_of(folder)) is not None:
        # The configuration of a run's adapter is sealed.
        return f"name its location with --base DIR (memguard audit, verify or export {run})"
    return f"correct 'base_model_name_or_path' in {ADAPTER_CONFIG}"


def find_run_of(folder: Path) -> Path | None:
    """Return the folder of the run that an adapter belongs to; None if it is not in a run."""
    parent = folder.parent
    is_run = folder.name == "adapter" and (parent / "config.yaml").is_file()
    return parent if is_run else None


def _find_base_of_run(folder: Path) -> str | None:
    """Return the moved base of an adapter in a run's folder; None if there is none."""
    run = find_run_of(folder.resolve())
    if run is None:
        return None
    try:
        return find_moved_base(run, load_run_config(run / "config.yaml"))
    except MemguardError:
        return None


def find_moved_base(run_folder: Path, config: RunConfig) -> str | None:
    """Return the model that a run started from if both were moved together.

    Args:
        run_folder: of the run, at its current location.
        config: of the run, with the paths before the move.
    """
    path, before = config.model.path, Path(config.output_dir) / config.name
    if path is None or Path(path).exists() or Path(path).is_absolute() != before.is_absolute():
        return None
    moved = Path(os.path.normpath(run_folder.resolve() / os.path.relpath(path, before)))
    return str(moved) if (moved / CONFIG).is_file() else None
