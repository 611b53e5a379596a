"""A tiny state, saved as a checkpoint and read again."""

from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from memguard.config import OptimConfig
from memguard.optim import build_optimizer
from memguard.parallel.local_parameters import find_local_parameters
from memguard.records.run_files import CheckpointManifest, load_checkpoint_manifest
from memguard.runtime import Runtime
from memguard.train.checkpoint import TrainState, load_checkpoint, save_checkpoint, to_stored
from memguard.train.checkpoint_storage import load_metadata

RUNTIME = Runtime(device=torch.device("cpu"))


def make_state(**arrays: NDArray[Any]) -> TrainState:
    parameters = find_local_parameters(torch.nn.Linear(3, 2))
    optimizer = build_optimizer(parameters, OptimConfig())
    state = TrainState(parameters=parameters, optimizer=optimizer, buffers={}, arrays=arrays)
    state.make_room()
    return state


def make_progress(step: int) -> CheckpointManifest:
    return CheckpointManifest(
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


def save_state(folder: Path, step: int, state: TrainState) -> Path:
    log = folder.parent / "metrics.jsonl"
    log.write_text("a line\n")
    return save_checkpoint(
        folder,
        to_stored(state.parts()),
        RUNTIME,
        progress=make_progress(step),
        log=log,
        log_bytes=7,
        keep=2,
    )


def load_state(path: Path, state: TrainState) -> None:
    stored = load_metadata(path, load_checkpoint_manifest(path).files)
    load_checkpoint(path, state, stored=stored, runtime=RUNTIME)
