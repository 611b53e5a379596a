"""Whole runs with weights in bf16: what is trained, stored, exported, audited and resumed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from ranks import RankPool
from run_examples import (
    QUIET,
    assert_same_weights,
    kill_after,
    make_run,
    read_losses,
    read_report,
    read_weights,
    run_folder,
    stop_after,
    train_checked,
)

from memguard.config import RunConfig, load_yaml
from memguard.errors import ConfigError
from memguard.optim import build_optimizer
from memguard.parallel.local_parameters import find_local_parameters
from memguard.records.run_files import load_checkpoint_manifest
from memguard.runtime import Runtime
from memguard.train.checkpoint import TrainState, load_checkpoint
from memguard.train.checkpoint_storage import load_metadata

pytestmark = pytest.mark.slow


def make(folder: Path, *, name: str = "run", train: Any = None, **changes: Any) -> RunConfig:
    """Return a run of 6 steps of two micro-batches, saved after steps 2, 4 and 6."""
    settings = {"weights": "bf16", "max_steps": 6, "micro_batch_size": 4, "keep_checkpoints": 5}
    settings |= {"checkpoint_every_steps": 2, **(train or {})}
    return make_run(folder, name=name, train=settings, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def finished(folder: Path) -> RunConfig:
    return train_checked(make(folder))


def test_the_export_has_the_bits_of_the_checkpoint(finished: RunConfig) -> None:
    run = run_folder(finished)
    exported = read_weights(finished)
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    config = transformers.AutoConfig.from_pretrained(run / "model")
    assert config.dtype == torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    parameters = find_local_parameters(model)
    last = max((run / "checkpoints").iterdir())
    stored = load_metadata(last, load_checkpoint_manifest(last).files)
    num_pieces = next(torch.Size(size) for name, size in sizes(stored) if name == "piece_tally")
    state = TrainState(
        parameters=parameters,
        optimizer=build_optimizer(parameters, finished.optim),
        buffers={},
        arrays={"piece_tally": np.zeros(num_pieces, dtype=np.int64)},
    )
    load_checkpoint(last, state, stored=stored, runtime=Runtime(device=torch.device("cpu")))
    assert {parameter.local.dtype for parameter in parameters} == {torch.bfloat16}
    for parameter in parameters:
        assert torch.equal(exported[parameter.name], parameter.local.detach()), parameter.name


def sizes(stored: Any) -> list[tuple[str, Any]]:
    return [(name, tensor.size) for name, tensor in stored.tensors.items()]


def test_a_run_in_bf16_is_trained_and_audited_as_one_in_fp32(
    folder: Path, finished: RunConfig
) -> None:
    written = load_yaml(run_folder(finished) / "config.yaml").values["train"]
    assert (written["weights"], written["precision"]) == ("bf16", "bf16")
    wide = train_checked(make(folder, name="fp32", train={"weights": "fp32"}))
    ours, theirs = read_losses(finished), read_losses(wide)
    assert ours[0] != theirs[0]
    np.testing.assert_allclose(np.float64(ours), np.float64(theirs), rtol=0.01)
    for config in (finished, wide):
        report = read_report(config)
        assert report.model.name == config.name
        assert report.model.weights_sha256 != report.model.base_weights_sha256


@pytest.mark.parametrize("train", [{}, {"micro_batch_size": None}], ids=["micro-batches", "whole"])
def test_killed_and_resumed_ends_with_the_same_bits(
    tmp_path: Path, finished: RunConfig, train: dict[str, Any]
) -> None:
    config = make(tmp_path, train=train, **QUIET)
    kill_after(5, config)
    train_checked(config)
    whole = train_checked(make(tmp_path, name="whole", train=train, **QUIET)) if train else finished
    assert read_losses(config) == read_losses(whole)
    assert_same_weights(config, whole)


def test_fp32_and_bf16_do_not_resume_from_each_other(tmp_path: Path) -> None:
    for there, here in (("bf16", "fp32"), ("fp32", "bf16")):
        stop_after(2, make(tmp_path, name=there, train={"weights": there}, **QUIET))
        other = make(tmp_path, name=there, train={"weights": here}, **QUIET)
        match = rf'train\.weights \("{there}" there, "{here}" here\)'
        with pytest.raises(ConfigError, match=match) as error:
            train_checked(other)
        assert "\n" not in str(error.value)


def stop_on_mesh(config: RunConfig) -> None:
    stop_after(3, config)


@pytest.mark.mesh
def test_a_run_in_bf16_goes_from_a_mesh_to_one_process(
    tmp_path: Path, finished: RunConfig, ranks: RankPool
) -> None:
    ranks(stop_on_mesh, 4, make(tmp_path, parallel={"z": 2, "x": 2}, **QUIET))
    config = make(tmp_path, **QUIET)
    train_checked(config)
    assert len(read_losses(config)) == 6
    np.testing.assert_allclose(
        np.float64(read_losses(config)), np.float64(read_losses(finished)), rtol=0.01
    )
