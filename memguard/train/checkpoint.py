"""Save and resume, bit for bit; committed by rename.

    checkpoints/step-00000100/
      *.distcp        torch's distributed checkpoint: weights, AdamW's moments, counts
      metadata.json   where each tensor lies in them; see `checkpoint_storage`
      metrics.jsonl   the log up to this step
      manifest.json   step, what it belongs to, size and SHA-256 of every other file

Every rank writes its own part; tensors are stored as what they are of the whole, so that a run can
go on on any mesh, or on one process. A folder named step-* is whole: it is written under another
name, flushed to disk, then renamed by rank 0 once every rank has written. A checkpoint whose files
do not match its manifest is passed over for the one before.
"""

import contextlib
import errno
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from memguard.errors import ConfigError, OtherRankFailed, RecordError
from memguard.parallel.local_parameters import LocalParameter
from memguard.records.record import commit, flush, hide, make_aside
from memguard.records.run_files import (
    CheckpointManifest,
    find_checkpoint_damage,
    list_checkpoints,
    load_checkpoint_manifest,
    name_checkpoint,
)
from memguard.records.sealed import FileSum, save_sealed, sum_file
from memguard.runtime import Console, Runtime
from memguard.train.checkpoint_storage import JsonReader, JsonWriter, load_metadata

Result = TypeVar("Result")

LOG = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """What a checkpoint holds, live."""

    parameters: Sequence[LocalParameter]
    optimizer: torch.optim.Optimizer
    """On the local tensors of the parameters."""
    buffers: Mapping[str, Tensor]
    """Of the model, as far as its checkpoints have them."""
    arrays: Mapping[str, NDArray[Any]]
    """What the run has counted and decided, by name; the same on every rank."""

    def tensors(self) -> dict[str, Tensor]:
        """Name every tensor of the state; they share storage with the live ones."""
        state = {f"model.{name}": buffer for name, buffer in self.buffers.items()}
        for each in self.parameters:
            state[f"model.{each.name}"] = each.to_global(each.local.detach())
            for field, value in self.optimizer.state.get(each.local, {}).items():
                state[f"optimizer.{each.name}.{field}"] = each.to_global(value)
        for name, array in self.arrays.items():
            state[name] = torch.from_numpy(array)
        return state

    def make_room(self) -> None:
        """Give the optimizer empty moments, to be filled from a checkpoint."""
        for each in self.parameters:
            self.optimizer.state[each.local] = {
                # Where the fused AdamW reads it.
                "step": torch.zeros((), dtype=torch.float32, device=each.local.device),
                "exp_avg": torch.zeros_like(each.local),
                "exp_avg_sq": torch.zeros_like(each.local),
            }


def save_checkpoint(
    folder: Path,
    state: TrainState,
    *,
    progress: CheckpointManifest,
    log: Path,
    keep: int,
    runtime: Runtime,
    keep_step: int | None = None,
) -> Path:
    """Write one checkpoint and delete the oldest beyond ``keep``; every rank calls this.

    Args:
        folder: `checkpoints/` of the run, on a file system that all ranks see.
        state: what is saved.
        progress: the manifest with `files` still empty.
        log: metrics.jsonl, of which the checkpoint holds a copy.
        keep: newest checkpoints that stay.
        runtime: this rank.
        keep_step: step of one more checkpoint that stays.

    Raises:
        OSError: the disk of this rank, or of another, is full or not writable; what was there
            before is untouched.
    """
    target = folder / name_checkpoint(progress.step)
    aside: Path = runtime.broadcast_object(runtime.only_on_main(lambda: make_aside(target)))
    try:
        _agree(lambda: _write_part(state, aside, runtime), runtime)
        runtime.only_on_main(lambda: shutil.copyfile(log, aside / LOG))
        sums = runtime.gather_objects(_agree(lambda: _sum_part(aside, runtime), runtime))
        files = {name: each for part in sums for name, each in sorted(part.items())}
        manifest = progress.model_copy(update={"files": files})
        runtime.only_on_main(lambda: _commit(aside, target, manifest))
    except BaseException as error:
        num_bytes = sum(tensor.nbytes for tensor in state.tensors().values())
        # torch's writer says of a full disk only that a position is not the one it expected.
        is_full = aside.exists() and shutil.disk_usage(aside).free < num_bytes
        if runtime.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, CheckpointException):
            raise OSError(
                errno.ENOSPC if is_full else errno.EIO,
                f"checkpoint {target.name} could not be written: {_find_cause(error)}",
            ) from error
        raise
    if runtime.is_main:
        for old in list_checkpoints(folder)[:-keep]:
            if keep_step is not None and old.name == name_checkpoint(keep_step):
                continue
            with contextlib.suppress(OSError):
                shutil.rmtree(hide(old), ignore_errors=True)
    return target


def _write_part(state: TrainState, aside: Path, runtime: Runtime) -> None:
    # One thread: with more, a failed write is reported as a success (pytorch#191391).
    writer = JsonWriter(str(aside), thread_count=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(
            state.tensors(),
            storage_writer=writer,
            no_dist=runtime.world_size == 1,
            process_group=runtime.control,
        )


def _sum_part(aside: Path, runtime: Runtime) -> dict[str, FileSum]:
    """Flush and hash the files of this rank; rank 0 takes those that belong to none."""
    sums = {}
    for path in sorted(aside.iterdir()):
        owner = path.name.removeprefix("__").partition("_")[0]
        if (int(owner) if owner.isdigit() else 0) == runtime.rank:
            flush(path)
            sums[path.name] = sum_file(path)
    return sums


def _commit(aside: Path, target: Path, manifest: CheckpointManifest) -> None:
    save_sealed(manifest, aside / "manifest.json")
    commit(aside, target)


def _agree(work: Callable[[], Result], runtime: Runtime) -> Result:
    """Do this rank's part; fail where any rank has failed, so that nobody waits for it.

    Raises:
        OtherRankFailed: another rank could not do its part.
    """
    try:
        result = work()
    except Exception:
        runtime.agree_max(runtime.rank + 1)
        raise
    failed = runtime.agree_max(0)
    if failed:
        raise OtherRankFailed(failed - 1, 1)
    return result


def find_checkpoint(
    folder: Path, *, console: Console, until_step: int | None = None
) -> tuple[Path, CheckpointManifest] | None:
    """Find the newest checkpoint whose files match its manifest; clear half-written ones.

    Args:
        folder: `checkpoints/` of the run.
        console: told of damaged ones.
        until_step: newer ones do not count; None takes all.

    Returns:
        Its folder and its manifest.
    """
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)
    for path in reversed(list_checkpoints(folder)):
        if until_step is not None and path.name > name_checkpoint(until_step):
            continue
        try:
            return path, _check(path)
        except RecordError as error:
            console.warn(f"checkpoint {path.name} is passed over: {error}")
    return None


def _check(path: Path) -> CheckpointManifest:
    """Read a whole checkpoint's manifest.

    Raises:
        RecordError: the checkpoint is not what was written, or says what none can say.
    """
    damages = find_checkpoint_damage(path)
    if damages:
        raise RecordError("; ".join(str(each) for each in damages[:3]))
    manifest = load_checkpoint_manifest(path)
    load_metadata(path, manifest.files)
    return manifest


def check_belongs(
    path: Path, manifest: CheckpointManifest, *, run_key: str, sample_sha256: str | None
) -> None:
    """Refuse a checkpoint of something else.

    Args:
        path: of the checkpoint.
        manifest: its own.
        run_key: of the run that would go on from it.
        sample_sha256: of what that run's audits during training ask for; None without any.

    Raises:
        ConfigError: its audits during training asked for something else.
        RecordError: it is of other settings or documents.
    """
    if manifest.run_key != run_key:
        raise RecordError(
            f"'{path}' is of a run with other settings or documents, or of another version: "
            f"delete '{path.parent}' to begin again, or choose another 'name'"
        )
    if manifest.sample_sha256 != sample_sha256:
        raise ConfigError(
            "'audit.suite' and the lengths in 'audit' decide what audits during training ask "
            f"for, and must stay what they were when '{path.parent.parent}' was begun, until it "
            "has ended: set them back, or choose another 'name'"
        )


def load_checkpoint(
    path: Path, state: TrainState, *, files: Mapping[str, FileSum], runtime: Runtime
) -> None:
    """Fill model, optimizer and tally in place from a checkpoint that `find_checkpoint` found.

    It may have been written on any mesh. ``files`` are those that its manifest lists.

    Raises:
        RecordError: it lacks something, has it in another size, or cannot be read.
    """
    state.make_room()
    tensors = state.tensors()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(
                tensors,
                storage_reader=JsonReader(path, files),
                no_dist=runtime.world_size == 1,
                process_group=runtime.control,
            )
    except CheckpointException as error:
        raise RecordError(
            f"checkpoint '{path}' does not hold what this run goes on from: {_find_cause(error)}. "
            f"Delete '{path.parent}' to begin again, or choose another 'name'"
        ) from error
    for name, array in state.arrays.items():
        array[:] = tensors[name].numpy()


def _find_cause(error: CheckpointException) -> BaseException:
    """Return what went wrong on the first rank on which something did."""
    return next((cause for cause, _ in error.failures.values()), error)
