"""Whole runs that train some modules: on one process and on a mesh, resumed, with mitigations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RankPool
from run_examples import make_run, read_weights, run_folder, train_checked, write_documents
from safetensors.torch import load_file
from test_train_mesh import curve, stop_after
from tiny_llama import TINY_LLAMA

from memguard.config import RunConfig
from memguard.errors import ConfigError

pytestmark = pytest.mark.slow

UNTIED = {"scratch": {"config": {**TINY_LLAMA, "tie_word_embeddings": False}, "vocab_size": 400}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents and a trained base model."""
    folder = tmp_path_factory.mktemp("modules")
    write_documents(folder / "documents.jsonl", 27)
    base = make_run(
        folder, name="base", model=UNTIED, audit={"enabled": False}, train={"epochs": 1}
    )
    train_checked(base)
    return folder


def make(folder: Path, *, name: str, **changes: Any) -> RunConfig:
    """Return a run of 6 steps that trains the head, with checkpoints after 2, 4 and 6."""
    train = {"trainable_modules": ["lm_head"], "checkpoint_every_steps": 2, "keep_checkpoints": 5}
    values: dict[str, Any] = {
        "model": {"path": str(folder / "runs/base/model"), "scratch": None},
        "audit": {"enabled": False},
        "mitigations": [{"name": "goldfish", "k": 3, "context_width": 3}],
    }
    return make_run(folder, name=name, **{**values, "train": train, **changes})


@pytest.fixture(scope="module")
def alone(folder: Path) -> RunConfig:
    return train_checked(make(folder, name="alone"))


def test_only_the_head_changes(folder: Path, alone: RunConfig) -> None:
    before = load_file(folder / "runs/base/model/model.safetensors")
    after = read_weights(alone)
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {"lm_head.weight"}
    assert after.keys() == before.keys()


def test_checkpoints_hold_the_head_and_its_optimizer_only(alone: RunConfig) -> None:
    run = run_folder(alone)
    metadata = json.loads((run / "checkpoints/step-00000006/metadata.json").read_text())
    names = set(metadata["tensors"])
    assert {name for name in names if name.startswith("model.")} == {"model.lm_head.weight"}
    optimizer = {name for name in names if name.startswith("optimizer.")}
    assert len(optimizer) == 3, "two moments and the number of steps"
    assert all("lm_head.weight" in name for name in optimizer)


def test_a_mesh_trains_the_same_head(folder: Path, alone: RunConfig, ranks: RankPool) -> None:
    config = make(folder, name="sharded", parallel={"z": 2, "y": 1, "x": 2})
    ranks(train_checked, 4, config)
    # fp32: sums in another order, magnified by 6 steps of AdamW.
    np.testing.assert_allclose(curve(config), curve(alone), rtol=2e-4)
    ours, theirs = read_weights(config), read_weights(alone)
    for name, tensor in ours.items():
        atol = 2e-4 if name == "lm_head.weight" else 0
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=atol)


def test_a_run_resumes_on_a_mesh(folder: Path, alone: RunConfig, ranks: RankPool) -> None:
    stop_after(ranks, make(folder, name="moving", parallel={"y": 2}), 2, 4)
    last = make(folder, name="moving")
    train_checked(last)
    np.testing.assert_allclose(curve(last), curve(alone), rtol=2e-4)


@pytest.mark.long
def test_a_module_inside_blocks_is_trained_on_a_mesh(folder: Path, ranks: RankPool) -> None:
    train = {"trainable_modules": ["down_proj", "model.norm"], "activation_checkpointing": "full"}
    alone, sharded = (
        make(folder, name=name, train=train, parallel=mesh)
        for name, mesh in (("inside", {}), ("inside-mesh", {"data": 2, "y": 2}))
    )
    train_checked(alone)
    ranks(train_checked, 4, sharded)
    np.testing.assert_allclose(curve(sharded), curve(alone), rtol=2e-4)


def test_the_head_of_a_tied_model_is_refused(folder: Path) -> None:
    config = make_run(folder, name="tied", train={"trainable_modules": ["lm_head"]})
    with pytest.raises(ConfigError, match=r"'lm_head' are also those of 'model.embed_tokens'"):
        train_checked(config)
