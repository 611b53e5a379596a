"""One run, one folder: kept to one process and to the settings it was begun with."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memguard.config import RunConfig, load_yaml
from memguard.data.corpus import Corpus
from memguard.errors import ConfigError

# Settings that may differ when a run goes on: they do not change what is trained.
_FREE = ("name", "output_dir", "audit", "parallel")
_FREE_IN_TRAIN = (
    "activation_checkpointing",
    "compile",
    "checkpoint_every_steps",
    "keep_checkpoints",
    "log_every_steps",
)
_WRITTEN_ASIDE = ("model", "prepared")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a run's folder and keep a second process out of it; the lock goes with the process.

    Raises:
        ConfigError: another process is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process is at work in '{folder}'; wait for it, or choose another 'name'"
            ) from error
        _clear_half_written(folder)
        yield
    finally:
        os.close(handle)


def _clear_half_written(folder: Path) -> None:
    """Delete what a killed process was writing aside: nobody else can be at it."""
    for name in _WRITTEN_ASIDE:
        for left in folder.glob(f".{name}.*"):
            shutil.rmtree(left, ignore_errors=True)


def compute_run_key(config: RunConfig, corpus: Corpus) -> str:
    """Return the hash of what is trained: a checkpoint with another one belongs elsewhere."""
    text = json.dumps([_binding(config.model_dump(mode="json")), corpus.summary.documents_sha256])
    return hashlib.sha256(text.encode()).hexdigest()


def _binding(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide what is trained."""
    kept = {key: value for key, value in values.items() if key not in _FREE}
    kept["train"] = {k: v for k, v in kept["train"].items() if k not in _FREE_IN_TRAIN}
    return kept


def check_same_settings(config: RunConfig, folder: Path) -> None:
    """Refuse a folder in which something else has been trained already."""
    path = folder / "config.yaml"
    if not (path.exists() and (folder / "metrics.jsonl").exists()):
        return
    before = load_yaml(path)
    old, new = _binding(before.values), _binding(config.model_dump(mode="json"))
    differences = _differences(old, new)
    if differences:
        differing = [f"{key} ({_short(a)} there, {_short(b)} here)" for key, a, b in differences]
        raise ConfigError(
            f"'{folder}' holds a run with other settings: {'; '.join(differing[:4])}"
            f"{f' and {len(differing) - 4} more' if len(differing) > 4 else ''}. "
            "Choose another 'name', or delete that folder."
        )


def _differences(old: Any, new: Any, at: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [
            difference
            for key in keys
            for difference in _differences(old.get(key), new.get(key), f"{at}.{key}" if at else key)
        ]
    return [] if old == new else [(at, old, new)]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
