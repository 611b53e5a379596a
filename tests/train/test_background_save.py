"""A save in the background: the state of its moment, and what becomes of one that fails."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_examples import RUNTIME, load_state, make_progress, make_state
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from memguard.errors import OtherRankFailed
from memguard.parallel.local_parameters import LocalParameter, StoredPieces
from memguard.runtime import Console
from memguard.runtime.stalls import SAVE_THREAD
from memguard.train import checkpoint
from memguard.train.checkpoint import TrainState, save_checkpoint
from memguard.train.resume import BackgroundSave


@contextmanager
def held(patch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Hold saves before they read the first number; yields what lets them go on."""
    may_go = threading.Event()
    write = checkpoint._write_part

    def wait_and_write(*arguments: Any) -> None:
        assert may_go.wait(60)
        write(*arguments)

    patch.setattr(checkpoint, "_write_part", wait_and_write)
    yield may_go.set
    patch.undo()


def start(saves: BackgroundSave, folder: Path, state: TrainState) -> None:
    log = folder.parent / "metrics.jsonl"
    save = partial(
        save_checkpoint,
        folder,
        progress=make_progress(1),
        log=log,
        log_bytes=log.stat().st_size,
        keep=2,
    )
    saves.start(state, save)


@torch.no_grad()
def change(state: TrainState) -> None:
    for part in state.parts():
        part.value.add_(1)


class Noted(Console):
    """Keeps warnings instead of printing them."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        object.__setattr__(self, "warnings", [])

    warnings: list[str]

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def make_saves(console: Console | None = None) -> BackgroundSave:
    return BackgroundSave(RUNTIME, console or Noted(), timeout=timedelta(minutes=1))


@pytest.mark.parametrize("has_room", [True, False])
def test_what_changes_later_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    state, log, console = make_state(tally=np.arange(3)), tmp_path / "metrics.jsonl", Noted()
    log.write_text("one line\n")
    change(state)
    before = [part.value.clone() for part in state.parts()]
    saves = make_saves(console)
    if not has_room:

        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        monkeypatch.setattr(torch, "empty_like", refuse)
    for round_number in range(2):
        with held(monkeypatch) as let_go:
            start(saves, tmp_path / f"checkpoints-{round_number}", state)
            assert saves.has_room == has_room
            if has_room:
                change(state)
                with log.open("a") as file:
                    file.write("another\n")
            let_go()
            saves.wait()
        loaded = make_state(tally=np.zeros(3, dtype=np.int64))
        path = tmp_path / f"checkpoints-{round_number}" / "step-00000001"
        load_state(path, loaded)
        values = [part.value for part in loaded.parts()]
        for value, expected in zip(values, before, strict=True):
            assert torch.equal(value, expected + round_number * has_room)
        assert (path / "metrics.jsonl").read_text().count("\n") == 1 + round_number * has_room
    assert len(console.warnings) == (not has_room), "said once"


def fail(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def fail_elsewhere(*_: Any) -> None:
    raise OtherRankFailed(3, 1)


def succeed(*_: Any) -> None:
    pass


def test_one_failure_is_a_warning_and_two_in_a_row_are_an_error() -> None:
    state, console = make_state(), Noted()
    saves = make_saves(console)
    for save in (fail, succeed, fail):
        saves.start(state, save)
        saves.wait()
    assert len(console.warnings) == 2
    assert "failed on rank 0 (OSError (No space left on device) at" in console.warnings[0]
    assert all(len(text) <= 160 and "\n" not in text for text in console.warnings)
    saves.start(state, fail)
    with pytest.raises(OSError, match="No space"):
        saves.wait()
    saves.wait()


@pytest.mark.parametrize("save", [fail, fail_elsewhere])
def test_a_vital_save_must_not_fail(save: Any) -> None:
    saves = make_saves()
    saves.start(make_state(), save, is_vital=True)
    with pytest.raises((OSError, OtherRankFailed)):
        saves.wait()


def test_after_an_error_the_save_in_flight_ends(tmp_path: Path) -> None:
    saves, done = make_saves(), threading.Event()
    saves.start(make_state(), lambda *_: done.wait(0.1) or done.set())
    saves.end()
    assert done.is_set()
    assert not any(thread.name == SAVE_THREAD for thread in threading.enumerate())


def test_a_copy_on_the_cpu_stays_there_when_the_mesh_is_elsewhere() -> None:
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("meta", (2,))
        local = torch.nn.Parameter(torch.empty(2, 3, device="meta"))
        source = torch.nn.Parameter(DTensor.from_local(local.detach(), mesh, [Shard(0)]))
        parameter = LocalParameter(name="p", source=source, local=local, num_copies=1)
        copy = torch.ones(2, 3)
        stored = parameter.to_global(copy)
    finally:
        dist.destroy_process_group()
    assert isinstance(stored, StoredPieces)
    assert stored.shape == (4, 3)
    assert stored.device.type == "cpu"
    assert stored.pieces.keys() == {(2, 0)}
    assert stored.pieces[2, 0].data_ptr() == copy.data_ptr()
