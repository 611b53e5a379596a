"""Disk: by hand. That a checkpoint has this size is tested where one is trained."""

from pathlib import Path
from typing import Any

from memguard.planner.disk import (
    count_bytes,
    find_existing_parent,
    format_bytes,
    measure_disk,
    remark_on_disk,
)


def need_disk(**changes: Any) -> Any:
    values = {
        "num_parameters": 1_000_000,
        "num_tensors": 0,
        "num_pieces": 0,
        "num_steps": 100,
        "every_steps": 10,
        "keep": 2,
        "export_bytes": 4_000_000,
        "prepared_bytes": 500,
        "present_bytes": 0,
        "free_bytes": 10**9,
    }
    return measure_disk(**{**values, **changes})


def test_disk_by_hand() -> None:
    # Two kept and the third being written, 12 MB each, is more than two and the export of 4 MB.
    assert need_disk().peak_bytes == 36_000_500
    assert need_disk(keep=1, num_steps=5).num_checkpoints == 1
    assert need_disk(keep=1, num_steps=5).peak_bytes == 16_000_500
    assert need_disk(num_steps=11, keep=5).num_checkpoints == 2  # after steps 10 and 11
    assert need_disk(every_steps=None).num_checkpoints == 1


def test_a_disk_too_small_is_told() -> None:
    assert not remark_on_disk(need_disk())
    (remark,) = remark_on_disk(need_disk(free_bytes=20_000_000))
    assert remark.level == "warning"
    assert "needs 34.3 MiB more on disk, 19.1 MiB are free" in remark.text
    (remark,) = remark_on_disk(need_disk(free_bytes=37_000_000))
    assert "leaves only" in remark.text
    # What an earlier part of the run has written needs no room again.
    assert not remark_on_disk(need_disk(free_bytes=20_000_000, present_bytes=30_000_000))


def test_sizes_and_folders(tmp_path: Path) -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 1024**3, 5 * 1024**4)] == [
        "0 B",
        "999 B",
        "1.0 KiB",
        "1.0 GiB",
        "5.0 TiB",
    ]
    assert find_existing_parent(tmp_path / "a" / "b") == tmp_path
    (tmp_path / "model" / "deep").mkdir(parents=True)
    (tmp_path / "model" / "deep" / "x").write_bytes(b"12345")
    assert count_bytes(tmp_path, ["model", "missing"]) == 5
