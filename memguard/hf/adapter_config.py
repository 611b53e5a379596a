"""Reads adapter_config.json of a peft folder and locates the base that it names, without torch.

Fields that do not change the merged weights are ignored. Any other field, and any value of a known
one that would change the model in another way, is refused by name.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard.config import RunConfig, load_run_config
from memguard.errors import MAX_PATH, MemguardError, ModelError, shorten
from memguard.hf.checkpoint_files import ADAPTER_CONFIG, CONFIG, is_missing, quote, read_fields

_MAX_CONFIG_BYTES = 4 << 20
_MAX_RANK = 1 << 16
_MAX_ALPHA = 10**6
_MAX_TEXT = 4096
# Initialisations that leave the base as it is; the others (pissa, olora, corda, loftq, ...) change
# its weights, and the saved adapter is relative to the changed ones.
_INITS = (True, False, None, "gaussian", "orthogonal")
# Fields of training, of other libraries, and those whose result is in the tensors.
_WITHOUT_EFFECT = (
    *("auto_mapping", "peft_version", "inference_mode", "lora_dropout", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core"),
    *("qalora_group_size", "runtime_config", "ensure_weight_tying"),
)
_NEUTRAL: tuple[Any, ...] = (None, False, "", [], {})


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
    """Read and check the configuration of an adapter; ``name`` is for messages.

    Raises:
        ModelError: a field is invalid, or changes the model in a way that is not supported.
    """
    fields = read_fields(folder / ADAPTER_CONFIG, name=name, most_bytes=_MAX_CONFIG_BYTES)
    for field, (is_right, rule) in _RULES.items():
        if not is_right(value := fields.get(field, _DEFAULTS.get(field))):
            raise _refused(name, field, value, rule)
    for field, value in fields.items():
        if field not in (*_RULES, "rank_pattern", *_WITHOUT_EFFECT) and value not in _NEUTRAL:
            raise _refused(name, field, value, "is not supported; merge the adapter with peft")
    return AdapterConfig(
        base=fields["base_model_name_or_path"],
        revision=fields.get("revision"),
        r=fields["r"],
        alpha=float(fields["lora_alpha"]),
        use_rslora=fields.get("use_rslora", False),
        use_dora=fields.get("use_dora", False),
        has_rank_pattern=bool(fields.get("rank_pattern")),
    )


def _refused(name: str, field: str, value: Any, rule: str) -> ModelError:
    return ModelError(f"model '{name}': {ADAPTER_CONFIG}: '{field}' {rule}; got {quote(value)}")


def _is_alpha(value: Any) -> bool:
    # NaN fails the comparison, and so do integers that no float can hold.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -_MAX_ALPHA <= value <= _MAX_ALPHA


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_TEXT and value.isprintable()


_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "peft_type": (lambda value: value == "LORA", "must be LORA"),
    "task_type": (lambda value: value in (None, "CAUSAL_LM"), "must be CAUSAL_LM"),
    "bias": (
        lambda value: value == "none",
        "must be none, as trained biases are not read; merge the adapter with peft",
    ),
    "init_lora_weights": (
        lambda value: value is None or (isinstance(value, bool | str) and value in _INITS),
        "must be true, false, gaussian or orthogonal: others change the base, so that the adapter "
        "does not belong to the plain one. peft converts it "
        "(path_initial_model_for_weight_conversion)",
    ),
    "base_model_name_or_path": (_is_text, "must name the base model"),
    "revision": (
        lambda value: value is None or _is_text(value),
        "must be a revision of the base model",
    ),
    "r": (
        lambda value: type(value) is int and 1 <= value <= _MAX_RANK,
        f"must be a whole number from 1 to {_MAX_RANK:,}",
    ),
    "lora_alpha": (_is_alpha, f"must be a number from -{_MAX_ALPHA:,} to {_MAX_ALPHA:,}"),
    "use_rslora": (lambda value: isinstance(value, bool), "must be true or false"),
    "use_dora": (lambda value: isinstance(value, bool), "must be true or false"),
}
"""The fields that are read, each with its check and the rule for its value."""
_DEFAULTS: Mapping[str, Any] = {"bias": "none", "use_rslora": False, "use_dora": False}


def find_base(folder: Path, base: str, name: str, *, named: str | None = None) -> str:
    """Return the base's folder, or the name itself if it may be a hub id.

    A relative path is read as peft does, from the current folder, and then from the adapter's. The
    base of a run may have been moved together with the run.

    ``base`` is the path or hub id in the configuration of the adapter ``name`` in ``folder``; of
    one ``named`` by the user no other is tried.

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
    wrong = ""
    if located == base and is_missing(base):
        wrong = f"is missing. {way_out}"
    elif (Path(located) / ADAPTER_CONFIG).is_file():
        wrong = f"is an adapter itself ({ADAPTER_CONFIG}). Merge that one first"
        wrong += " (memguard export --merge)"
    if wrong:
        shown = shorten(located, MAX_PATH)
        raise ModelError(f"adapter '{name}': its base model '{shown}' {wrong}")
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

    The folder is at its current location; ``config`` has the paths before the move.
    """
    path, before = config.model.path, Path(config.output_dir) / config.name
    if path is None or Path(path).exists() or Path(path).is_absolute() != before.is_absolute():
        return None
    moved = Path(os.path.normpath(run_folder.resolve() / os.path.relpath(path, before)))
    return str(moved) if (moved / CONFIG).is_file() else None
