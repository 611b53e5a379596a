"""Disk space that a run needs, compared with the free space.

during training  `keep_checkpoints` checkpoints, and the next one while it is written
at the end       the kept checkpoints, and `model/` or `adapter/`
checkpoint       trained weights and AdamW's two moments, fp32: 12 bytes a parameter, and headers

The files of the audit are small in comparison.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from memguard.planner.dry_run import DiskNeed, Remark, warn

_BYTES_PER_PARAMETER = 12
"""Size of a checkpoint per parameter: weight and AdamW's two moments, fp32."""
_BYTES_PER_TENSOR = 7400
"""Headers of each parameter's four tensors in a checkpoint (torch 2.13, measured)."""
_FREE_SHARE_TO_LEAVE = 0.05


def measure_disk(
    *,
    num_parameters: int,
    num_tensors: int,
    num_pieces: int,
    num_steps: int,
    every_steps: int | None,
    keep: int,
    export_bytes: int,
    prepared_bytes: int,
    present_bytes: int,
    free_bytes: int,
    export_folder: Literal["model", "adapter"] = "model",
) -> DiskNeed:
    """Compute the disk space that a run needs.

    Args:
        num_parameters: trained parameters, tied ones counted once.
        num_tensors: trained parameters that are separate tensors.
        num_pieces: pieces of documents in the rows, each with a tally.
        num_steps: steps of the run; the last one always writes a checkpoint.
        every_steps: `train.checkpoint_every_steps`.
        keep: `train.keep_checkpoints`.
        export_bytes: size of `model/` or `adapter/`.
        prepared_bytes: the documents' tokens.
        present_bytes: checkpoints, model and tokens that are there already.
        free_bytes: of the file system.
        export_folder: what is exported.
    """
    checkpoint = (
        _BYTES_PER_PARAMETER * num_parameters + _BYTES_PER_TENSOR * num_tensors + 8 * num_pieces
    )
    written = -(-num_steps // every_steps) if every_steps else 1
    # An old checkpoint is deleted when the next is complete.
    most = min(written, keep + 1)
    peak = max(most * checkpoint, min(written, keep) * checkpoint + export_bytes)
    return DiskNeed(
        num_parameters=num_parameters,
        checkpoint_bytes=checkpoint,
        num_checkpoints=most,
        export_bytes=export_bytes,
        prepared_bytes=prepared_bytes,
        peak_bytes=peak + prepared_bytes,
        present_bytes=present_bytes,
        free_bytes=free_bytes,
        export_folder=export_folder,
    )


def remark_on_disk(disk: DiskNeed) -> list[Remark]:
    """Warn where a run does not fit, or only just."""
    missing = disk.peak_bytes - disk.present_bytes - disk.free_bytes
    if missing > 0:
        text = (
            f"The run needs {format_bytes(disk.peak_bytes - disk.present_bytes)} more on disk, "
            f"{format_bytes(disk.free_bytes)} are free; lower 'train.keep_checkpoints', free some "
            "space, or choose another 'output_dir'."
        )
        return [warn("disk", text)]
    if -missing < _FREE_SHARE_TO_LEAVE * disk.free_bytes:
        return [warn("disk", f"The run leaves only {format_bytes(-missing)} free on disk.")]
    return []


def find_existing_parent(folder: Path) -> Path:
    """Return the folder itself, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def count_bytes(folder: Path, names: Sequence[str]) -> int:
    """Return the size of all files under these folders of ``folder``; 0 where there are none."""
    files = (path for name in names for path in (folder / name).rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file())


def format_bytes(num_bytes: float) -> str:
    """Write a size: ``512 B``, ``3.4 MiB``, ``1.2 TiB``."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 999.95:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:,.1f} TiB"
