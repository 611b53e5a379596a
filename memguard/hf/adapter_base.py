"""Locates the base model of an adapter, without torch."""

import os
from pathlib import Path

from memguard.config import RunConfig, load_run_config
from memguard.errors import MAX_PATH, MemguardError, ModelError, shorten
from memguard.hf.checkpoint_files import ADAPTER_CONFIG, CONFIG, is_missing


def find_base(folder: Path, base: str, name: str) -> str:
    """Return the base's folder, or the name itself if it may be a hub id.

    A relative path is read as peft does, from the current folder, and then from the adapter's. The
    base of a run may have been moved together with the run.

    Raises:
        ModelError: the path does not exist, or it is an adapter itself.
    """
    candidates = [Path(base), folder / base]
    found = next((str(candidate) for candidate in candidates if candidate.is_dir()), base)
    if found == base and not Path(base).exists():
        found = _find_base_of_run(folder) or base
    if found == base and is_missing(base):
        raise ModelError(
            f"adapter '{name}': its base model '{shorten(base, MAX_PATH)}' is missing. Restore "
            f"that folder, or correct 'base_model_name_or_path' in {ADAPTER_CONFIG}"
        )
    if (Path(found) / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"adapter '{name}': its base model '{shorten(found, MAX_PATH)}' is an adapter itself "
            f"({ADAPTER_CONFIG}). Merge that one first (memguard export --merge)"
        )
    return found


def _find_base_of_run(folder: Path) -> str | None:
    """Return the moved base of an adapter in a run's folder; None if there is none."""
    path = folder.resolve()
    if path.name != "adapter" or not (path.parent / "config.yaml").is_file():
        return None
    try:
        return find_moved_base(path.parent, load_run_config(path.parent / "config.yaml"))
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
