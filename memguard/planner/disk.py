"""Disk space that a run needs at most, compared with the free space; sizes as text.

during training  `keep_checkpoints` checkpoints, and the next one while it is written
at the end       the kept checkpoints, and `model/` or `adapter/`
checkpoint       trained weights and AdamW's two moments, fp32: 12 bytes a parameter

The files of the audit and the documents are small in comparison.
"""

from collections.abc import Sequence
from pathlib import Path

from memguard.planner.dry_run import Remark, note, warn

_BYTES_PER_PARAMETER = 12
_FREE_SHARE_TO_LEAVE = 0.05


def remark_on_disk(
    *, num_trained: int, num_checkpoints: int, keep: int, export_bytes: int, free_bytes: int
) -> Remark:
    """Return how much a run writes; a warning where it does not fit, or only just.

    Args:
        num_trained: trained parameters, tied ones counted once.
        num_checkpoints: those that the run writes.
        keep: `train.keep_checkpoints`.
        export_bytes: size of `model/` or `adapter/`.
        free_bytes: of the file system, with what the run has written before.
    """
    checkpoint = _BYTES_PER_PARAMETER * num_trained
    # An old checkpoint is deleted when the next is complete.
    most = min(num_checkpoints, keep + 1)
    peak = max(most * checkpoint, min(num_checkpoints, keep) * checkpoint + export_bytes)
    times = "one" if most == 1 else f"at most {most}"
    text = (
        f"Checkpoints take {format_bytes(checkpoint)} each, {times} at a time, and the export "
        f"{format_bytes(export_bytes)}: {format_bytes(peak)} in all; {format_bytes(free_bytes)} "
        "are free."
    )
    if peak > free_bytes * (1 - _FREE_SHARE_TO_LEAVE):
        ways = "Lower 'train.keep_checkpoints', free some space, or choose another 'output_dir'."
        return warn("disk", f"{text} {ways}")
    return note("disk", text)


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
