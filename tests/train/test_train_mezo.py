"""Whole runs by MeZO, resumed and rebuilt from the numbers of their seeds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from run_examples import (
    Killed,
    acting_after,
    assert_same_weights,
    make_run,
    read_lines,
    read_weights,
    run_folder,
    train_checked,
    write_documents,
)
from safetensors.torch import load_file

from memguard.config import RunConfig
from memguard.errors import ConfigError, RecordError
from memguard.train.metrics import StepMetrics
from memguard.train.trainer import Trainer
from memguard.workflows.training.seeds import export_from_seeds, save_sums

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_documents(folder / "documents.jsonl", 27)
    return folder


def make(folder: Path, name: str, **changes: Any) -> RunConfig:
    return make_run(
        folder,
        name=name,
        optim={"name": "mezo", "lr": 1e-4, "max_grad_norm": None, "num_seeds": 3},
        mitigations=[{"name": "goldfish", "k": 3, "context_width": 3}],
        audit={"enabled": False},
        **{"train": {"checkpoint_every_steps": 2}, **changes},
    )


@pytest.fixture(scope="module")
def alone(folder: Path) -> RunConfig:
    return train_checked(make(folder, "alone"))


def test_a_killed_run_ends_with_the_same_bits(folder: Path, alone: RunConfig) -> None:
    config = make(folder, "killed")

    def die(_: Trainer) -> None:
        raise Killed

    with acting_after(5, die), pytest.raises(Killed):
        train_checked(config)
    train_checked(config)
    assert_same_weights(config, alone)
    lines = read_lines(config, StepMetrics)
    assert [line.slope for line in lines] == [line.slope for line in read_lines(alone, StepMetrics)]
    assert all(line.slope and line.grad_norm is None for line in lines)


def test_a_run_of_a_mesh_is_rebuilt_from_its_seeds(
    folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    config = make(folder, "mesh", parallel={"z": 2, "y": 2})
    ranks(train_checked, 4, config)
    run = run_folder(config)
    assert (run / "seeds.json").stat().st_size < 1024
    export_from_seeds(run, tmp_path / "out")
    rebuilt, trained = load_file(tmp_path / "out" / "model.safetensors"), read_weights(config)
    assert rebuilt.keys() == trained.keys()
    moved = json.loads((run / "seeds.json").read_text())["sums"]
    assert len(moved) == 3
    assert all(moved)
    for name, tensor in trained.items():
        torch.testing.assert_close(rebuilt[name], tensor, rtol=0, atol=1e-6)
    values = json.loads((run / "seeds.json").read_text())
    values["sums"][1] *= 1.001
    (run / "seeds.json").write_text(json.dumps(values))
    with pytest.raises(RecordError, match=r"seeds.json' is damaged"):
        export_from_seeds(run, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.quick
def test_sums_are_of_the_steps_that_were_kept(tmp_path: Path) -> None:
    config = make(tmp_path, "kept")
    rest = {"num_steps": 4, "loss": 1.0, "grad_norm": None, "num_rows": 1, "tokens_per_s": 1.0}
    rest |= {"num_supervised_tokens": 1, "num_kept_tokens": 1, "peak_memory_bytes": 1}
    lines = [
        StepMetrics(step=step, lr=0.5, slope=10.0**step, elapsed_s=1.0, **rest)  # type: ignore[arg-type]
        for step in (1, 2, 3, 4)
    ]
    text = "\n".join(line.model_dump_json() for line in lines)
    (tmp_path / "metrics.jsonl").write_text(f"{text}\n")
    save_sums(config, tmp_path, 3)
    sums = json.loads((tmp_path / "seeds.json").read_text())["sums"]
    assert len(sums) == 3
    assert sum(sums) == -0.5 * (10 + 100 + 1000)


def test_a_run_without_seeds_is_not_rebuilt(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no seeds\.json"):
        export_from_seeds(tmp_path, tmp_path / "out")
