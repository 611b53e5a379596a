"""Disk: by hand. That a checkpoint has this size is tested where one is trained."""

from pathlib import Path
from typing import Any

from memguard.planner.dry_run import (
    Remark,
    count_bytes,
    find_existing_parent,
    format_bytes,
    remark_on_disk,
)


def remark(**changes: Any) -> Remark:
    values = {
        "checkpoint_bytes": 12_000_000,
        "num_checkpoints": 10,
        "keep": 2,
        "export_bytes": 4_000_000,
        "free_bytes": 10**9,
    }
    return remark_on_disk(**{**values, **changes})


def test_disk_by_hand() -> None:
    # Two kept and the third being written, 12 MB each, is more than two and the export of 4 MB.
    assert "11.4 MiB each, at most 3 at a time, and the export 3.8 MiB: 34.3 MiB" in remark().text
    assert remark().level == "info"
    assert "one at a time, and the export 3.8 MiB: 15.3 MiB" in remark(num_checkpoints=1).text
    assert "at most 2 at a time" in remark(num_checkpoints=2, keep=5).text


def test_a_disk_too_small_is_told() -> None:
    said = remark(free_bytes=20_000_000)
    assert said.level == "warning"
    assert "34.3 MiB in all; 19.1 MiB are free." in said.text
    assert "copy the state into 11.4 MiB of the machine's memory. Lower 'train.keep_" in said.text
    # Only just.
    assert remark(free_bytes=37_000_000).level == "warning"


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
