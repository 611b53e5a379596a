"""The newest intact checkpoint is found by all ranks, each of which hashes a share of its files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_examples import make_state, save_state
from ranks import RankPool
from torch import distributed as dist

from memguard.records.run_files import load_checkpoint_manifest
from memguard.records.sealed import FileSum, sum_file
from memguard.runtime import Console, Runtime, shared_sums
from memguard.train import checkpoint
from memguard.train.checkpoint import find_checkpoint
from memguard.train.checkpoint_storage import CheckpointMetadata, load_metadata


def find_and_note(folder: Path, until_step: int | None) -> dict[str, Any]:
    """On a rank: the checkpoint that is found, the files it read, and its warnings."""
    runtime = Runtime(
        device=torch.device("cpu"), rank=dist.get_rank(), world_size=dist.get_world_size()
    )
    read: list[str] = []
    warnings: list[str] = []
    parsed: list[str] = []

    def note_metadata(path: Path, files: Mapping[str, FileSum]) -> CheckpointMetadata:
        parsed.append(path.name)
        return load_metadata(path, files)

    def note(path: Path) -> FileSum:
        read.append(f"{path.parent.name}/{path.name}")
        return sum_file(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_sums, "sum_file", note)
        patch.setattr(checkpoint, "load_metadata", note_metadata)
        patch.setattr(Console, "warn", lambda _, text: warnings.append(text))
        found = find_checkpoint(folder, console=Console(), until_step=until_step, runtime=runtime)
    return {
        "found": found and found[:2],
        "tensors": found and list(found[2].tensors),
        "read": read,
        "parsed": parsed,
        "warnings": warnings,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        save_state(folder, step, make_state(tally=np.arange(3)))
    return folder


def test_each_file_is_read_by_one_rank(ranks: RankPool, folder: Path) -> None:
    newest = folder / "step-00000002"
    manifest = load_checkpoint_manifest(newest)
    results = ranks(find_and_note, 2, folder, None)
    for result in results:
        assert result["found"] == (newest, manifest)
        assert result["warnings"] == []
        assert result["read"], "both have a share"
    # The places of tensors are parsed on rank 0 alone; the others get them from it.
    assert [result["parsed"] for result in results] == [[newest.name], []]
    assert results[1]["tensors"] == results[0]["tensors"] != []
    read = [name for result in results for name in result["read"]]
    assert sorted(read) == sorted(f"{newest.name}/{name}" for name in manifest.files)
    # Earlier ones only, and none.
    for result in ranks(find_and_note, 2, folder, 1):
        assert result["found"][0].name == "step-00000001"
    assert [result["found"] for result in ranks(find_and_note, 2, folder, 0)] == [None, None]


@pytest.mark.parametrize("damage", ["a byte", "the end", "a file", "the manifest", "more"])
def test_a_damaged_one_is_skipped_by_all(ranks: RankPool, folder: Path, damage: str) -> None:
    newest = folder / "step-00000002"
    file = next(newest.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    if damage == "a byte":
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "the end":
        file.write_bytes(content[:-1])
    elif damage == "a file":
        file.unlink()
    elif damage == "the manifest":
        (newest / "manifest.json").write_text("{")
    else:
        (newest / ".metadata").touch()
    alone: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Console, "warn", lambda _, text: alone.append(text))
        expected = find_checkpoint(folder, console=Console())
    assert expected is not None
    assert expected[0].name == "step-00000001"
    results = ranks(find_and_note, 2, folder, None)
    assert [result["found"] for result in results] == [expected[:2]] * 2
    # Rank 0 says what one process says.
    assert [result["warnings"] for result in results] == [alone, []]
    assert len(alone) == 1
