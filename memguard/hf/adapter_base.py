"""Locates the base model of an adapter, without torch."""

import os
from pathlib import Path

from memguard.config import RunConfig, load_run_config
from memguard.errors import MAX_PATH, MemguardError, ModelError, shorten
from memguard.hf.checkpoint_files import ADAPTER_CONFIG, CONFIG, is_missing


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
