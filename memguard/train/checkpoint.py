"""Save and resume, bit for bit; committed by rename.

    checkpoints/step-00000100/
      *.distcp, .metadata   torch's distributed checkpoint: weights, AdamW's moments, tally
      manifest.json         step, what it belongs to, size and SHA-256 of every file

A folder named step-* is whole: it is written under another name, flushed to disk, then renamed. A
checkpoint whose files do not match its manifest is passed over for the one before.
"""

import errno
import hashlib
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from memguard.errors import RecordError
from memguard.records import Record, load_record, save_record
from memguard.runtime import Console


class FileSum(Record):
    """Size and hash of one file."""

    num_bytes: int
    sha256: str


class CheckpointManifest(Record):
    """`manifest.json` of a checkpoint."""

    step: int
    run_key: str
    """Of the settings and documents it was trained with."""
    num_supervised_tokens: int
    num_kept_tokens: int
    num_rows: int
    train_s: float
    torch_version: str
    files: dict[str, FileSum]


def save_checkpoint(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    piece_tally: NDArray[np.int64],
    progress: CheckpointManifest,
    keep: int,
) -> Path:
    """Write one checkpoint and delete the oldest beyond ``keep``.

    Args:
        folder: `checkpoints/` of the run.
        model: weights.
        optimizer: its moments.
        piece_tally: how often the loader fed each piece.
        progress: the manifest with `files` still empty.
        keep: newest checkpoints that stay.

    Raises:
        OSError: the disk is full or not writable; what was there before is untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step-{progress.step:08d}"
    aside = Path(tempfile.mkdtemp(dir=folder, prefix=f".{target.name}."))
    try:
        state = _tensors(model, optimizer, piece_tally)
        # One thread: with more, a failed write is reported as a success (pytorch#191391).
        writer = FileSystemWriter(str(aside), thread_count=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(state, storage_writer=writer, no_dist=True)
        files = {}
        for path in sorted(aside.iterdir()):
            _flush(path)
            files[path.name] = FileSum(num_bytes=path.stat().st_size, sha256=_hash(path))
        save_record(progress.model_copy(update={"files": files}), aside / "manifest.json")
        if target.exists():
            shutil.rmtree(target)
        os.rename(aside, target)
        _flush(folder)
    except CheckpointException as error:
        # torch's writer says of a full disk only that a position is not the one it expected.
        num_bytes = sum(
            tensor.nbytes for tensor in _tensors(model, optimizer, piece_tally).values()
        )
        is_full = shutil.disk_usage(aside).free < num_bytes
        shutil.rmtree(aside, ignore_errors=True)
        cause = next(iter(error.failures.values()), (error,))[0]
        raise OSError(
            errno.ENOSPC if is_full else errno.EIO,
            f"checkpoint {target.name} could not be written: {cause}",
        ) from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    for old in _list(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def find_checkpoint(folder: Path, *, console: Console) -> Path | None:
    """Return the newest checkpoint whose files match its manifest; clear half-written ones."""
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)
    for path in reversed(_list(folder)):
        try:
            manifest = load_record(CheckpointManifest, path / "manifest.json")
        except RecordError as error:
            console.warn(f"checkpoint {path.name} is passed over: {error}")
            continue
        wrong = [
            name
            for name, file in manifest.files.items()
            if not (path / name).is_file()
            or (path / name).stat().st_size != file.num_bytes
            or _hash(path / name) != file.sha256
        ]
        if not wrong:
            return path
        console.warn(f"checkpoint {path.name} is passed over: {', '.join(wrong)} damaged")
    return None


def load_checkpoint(
    path: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    piece_tally: NDArray[np.int64],
) -> CheckpointManifest:
    """Fill model, optimizer and tally in place from a checkpoint that `find_checkpoint` found."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    state = _tensors(model, optimizer, piece_tally)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(state, storage_reader=FileSystemReader(str(path)), no_dist=True)
    piece_tally[:] = state["piece_tally"].numpy()
    return load_record(CheckpointManifest, path / "manifest.json")


def _tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, piece_tally: NDArray[np.int64]
) -> dict[str, Tensor]:
    """Name every tensor of the state; the tensors are the live ones, not copies."""
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for field, value in optimizer.state.get(parameter, {}).items():
            state[f"optimizer.{name}.{field}"] = value
    state["piece_tally"] = torch.from_numpy(piece_tally)
    return state


def _list(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _hash(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
