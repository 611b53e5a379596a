"""Locks a run's folder for one process; checks its settings and files. Does not import torch."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memguard.config import RunConfig, load_run_config, load_yaml
from memguard.errors import (
    MAX_PATH,
    ConfigError,
    MemguardError,
    ModelError,
    RecordError,
    check_name,
    list_first,
    shorten,
)
from memguard.hf.checkpoint_files import ADAPTER_CONFIG
from memguard.hf.identity import BASE, hash_sums, sum_model
from memguard.records import AuditReport
from memguard.records.folders import UNLISTED, RunFiles
from memguard.records.record import TEMPORARY
from memguard.records.run_files import (
    PreparedSummary,
    TrainedRun,
    find_run_keys,
    find_weights_folder,
    has_begun,
    has_prepared,
    has_trained,
    has_weights,
    list_checkpoints,
    list_other_model_files,
    load_summary,
    load_trained,
    name_checkpoint,
)
from memguard.records.sealed import SumFile, refuse_damage, sum_file

if TYPE_CHECKING:
    from memguard.runtime import Console

REPAIR_CONFIG = "'memguard train' with the file that the run was started from writes it again"
REPAIR_UNLISTED = "it would be loaded with the model: move away files that this run has not written"
# Settings that may differ when a run is resumed: they do not change the trained weights.
_FREE = ("name", "output_dir", "audit", "parallel", "track")
FREE_IN_TRAIN = (
    "activation_checkpointing",
    "micro_batch_size",
    "deterministic",
    "compile",
    "checkpoint_every_steps",
    "checkpoint_every_minutes",
    "keep_checkpoints",
    "log_every_steps",
    "stall_minutes",
    "heldout_every_steps",
    "profile",
    "keep",
)
_COMPARED = ("model", "adapter", "prepared", "audit", "gate")
"""Folders of a run with recorded files, beside those of its checkpoints."""
_WRITTEN = (".", "model", "adapter", "checkpoints", "audit", "audit/private", "private")
"""Folders of a run, or of a separate audit, in which files or folders are written."""


@contextmanager
def locked(folder: Path) -> Iterator[Callable[[], None]]:
    """Create a run's folder and lock it for this process; the lock ends with the process.

    Yields a function that raises a RecordError if the folder is no longer the one locked here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        _lock(handle, folder)
        _clear_half_written(folder)
        yield partial(_check_held, folder, handle)
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"another process is using '{folder}'; wait for it, or choose another 'name'"
        ) from error


def _check_held(folder: Path, handle: int) -> None:
    """Reject writing to a folder that was deleted, renamed or replaced: it would be incomplete."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(folder / ".lock"), os.fstat(handle)):
            return
    raise RecordError(
        f"'{folder}' was deleted, renamed or replaced while a command was using it, so the "
        "command stops: restore the folder and run the same command again"
    )


def check_free(folder: Path) -> None:
    """Reject a folder that cannot be created or written to, or that another process is using.

    Creates and locks nothing. Reports within a second what `locked` would report only after torch
    is imported.
    """
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    if (folder / ".lock").exists():
        with (folder / ".lock").open("rb") as lock:
            _lock(lock.fileno(), folder)


def check_usable(folder: Path) -> None:
    """Reject a folder like `check_free`, with one line for a program that called memguard."""
    try:
        check_free(folder)
    except OSError as error:
        raise ConfigError(f"'{folder}' cannot be written to: {error.strerror}") from error


def check_outside_runs(folder: Path, setting: str, *, but: Path | None = None) -> None:
    """Reject a folder to write to among the files of a run that `memguard verify` compares.

    A file that the run has not written there is damage: it could be loaded with the model. Folders
    in `audit/` are free, also in that of the run ``but``. Links and `..` are followed.
    """
    check_name(folder, setting, ConfigError)
    # As it is given too: model/ of a run may be a link to another disk.
    for path in (Path(os.path.realpath(folder)), Path(os.path.abspath(folder))):
        for place in (path, *path.parents):
            run = _find_comparing_run(place)
            if run is None or (place.name == "audit" and (place != path or _is_same(run, but))):
                continue
            raise ConfigError(
                f"'{setting}' must not be in {place.relative_to(run).as_posix()}/ of a run, whose "
                f"files 'memguard verify' compares; got '{shorten(str(folder), MAX_PATH)}'. Choose "
                "a folder outside the run"
            )


def _find_comparing_run(place: Path) -> Path | None:
    """Return the run that compares the files of a folder; None if none does."""
    run = place.parent
    if place.name.startswith("step-") and run.name == "checkpoints":
        run = run.parent
    elif place.name not in _COMPARED:
        return None
    return run if (run / "config.yaml").is_file() and has_prepared(run) else None


def _is_same(folder: Path, other: Path | None) -> bool:
    return other is not None and os.path.realpath(folder) == os.path.realpath(other)


def _clear_half_written(folder: Path) -> None:
    """Delete temporary files of a killed process; the lock excludes other processes."""
    for place in _WRITTEN:
        # The target of a link does not belong to the run.
        if not (folder / place).is_symlink():
            for path in (folder / place).glob(f"{TEMPORARY}*"):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def compute_run_key(config: RunConfig, summary: PreparedSummary) -> str:
    """Hash settings and documents that determine the weights; checkpoints store this hash."""
    binding = _binding(config.model_dump(mode="json"))
    text = json.dumps([binding, summary.documents_sha256, summary.identity_key])
    return hashlib.sha256(text.encode()).hexdigest()


def _binding(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that determine the trained weights."""
    kept = {key: value for key, value in values.items() if key not in _FREE}
    kept["train"] = {k: v for k, v in kept["train"].items() if k not in FREE_IN_TRAIN}
    # The key itself is compared by its fingerprint, the date by the tokens.
    free = {"identity_key", "chat_date"}
    kept["data"] = {k: v for k, v in kept["data"].items() if k not in free}
    return kept


def check_same_settings(config: RunConfig, folder: Path, console: "Console") -> None:
    """Reject a folder that contains a run with other settings."""
    path = folder / "config.yaml"
    damages = RunFiles(folder).find_damage("config") if path.exists() else []
    if damages:
        # What training stored has the hash of its settings.
        trained, summary = find_run_keys(folder), load_summary(folder)
        if trained and summary and compute_run_key(config, summary) not in trained:
            raise ConfigError(
                f"'{folder}': {damages[0]}, and its run was trained with other settings than "
                "these. Use the original settings, choose another 'name', or delete that folder."
            )
        console.warn(f"{damages[0]}; the settings given now are used")
        return
    if not (path.exists() and has_begun(folder)):
        return
    old, new = _binding(load_yaml(path).values), _binding(config.model_dump(mode="json"))
    if differences := _differences(old, new):
        differing = [f"{key} ({_short(a)} there, {_short(b)} here)" for key, a, b in differences]
        raise ConfigError(
            f"'{folder}' holds a run with other settings: "
            f"{list_first(differing, 4, join='; ')}. Choose another 'name', or delete that folder."
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


# -- the files of a run ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedState:
    """State of earlier training in a run's folder."""

    is_whole: bool
    """Training has ended and its files are undamaged."""
    damage: str | None = None
    """Why the model must be exported again from a checkpoint instead of trained from the start."""


@dataclass(frozen=True, slots=True)
class RunFolder(RunFiles):
    """The folder of a run: refused where a command needs files that are damaged or missing."""

    def read_config(self) -> RunConfig:
        """Read the config.yaml that the run wrote; refuse one that was changed since."""
        refuse_damage(self.path, self.find_damage("config"), REPAIR_CONFIG)
        return load_run_config(self.path / "config.yaml")

    def make_resume_command(self) -> str:
        """Return the command that resumes the run, even if its folder was moved."""
        command = ["memguard", "train", str(self.path / "config.yaml")]
        with contextlib.suppress(MemguardError):
            config = load_run_config(self.path / "config.yaml")
            here = self.path.resolve()
            if (Path(config.output_dir) / config.name).resolve() != here:
                command += [f"name={here.name}", f"output_dir={here.parent}"]
        return shlex.join(command)

    def require_trained(
        self, *, without_documents: bool = False, read: SumFile = sum_file
    ) -> TrainedRun:
        """Return the record of the training; refuse a run that is unfinished or damaged.

        ``without_documents`` accepts prepared documents that this user may not read; ``read`` sums
        a file of the weights.
        """
        train = self.make_resume_command()
        refuse_damage(self.path, self.find_damage("config"), REPAIR_CONFIG)
        if not has_trained(self.path):
            why = "has not finished training" if has_weights(self.path) else "has no model/ yet"
            raise ModelError(f"'{self.path}' {why}: finish it with {train}")
        prepared = self.find_damage("prepared")
        if without_documents:
            prepared = [damage for damage in prepared if not damage.is_unreadable]
        refuse_damage(self.path, prepared, f"'{train}' prepares the documents again")
        damages = self.find_damage("trained", read=read)
        is_unlisted = any(damage.what == UNLISTED for damage in damages)
        repair = REPAIR_UNLISTED if is_unlisted else f"'{train}' resumes from the last checkpoint"
        refuse_damage(self.path, damages, repair)
        return load_trained(self.path)

    def find_checkpoint(self, step: int) -> Path:
        """Return the checkpoint of a step; it may be damaged."""
        path = self.path / "checkpoints" / name_checkpoint(step)
        if not path.is_dir():
            others = [found.name.lstrip("step-0") for found in list_checkpoints(path.parent)]
            way_out = f"--step takes {list_first(others, 6)}" if others else "it has none"
            raise ModelError(f"'{self.path}' has no checkpoint of step {step}: {way_out}")
        return path

    def find_trained(self, run_key: str, console: "Console", read: SumFile) -> TrainedState:
        """Return whether training has ended and its files are undamaged.

        A run of other settings or documents, and a model with a file that training has not written,
        are refused. ``read`` sums a file of the weights.
        """
        if not has_trained(self.path):
            model = find_weights_folder(self.path)
            damage = f"'{model}' has no 'trained.json' beside it, so it may be damaged"
            return TrainedState(is_whole=False, damage=damage if model.exists() else None)
        damages = self.find_damage("trained", read=read)
        if not damages:
            if load_trained(self.path).run_key != run_key:
                raise RecordError(
                    f"'{self.path}' has a run with other settings or documents: choose another "
                    "'name', or delete that folder"
                )
            return TrainedState(is_whole=True)
        if others := list_other_model_files(self.path):
            raise RecordError(
                f"'{self.path}': {others[0]} {UNLISTED} and would be read or deleted with its "
                "model: move it away"
            )
        console.warn(f"{damages[0]}; the model is exported again from the newest checkpoint")
        return TrainedState(is_whole=False, damage=f"'{self.path}': {damages[0]}")

    def check_audited(self, report: AuditReport) -> None:
        """Refuse a report of another form, weights or documents than those of the run."""
        check_stored(self.path / "audit", report)
        summary = load_summary(self.path)
        if report.model.weights_sha256 != _hash_trained(self.path):
            what = "weights"
        elif summary is not None and report.data.documents_sha256 != summary.documents_sha256:
            what = "documents"
        else:
            return
        raise RecordError(
            f"the audit of '{self.path}' is of other {what} than those of the run. Run 'memguard "
            f"audit {self.path}'"
        )


def _hash_trained(folder: Path) -> str:
    """Return the hash that a report has of a run's weights, from the recorded hashes."""
    trained = load_trained(folder)
    if trained.folder == "adapter":
        own = {
            name: trained.model[name]
            for name in trained.model
            if name == ADAPTER_CONFIG or name.endswith(".safetensors")
        }
        return hash_sums({**own, **{f"{BASE}{name}": item for name, item in trained.base.items()}})
    weights = folder / trained.folder
    return hash_sums(
        sum_model(weights, read=lambda path: trained.model[path.relative_to(weights).as_posix()])
    )


def check_stored(audit: Path, report: AuditReport) -> None:
    """Refuse a report of a model that was loaded in another form than the stored one."""
    if (load_as := report.model.load_as) != "stored":
        raise RecordError(
            f"the audit in '{audit}' is of the model loaded as {load_as}, not of its stored "
            "weights. Audit without --load-as"
        )
