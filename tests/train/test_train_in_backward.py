"""Whole runs whose weights are updated inside backward."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import RankPool
from run_examples import (
    Killed,
    acting_after,
    assert_same_weights,
    make_run,
    read_losses,
    train_checked,
    write_documents,
)

from memguard.config import RunConfig
from memguard.errors import ConfigError, Diverged
from memguard.train.trainer import Trainer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_documents(folder / "documents.jsonl", 27)
    return folder


def make(folder: Path, name: str, optimizer: str = "adalomo", **changes: Any) -> RunConfig:
    """Return a run of 6 steps, with checkpoints after 2, 4 and 6."""
    return make_run(
        folder,
        name=name,
        optim={"name": optimizer, "lr": 0.02, "max_grad_norm": None},
        audit={"enabled": False},
        **{"train": {"checkpoint_every_steps": 2, "keep_checkpoints": 5}, **changes},
    )


def die(_: Trainer) -> None:
    raise Killed


def train_and_die(config: RunConfig) -> None:
    with acting_after(5, die), pytest.raises(Killed):
        train_checked(config)


@pytest.fixture(scope="module")
def whole(folder: Path) -> RunConfig:
    return train_checked(make(folder, "whole"))


def test_a_killed_run_ends_with_the_same_bits(folder: Path, whole: RunConfig) -> None:
    config = make(folder, "killed")
    train_and_die(config)
    train_checked(config)
    assert_same_weights(config, whole)
    assert read_losses(config) == read_losses(whole)


def test_a_run_goes_on_on_another_mesh(folder: Path, whole: RunConfig, ranks: RankPool) -> None:
    config = make(folder, "moved", parallel={"z": 2, "x": 2})
    ranks(train_and_die, 4, config)
    moved = make(folder, "moved", parallel={"y": 2})
    ranks(train_checked, 2, moved)
    np.testing.assert_allclose(
        np.array(read_losses(moved)), np.array(read_losses(whole)), rtol=1e-5
    )


def test_a_norm_that_is_not_finite_ends_the_run_and_names_the_last_checkpoint(
    folder: Path,
) -> None:
    config = make(folder, "diverged", "lomo")

    def spoil(trainer: Trainer) -> None:
        trainer.step.parameters[0].local.data[0, 0] = float("nan")

    with acting_after(3, spoil), pytest.raises(Diverged, match="last weights are of step-00000002"):
        train_checked(config)


def test_weights_in_bf16_train_on_a_mesh_as_on_one_process(folder: Path, ranks: RankPool) -> None:
    bf16 = {"checkpoint_every_steps": 2, "weights": "bf16", "precision": "bf16"}
    alone = train_checked(make(folder, "alone-bf16", train=bf16))
    config = make(folder, "mesh-bf16", train=bf16, parallel={"z": 2, "y": 2})
    ranks(train_and_die, 4, config)
    ranks(train_checked, 4, config)
    np.testing.assert_allclose(
        np.array(read_losses(config)), np.array(read_losses(alone)), rtol=1e-2
    )


def test_another_optimizer_refuses_its_checkpoint(folder: Path, whole: RunConfig) -> None:
    config = make(folder, "refused")
    train_and_die(config)
    with pytest.raises(ConfigError, match=r"optim\.name"):
        train_checked(make(folder, "refused", "lomo"))
