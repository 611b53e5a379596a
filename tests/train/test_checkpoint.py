"""Checkpoints by themselves: what they hold, and how one that lacks something is told."""

import shutil
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_examples import RUNTIME, load_state, make_state, save_state

from memguard.errors import RecordError
from memguard.records.run_files import list_checkpoints, name_checkpoint
from memguard.runtime import Console
from memguard.train.checkpoint import find_checkpoint
from memguard.train.resume import Checkpoints, Totals
from memguard.train.run_state import RunState


def test_arrays_are_filled_in_place(tmp_path: Path) -> None:
    path = save_state(tmp_path / "checkpoints", 1, make_state(tally=np.arange(3)))
    tally = np.zeros(3, dtype=np.int64)
    load_state(path, make_state(tally=tally))
    assert tally.tolist() == [0, 1, 2]


def test_a_parameter_without_a_gradient_has_no_moments(tmp_path: Path) -> None:
    """Weights that a family reads in another way than by its layer's call."""
    state = make_state()
    weight, bias = (each.local for each in state.parameters)
    del state.optimizer.inner.state[bias]
    state.optimizer.inner.state[weight]["exp_avg"] += 3
    path = save_state(tmp_path / "checkpoints", 1, state)
    again = make_state()
    again.optimizer.inner.state.clear()
    load_state(path, again)
    weight, bias = (each.local for each in again.parameters)
    assert bias not in again.optimizer.inner.state
    assert again.optimizer.inner.state[weight]["exp_avg"].unique().tolist() == [3]


def test_a_step_saved_again_is_whole_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state(tmp_path / "checkpoints", 1, make_state(tally=np.arange(3)))

    def die_deleting(path: Path, **_: Any) -> None:
        for file in list(path.glob("*.distcp")):
            file.unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die_deleting)
        with pytest.raises(KeyboardInterrupt):
            save_state(tmp_path / "checkpoints", 1, make_state(tally=np.arange(3) + 5))
    found = find_checkpoint(tmp_path / "checkpoints", console=Console())
    path, manifest, _ = found
    assert (path.name, manifest.step) == ("step-00000001", 1)
    tally = np.zeros(3, dtype=np.int64)
    load_state(path, make_state(tally=tally))
    assert tally.tolist() == [5, 6, 7]
    assert [each.name for each in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000001"]


@pytest.mark.parametrize(("stops", "kept"), [(True, [5, 7]), (False, [7])])
def test_only_a_run_that_may_stop_keeps_the_weights_within_its_limit(
    tmp_path: Path, stops: bool, kept: list[int]
) -> None:
    state = make_state()
    model = SimpleNamespace(model=torch.nn.Linear(1, 1))
    step: Any = SimpleNamespace(lm=model, parameters=state.parameters, optimizer=state.optimizer)
    monitor: Any = SimpleNamespace(last_good_step=5, stops=stops, sample_sha256="", arrays={})
    loader: Any = SimpleNamespace(piece_tally=np.zeros(1))
    (tmp_path / "metrics.jsonl").touch()
    run = RunState(
        folder=tmp_path, key="", runtime=RUNTIME, console=Console(), check_folder=lambda: None
    )
    limit = timedelta(minutes=1)
    checkpoints = Checkpoints(run, step=step, loader=loader, monitor=monitor, keep=1, timeout=limit)
    for number in (5, 6, 7):
        checkpoints.save(Totals(step=number))
        monitor.last_good_step = 0
        checkpoints.saves.wait()
        monitor.last_good_step = 5
    names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert names == [name_checkpoint(number) for number in kept]


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"tally": np.zeros(3, dtype=np.int64), "level": np.zeros(2)}, "level"),
        ({"tally": np.zeros(4, dtype=np.int64)}, "tally"),
    ],
    ids=["missing", "of another size"],
)
def test_one_that_lacks_something_is_told_in_a_line(
    arrays: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = save_state(tmp_path / "checkpoints", 1, make_state(tally=np.arange(3)))
    with pytest.raises(
        RecordError, match=rf"'.*step-00000001' is not usable for this run: .*{told}.*Delete"
    ):
        load_state(path, make_state(**arrays))
