"""Nothing in a checkpoint is run when it is read, wherever a pickle is put."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_examples import load_state, make_state, save_state
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from memguard.errors import RecordError
from memguard.records.run_files import load_checkpoint_manifest
from memguard.records.sealed import save_sealed, sum_file
from memguard.runtime import Console
from memguard.train.checkpoint import find_checkpoint
from memguard.train.checkpoint_storage import TensorPlaces, load_metadata, read_tensor


class Command:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.mark,)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_state(tmp_path / "checkpoints", 1, make_state(tally=np.arange(3)))


def seal_again(checkpoint: Path) -> None:
    """Do what an attacker would: list every file with its hash, and seal the manifest."""
    manifest = load_checkpoint_manifest(checkpoint)
    names = {path.name for path in checkpoint.iterdir()} - {"manifest.json"}
    files = {name: sum_file(checkpoint / name) for name in sorted(names)}
    save_sealed(manifest.model_copy(update={"files": files}), checkpoint / "manifest.json")


def resume(checkpoint: Path) -> Any:
    """Go on from it as a run does; return its tally, None if it was skipped."""
    found = find_checkpoint(checkpoint.parent, console=Console())
    if found is None:
        return None
    tally = np.zeros(3, dtype=np.int64)
    load_state(found[0], make_state(tally=tally))
    return tally.tolist()


def test_a_tensor_is_read_whole_and_cast(checkpoint: Path) -> None:
    stored = load_metadata(checkpoint, load_checkpoint_manifest(checkpoint).files)
    read = {name: read_tensor(checkpoint, stored, name, torch.bfloat16) for name in stored.tensors}
    for name, tensor in read.items():
        whole = read_tensor(checkpoint, stored, name)
        assert tuple(whole.shape) == stored.tensors[name].size
        is_cast = whole.is_floating_point()
        assert torch.equal(tensor, whole.to(torch.bfloat16) if is_cast else whole)
    assert [0, 1, 2] in [tensor.tolist() for tensor in read.values()]
    assert {tensor.dtype for tensor in read.values()} == {torch.bfloat16, torch.int64}
    with pytest.raises(RecordError, match="lacks the tensor"):
        read_tensor(checkpoint, stored, "model.none")


def test_the_pickle_of_these_tests_runs_where_it_is_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Command(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("place", "sealed"),
    [
        (place, sealed)
        for place in (".metadata", "__0.metadata", "metadata.json", "manifest.json")
        # Only the manifest itself cannot be listed.
        for sealed in ((False,) if place == "manifest.json" else (False, True))
    ],
)
def test_a_pickle_is_not_run(checkpoint: Path, tmp_path: Path, place: str, sealed: bool) -> None:
    (checkpoint / place).write_bytes(pickle.dumps(Command(tmp_path / "mark")))
    if sealed:
        seal_again(checkpoint)
    assert resume(checkpoint) is None
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("form", ["pickle", "torch.save"])
def test_a_pickle_among_the_tensors_is_not_run(checkpoint: Path, tmp_path: Path, form: str) -> None:
    command = Command(tmp_path / "mark")
    shard = checkpoint / "__0_0.distcp"
    if form == "pickle":
        shard.write_bytes(pickle.dumps(command))
    else:
        torch.save(command, shard)
    values = json.loads((checkpoint / "metadata.json").read_text())
    for tensor in values["tensors"].values():
        tensor |= {"begin": [0], "length": [shard.stat().st_size]}
    (checkpoint / "metadata.json").write_text(json.dumps(values))
    seal_again(checkpoint)
    with pytest.raises(RecordError, match="is not usable for this run"):
        resume(checkpoint)
    assert not (tmp_path / "mark").exists()


def change_tally(checkpoint: Path, *, files: list[Any] | None = None, **changes: object) -> None:
    values = json.loads((checkpoint / "metadata.json").read_text())
    values["tensors"]["tally"] |= changes
    values["files"] = values["files"] if files is None else files
    (checkpoint / "metadata.json").write_text(json.dumps(values))
    seal_again(checkpoint)


@pytest.mark.parametrize(
    "changes",
    [
        {"files": ["../outside"]},
        {"files": ["/etc/hostname"]},
        {"files": ["manifest.json"]},
        {"file": [1]},
        {"length": [10**9]},
        {"begin": [10**9]},
        # The sum exceeds the largest number, and would be negative.
        {"begin": [2**62], "length": [2**62]},
        {"offsets": [[0], [0]]},
        {"length": [1, 1]},
    ],
    ids=str,
)
def test_tensors_lie_in_files_of_the_checkpoint(checkpoint: Path, changes: dict[str, Any]) -> None:
    (checkpoint.parent / "outside").write_bytes(b"x" * 10**4)
    change_tally(checkpoint, **changes)
    assert resume(checkpoint) is None


@pytest.mark.parametrize(
    "changes",
    [
        *({"begin": [wrong]} for wrong in (-1, 0.5, "0", None, True, 2**64, [0])),
        {"sizes": [[-3]]},
        {"begin": 0},
        {"file": None},
        {"files": [0]},
        {"chunks": []},
    ],
    ids=str,
)
def test_what_no_writer_says_is_refused(checkpoint: Path, changes: dict[str, Any]) -> None:
    change_tally(checkpoint, **changes)
    assert resume(checkpoint) is None


def test_a_rank_reads_the_rectangles_that_overlap_its_own() -> None:
    draw = np.random.default_rng(0)
    # 4 x 3 rectangles of uneven sizes; a scalar has one, without dimensions.
    rows, columns = np.cumsum([0, 3, 1, 5, 2]), np.cumsum([0, 4, 4, 1])
    grid = [(r, c) for r in range(4) for c in range(3)]
    places = TensorPlaces.model_validate(
        {
            "dtype": "float32",
            "size": (11, 9),
            "offsets": ([int(rows[r]) for r, _ in grid], [int(columns[c]) for _, c in grid]),
            "sizes": (
                [int(rows[r + 1] - rows[r]) for r, _ in grid],
                [int(columns[c + 1] - columns[c]) for _, c in grid],
            ),
            **dict.fromkeys(("file", "begin", "length"), [0] * 12),
        }
    )
    for _ in range(50):
        start, end = (np.sort(draw.choice(np.arange(12), 2, replace=False)) for _ in range(2))
        own = ChunkStorageMetadata(
            offsets=torch.Size([int(start[0]), int(min(end[0], 8))]),
            sizes=torch.Size([int(start[1] - start[0]), 1]),
        )
        cells = np.zeros((11, 9), dtype=bool)
        cells[own.offsets[0] : own.offsets[0] + own.sizes[0], own.offsets[1]] = True
        wanted = [
            bool(cells[rows[r] : rows[r + 1], columns[c] : columns[c + 1]].any()) for r, c in grid
        ]
        assert places.find_overlapping(own).tolist() == wanted


@pytest.mark.parametrize("dtype", ["load", "no_such", "__builtins__"])
def test_a_dtype_is_one_of_torch(checkpoint: Path, dtype: str) -> None:
    values = json.loads((checkpoint / "metadata.json").read_text())
    values["tensors"]["tally"]["dtype"] = dtype
    (checkpoint / "metadata.json").write_text(json.dumps(values))
    with pytest.raises(RecordError, match="has unknown dtype"):
        load_metadata(checkpoint, load_checkpoint_manifest(checkpoint).files)


def test_every_file_of_a_checkpoint_is_listed(checkpoint: Path) -> None:
    names = {path.name for path in checkpoint.iterdir()}
    assert names == {"__0_0.distcp", "metadata.json", "metrics.jsonl", "manifest.json"}
    assert load_checkpoint_manifest(checkpoint).files.keys() == names - {"manifest.json"}
