"""Checkpoints by themselves: what they hold, and how one that lacks something is told."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from memguard.errors import RecordError
from memguard.parallel.local_parameters import find_local_parameters
from memguard.runtime import Console, Runtime
from memguard.train.checkpoint import (
    CheckpointManifest,
    TrainState,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)

RUNTIME = Runtime(device=torch.device("cpu"))


def make_state(**arrays: NDArray[Any]) -> TrainState:
    parameters = find_local_parameters(torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW([each.local for each in parameters])
    state = TrainState(parameters=parameters, optimizer=optimizer, buffers={}, arrays=arrays)
    state.make_room()
    return state


def save(folder: Path, step: int, state: TrainState) -> Path:
    progress = CheckpointManifest(
        step=step,
        run_key="",
        sample_sha256=None,
        num_supervised_tokens=0,
        num_kept_tokens=0,
        num_rows=0,
        train_s=0.0,
        torch_version=torch.__version__,
        files={},
    )
    return save_checkpoint(folder, state, progress=progress, keep=2, runtime=RUNTIME)


def test_arrays_are_filled_in_place(tmp_path: Path) -> None:
    path = save(tmp_path, 1, make_state(tally=np.arange(3)))
    tally = np.zeros(3, dtype=np.int64)
    load_checkpoint(path, make_state(tally=tally), runtime=RUNTIME)
    assert tally.tolist() == [0, 1, 2]


def test_a_step_saved_again_is_whole_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, make_state(tally=np.arange(3)))

    def die_deleting(path: Path, **_: Any) -> None:
        for file in list(path.glob("*.distcp")):
            file.unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die_deleting)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 1, make_state(tally=np.arange(3) + 5))
    found = find_checkpoint(tmp_path, console=Console())
    assert found is not None
    path, manifest = found
    assert (path.name, manifest.step) == ("step-00000001", 1)
    tally = np.zeros(3, dtype=np.int64)
    load_checkpoint(path, make_state(tally=tally), runtime=RUNTIME)
    assert tally.tolist() == [5, 6, 7]
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"tally": np.zeros(3, dtype=np.int64), "rung": np.zeros(2)}, "rung"),
        ({"tally": np.zeros(4, dtype=np.int64)}, "tally"),
    ],
    ids=["missing", "of another size"],
)
def test_one_that_lacks_something_is_told_in_a_line(
    arrays: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = save(tmp_path, 1, make_state(tally=np.arange(3)))
    with pytest.raises(RecordError, match=rf"'.*step-00000001' does not hold .*{told}.*Delete"):
        load_checkpoint(path, make_state(**arrays), runtime=RUNTIME)
