"""One run, one folder: kept to one process and to the settings it was begun with. No torch."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memguard.config import RunConfig, load_yaml
from memguard.errors import ConfigError, RecordError
from memguard.records.run_files import find_config_damage, find_run_keys, has_begun, load_summary
from memguard.records.sealed import Damage

if TYPE_CHECKING:
    from memguard.data.corpus import Corpus
    from memguard.runtime import Console

# Settings that may differ when a run goes on: they do not change what is trained.
_FREE = ("name", "output_dir", "audit", "parallel")
_FREE_IN_TRAIN = (
    "activation_checkpointing",
    "compile",
    "checkpoint_every_steps",
    "keep_checkpoints",
    "log_every_steps",
)
# What is written under another name first, by folder: below a run's, or that of an audit elsewhere.
_AUDIT = ("records.parquet", "report.json", "report.html", "audit.json")
_RUN = ("config.yaml", "manifest.jsonl", "metrics.jsonl", "trained.json", "environment.json")
_WRITTEN_ASIDE = {
    ".": ("model", "prepared", *_RUN, "reference_nll.npy", "reference_nll.json", *_AUDIT),
    "model": ("README.md",),
    "checkpoints": ("step-N",),
    "audit": _AUDIT,
    "audit/private": ("hmac.key", "excerpts.txt"),
    "private": ("excerpts.txt",),
}


@contextmanager
def locked(folder: Path) -> Iterator[Callable[[], None]]:
    """Make a run's folder and keep a second process out of it; the lock goes with the process.

    Yields:
        What raises a RecordError where the folder of that name is no longer the one locked here.

    Raises:
        ConfigError: another process is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _is_at_work(folder) from error
        _clear_half_written(folder)
        yield partial(_check_held, folder, handle)
    finally:
        os.close(handle)


def _check_held(folder: Path, handle: int) -> None:
    """Refuse to write where a folder was deleted, renamed or replaced: it would be made in part.

    Raises:
        RecordError: the lock that lies there is not the one held.
    """
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(folder / ".lock"), os.fstat(handle)):
            return
    raise RecordError(
        f"'{folder}' was deleted, renamed or replaced while a command was at work in it, which "
        "ends here: bring it back and run the same command again"
    )


def check_free(folder: Path) -> None:
    """Refuse a folder that cannot be made or written to, or where a process is at work.

    Makes and holds nothing; it tells within a second what `locked` would tell after torch.

    Raises:
        ConfigError: another process is at work there.
        OSError: it cannot be written to.
    """
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    if (folder / ".lock").exists():
        with (folder / ".lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise _is_at_work(folder) from error


def _is_at_work(folder: Path) -> ConfigError:
    return ConfigError(
        f"another process is at work in '{folder}'; wait for it, or choose another 'name'"
    )


def _clear_half_written(folder: Path) -> None:
    """Delete what a killed process was writing aside: no other process can be at it."""
    for place, names in _WRITTEN_ASIDE.items():
        # A link leads to what is not the run's.
        if not (folder / place).is_dir() or (folder / place).is_symlink():
            continue
        for left in (folder / place).iterdir():
            # As `make_aside`, `hide` and `write_atomically` name it; a user's own files stay.
            named = re.fullmatch(r"\.(.+)\.([a-z0-9_]{8}|old)", left.name)
            if named is None or left.is_symlink():
                continue
            if re.sub(r"^step-\d+$", "step-N", named[1]) not in names:
                continue
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def compute_run_key(config: RunConfig, corpus: "Corpus") -> str:
    """Return the hash of what is trained: a checkpoint with another one belongs elsewhere."""
    return hash_run(config, corpus.summary.documents_sha256)


def hash_run(config: RunConfig, documents_sha256: str) -> str:
    """Return the same, given the hash of the documents."""
    text = json.dumps([_binding(config.model_dump(mode="json")), documents_sha256])
    return hashlib.sha256(text.encode()).hexdigest()


def _binding(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide what is trained."""
    kept = {key: value for key, value in values.items() if key not in _FREE}
    kept["train"] = {k: v for k, v in kept["train"].items() if k not in _FREE_IN_TRAIN}
    return kept


def check_same_settings(config: RunConfig, folder: Path, console: "Console") -> None:
    """Refuse a folder in which something else has been trained already.

    Raises:
        ConfigError: it holds a run with other settings.
    """
    path = folder / "config.yaml"
    damages = find_config_damage(folder) if path.exists() else []
    if damages:
        _check_damaged(config, folder, damages[0], console)
        return
    if not (path.exists() and has_begun(folder)):
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


def _check_damaged(config: RunConfig, folder: Path, damage: Damage, console: "Console") -> None:
    """Hold settings against what was trained, where those that were written are damaged."""
    trained, summary = find_run_keys(folder), load_summary(folder)
    if trained and summary and hash_run(config, summary.documents_sha256) not in trained:
        raise ConfigError(
            f"'{folder}': {damage}, and what was trained there was trained with other settings "
            "than these. Give those, choose another 'name', or delete that folder."
        )
    console.warn(f"{damage}; the settings given now are taken")


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
