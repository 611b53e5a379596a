"""Save and resume, bit for bit; committed by rename.

    checkpoints/step-00000100/
      *.distcp        torch's distributed checkpoint: weights, AdamW's moments, counts
      metadata.json   location of each tensor in these files; see `checkpoint_storage`
      metrics.jsonl   the log up to this step
      manifest.json   step, key of the run, size and SHA-256 of every other file

Every rank writes its own part. Each shard is stored with its position in the whole tensor, so that
a run can resume on any mesh or on one process. A folder named step-* is complete: it is written
under a temporary name, flushed to disk, and renamed by rank 0 once every rank has written its part.
A checkpoint whose files do not match its manifest is skipped, and the previous one is used.
"""

import contextlib
import errno
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from memguard.errors import ConfigError, RecordError
from memguard.optim import Optimizer
from memguard.parallel.local_parameters import LocalParameter
from memguard.records.folders import CheckpointFolder
from memguard.records.record import commit, flush, hide, make_temporary_folder
from memguard.records.run_files import (
    CheckpointManifest,
    list_checkpoints,
    load_checkpoint_manifest,
    name_checkpoint,
)
from memguard.records.sealed import FileSum, SumFile, save_sealed, sum_file
from memguard.runtime import Console, Runtime
from memguard.runtime.shared_sums import sum_ahead
from memguard.train.checkpoint_storage import (
    CheckpointMetadata,
    JsonReader,
    JsonWriter,
    load_metadata,
)

LOG = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePart:
    """One tensor of a state, as this rank holds it."""

    name: str
    value: Tensor
    parameter: LocalParameter | None = None
    """The parameter that it belongs to, if any."""
    block: int = 1
    """Elements of the parameter's last dimension to which one number belongs."""


def to_stored(parts: Iterable[StatePart]) -> dict[str, Tensor]:
    """Return tensors as checkpoints store them, by name; they share storage with the parts."""
    return {
        part.name: part.value
        if part.parameter is None
        else part.parameter.to_global(part.value, block=part.block)
        for part in parts
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """The objects of a running training that a checkpoint saves and restores."""

    parameters: Sequence[LocalParameter]
    optimizer: Optimizer
    buffers: Mapping[str, Tensor]
    """Buffers of the model that its checkpoints store."""
    arrays: Mapping[str, NDArray[Any]]
    """Counts and decisions of the run, by name; the same on every rank."""

    def parts(self) -> Iterator[StatePart]:
        """Yield every tensor of the state; they share storage with the live tensors."""
        for name, buffer in self.buffers.items():
            yield StatePart(name=f"model.{name}", value=buffer)
        for each in self.parameters:
            yield StatePart(name=f"model.{each.name}", value=each.local.detach(), parameter=each)
            for field, value in self.optimizer.state_of(each).items():
                name, block = f"optimizer.{each.name}.{field}", self.optimizer.blocks.get(field, 1)
                yield StatePart(name=name, value=value, parameter=each, block=block)
        for name, array in self.arrays.items():
            yield StatePart(name=name, value=torch.from_numpy(array))

    def make_room(self, stored: Collection[str] | None = None) -> None:
        """Allocate the optimizer's state, to be filled from a checkpoint.

        ``stored`` are the names of its tensors; it has no state of a parameter that never had a
        gradient. None allocates those of all parameters.
        """
        for parameter in self.parameters:
            prefix = f"optimizer.{parameter.name}."
            if stored is None or any(name.startswith(prefix) for name in stored):
                self.optimizer.make_room(parameter)


def save_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    runtime: Runtime,
    *,
    progress: CheckpointManifest,
    log: Path,
    log_bytes: int,
    keep: int,
    keep_steps: Collection[int | None] = (),
) -> Path:
    """Write one checkpoint and delete the oldest beyond ``keep``; every rank calls this.

    All ranks share the file system of ``folder``. ``tensors`` are those of `to_stored`. The
    manifest ``progress`` has no `files` yet; the first ``log_bytes`` of ``log``, metrics.jsonl, are
    copied into the checkpoint; the checkpoints of ``keep_steps`` are kept too.

    Raises:
        OSError: the disk of this or another rank is full or not writable; existing checkpoints
            are unchanged.
    """
    target = folder / name_checkpoint(progress.step)
    temporary = runtime.from_main(lambda: make_temporary_folder(target))
    try:
        # If any rank fails, all do, so that none waits for it.
        with runtime.contain():
            _write_part(tensors, temporary, runtime)
        runtime.only_on_main(lambda: _copy_start(log, temporary / LOG, log_bytes))
        with runtime.contain():
            part = _sum_part(temporary, runtime)
        sums = runtime.gather_objects(part)
        files = {name: file_sum for part in sums for name, file_sum in sorted(part.items())}
        manifest = progress.model_copy(update={"files": files})
        runtime.only_on_main(lambda: _commit(temporary, target, manifest))
    except BaseException as error:
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        # On a full disk, torch's writer reports only an unexpected file position.
        is_full = temporary.exists() and shutil.disk_usage(temporary).free < num_bytes
        if runtime.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, CheckpointException):
            raise OSError(
                errno.ENOSPC if is_full else errno.EIO,
                f"checkpoint {target.name} could not be written: {_find_cause(error)}",
            ) from error
        raise
    if runtime.is_main:
        kept = {name_checkpoint(step) for step in keep_steps if step is not None}
        for old in list_checkpoints(folder)[:-keep]:
            if old.name in kept:
                continue
            with contextlib.suppress(OSError):
                shutil.rmtree(hide(old), ignore_errors=True)
    return target


def _write_part(tensors: Mapping[str, Tensor], temporary: Path, runtime: Runtime) -> None:
    save(
        dict(tensors),
        # One thread: with more, a failed write is reported as a success (pytorch#191391).
        storage_writer=JsonWriter(str(temporary), thread_count=1),
        no_dist=runtime.world_size == 1,
        process_group=runtime.control,
    )


def _copy_start(source: Path, target: Path, num_bytes: int) -> None:
    with source.open("rb") as file:
        target.write_bytes(file.read(num_bytes))


def _sum_part(temporary: Path, runtime: Runtime) -> dict[str, FileSum]:
    """Flush and hash this rank's files; rank 0 also handles files that belong to no rank."""
    sums = {}
    for path in sorted(temporary.iterdir()):
        owner = path.name.removeprefix("__").partition("_")[0]
        if (int(owner) if owner.isdigit() else 0) == runtime.rank:
            flush(path)
            sums[path.name] = sum_file(path)
    return sums


def _commit(temporary: Path, target: Path, manifest: CheckpointManifest) -> None:
    save_sealed(manifest, temporary / "manifest.json")
    commit(temporary, target)


def find_checkpoint(
    folder: Path, *, console: Console, until_step: int | None = None, runtime: Runtime | None = None
) -> tuple[Path, CheckpointManifest, CheckpointMetadata] | None:
    """Find the newest checkpoint whose files match its manifest.

    Every rank calls this, hashes its share of the files, and gets what rank 0 has read. A damaged
    checkpoint is warned of, those of steps after ``until_step`` are ignored.
    """
    runtime = runtime or Runtime()
    newest = None if until_step is None else name_checkpoint(until_step)
    paths = runtime.from_main(lambda: list_checkpoints(folder))
    for path in reversed(paths):
        if newest is not None and path.name > newest:
            continue
        read = sum_ahead(partial(list_listed, path), runtime)
        records = runtime.from_main(partial(_check_or_warn, path, read, console))
        if records is not None:
            return path, *records
    return None


def list_listed(path: Path) -> list[Path]:
    """Return the files of a checkpoint whose hashes decide whether it is intact."""
    try:
        files = load_checkpoint_manifest(path).files
    except RecordError:  # Reported by `_check_or_warn`.
        return []
    # A name with a separator is damage. Of other sizes than written, files are not compared.
    own = {path / name: file_sum for name, file_sum in files.items() if Path(name).name == name}
    return [
        file
        for file, file_sum in own.items()
        if file.is_file() and file.stat().st_size == file_sum.num_bytes
    ]


def _check_or_warn(
    path: Path, read: SumFile, console: Console
) -> tuple[CheckpointManifest, CheckpointMetadata] | None:
    """Return the records of a checkpoint; None, with a warning, if it is damaged."""
    try:
        why = "; ".join(str(damage) for damage in CheckpointFolder(path).find_damage(read=read)[:3])
        if not why:
            manifest = load_checkpoint_manifest(path)
            return manifest, load_metadata(path, manifest.files)
    except RecordError as error:
        why = str(error)
    console.warn(f"checkpoint {path.name} is skipped: {why}")
    return None


def check_belongs(
    path: Path,
    manifest: CheckpointManifest,
    *,
    run_key: str,
    sample_sha256: str | None,
    base: Mapping[str, FileSum],
) -> None:
    """Refuse a checkpoint that does not belong to this run.

    Raises:
        ConfigError: the checkpoint's run audited another sample during training.
        RecordError: the checkpoint is from a run with other settings or documents, or the base
            model, which has the weights that are not trained, was changed.
    """
    if manifest.run_key != run_key:
        raise RecordError(
            f"'{path}' is from a run with other settings or documents, or from another version: "
            f"delete '{path.parent}' to start over, or choose another 'name'"
        )
    if manifest.sample_sha256 != sample_sha256:
        raise ConfigError(
            "'audit.suite' and the lengths in 'audit' determine what is audited during training "
            f"and must not change before '{path.parent.parent}' is finished: restore their "
            "values, or choose another 'name'"
        )
    names = sorted({*manifest.base, *base})
    changed = [name for name in names if manifest.base.get(name) != base.get(name)]
    if changed:
        raise RecordError(
            f"'{path}' belongs to another base model: its {changed[0]} was changed since this run "
            f"began. Restore the model in 'model.path', or delete '{path.parent}' to start over"
        )


def load_checkpoint(
    path: Path, state: TrainState, *, stored: CheckpointMetadata, runtime: Runtime
) -> None:
    """Fill model, optimizer and tally in place from a checkpoint that `find_checkpoint` returned.

    The checkpoint may have been written on any mesh.

    Raises:
        RecordError: a tensor is missing or has another shape, or a file cannot be read.
    """
    state.make_room(stored.tensors)
    tensors = to_stored(state.parts())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(
                tensors,
                storage_reader=JsonReader(path, stored, tensors),
                no_dist=runtime.world_size == 1,
                process_group=runtime.control,
            )
    except CheckpointException as error:
        raise RecordError(
            f"checkpoint '{path}' is not usable for this run: {_find_cause(error)}. "
            f"Delete '{path.parent}' to start over, or choose another 'name'"
        ) from error
    for name, array in state.arrays.items():
        array[:] = tensors[name].numpy()


def _find_cause(error: CheckpointException) -> BaseException:
    """Return the error of the first rank that failed."""
    return next((cause for cause, _ in error.failures.values()), error)
