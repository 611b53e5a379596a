"""Whole runs that train adapters: on one process and on meshes, resumed, exported, audited."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from ranks import RankPool
from run_examples import make_run, run_folder, train_checked, write_documents
from safetensors.torch import load_file, save_file
from test_train_mesh import curve, stop_after

from memguard.config import ParallelConfig, RunConfig
from memguard.errors import RecordError
from memguard.hf.identity import sum_model
from memguard.hf.load import load_model
from memguard.records.folders import RunFiles
from memguard.records.run_files import find_weights_folder, load_trained
from memguard.workflows.verify import verify

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents and a trained base model."""
    folder = tmp_path_factory.mktemp("adapters")
    write_documents(folder / "documents.jsonl", 27)
    train_checked(make_run(folder, name="base", audit={"enabled": False}, train={"epochs": 1}))
    return folder


def make(
    folder: Path, *, name: str, mesh: dict[str, int] | None = None, **changes: Any
) -> RunConfig:
    """Return a run of 6 steps on adapters, with checkpoints after 2, 4 and 6."""
    values = {
        "model": {"path": str(folder / "runs/base/model"), "scratch": None},
        "adapter": {"name": "lora", "r": 4, "lora_alpha": 8, "use_rslora": True},
        "parallel": mesh or {},
        "train": {"checkpoint_every_steps": 2, "keep_checkpoints": 5},
    }
    return make_run(folder, name=name, **{**values, **changes})


def read_adapters(config: RunConfig) -> dict[str, torch.Tensor]:
    path = run_folder(config) / "adapter/adapter_model.safetensors"
    tensors: dict[str, torch.Tensor] = load_file(path)
    return tensors


@pytest.fixture(scope="module")
def alone(folder: Path) -> RunConfig:
    config = make(folder, name="alone")
    before = sum_model(folder / "runs/base/model")
    train_checked(config)
    assert sum_model(folder / "runs/base/model") == before
    return config


@torch.no_grad()
def compute_logits(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    logits: torch.Tensor = model(torch.randint(0, 300, (2, 20), generator=generator)).logits
    return logits


def test_a_run_leaves_a_folder_that_plain_peft_loads(folder: Path, alone: RunConfig) -> None:
    run = run_folder(alone)
    assert not (run / "model").exists()
    assert find_weights_folder(run) == run / "adapter"
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "runs/base/model")
    before = compute_logits(base)
    adapted = peft.PeftModel.from_pretrained(base, str(run / "adapter"))
    expected = compute_logits(adapted)
    # The adapter has an effect; memguard adds it to the weights instead of the outputs (fp32).
    assert float((expected - before).abs().max()) > 1e-2
    torch.testing.assert_close(
        compute_logits(load_model(str(run / "adapter"))), expected, rtol=0, atol=1e-5
    )
    assert transformers.AutoTokenizer.from_pretrained(run / "adapter").vocab_size > 0
    config = json.loads((run / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "runs/base/model")
    assert len(config["target_modules"]) == 7


def test_trained_json_seals_the_adapter_and_its_base(folder: Path, alone: RunConfig) -> None:
    trained = load_trained(run_folder(alone))
    assert trained.folder == "adapter"
    assert trained.base == sum_model(folder / "runs/base/model")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= trained.model.keys()
    assert RunFiles(run_folder(alone)).find_damage("trained") == []


def test_the_audit_is_of_base_and_adapter_and_verify_checks_the_run(alone: RunConfig) -> None:
    report = json.loads((run_folder(alone) / "audit/report.json").read_text())
    assert report["model"]["base"] is not None
    parts = verify(run_folder(alone), lambda *_: None).parts
    assert [part.state for part in parts] == ["intact"] * len(parts)
    assert (run_folder(alone) / "adapter/README.md").read_text().count("Memorization audit") == 1


def test_checkpoints_hold_adapters_and_their_optimizer_only(alone: RunConfig) -> None:
    path = run_folder(alone) / "checkpoints/step-00000006/metadata.json"
    names = set(json.loads(path.read_text())["tensors"])
    models = {name for name in names if name.startswith("model.")}
    assert len(models) == 2 * 2 * 7, "two factors in two blocks of seven layers"
    assert all("lora_" in name for name in models)
    assert len({name for name in names if name.startswith("optimizer.")}) == 3 * len(models)


def test_a_damaged_adapter_is_exported_again(folder: Path, alone: RunConfig) -> None:
    path = run_folder(alone) / "adapter/adapter_model.safetensors"
    before = path.read_bytes()
    path.write_bytes(before[:-1] + b"\0\0")
    assert [item.file for item in RunFiles(run_folder(alone)).find_damage("trained")] == [
        "adapter/adapter_model.safetensors"
    ]
    train_checked(alone)
    assert path.read_bytes() == before


@pytest.mark.mesh
def test_a_mesh_trains_the_adapter_of_one_process(
    folder: Path, alone: RunConfig, ranks: RankPool
) -> None:
    config = make(folder, name="sharded", mesh={"z": 2, "y": 1, "x": 2})
    ranks(train_checked, 4, config)
    # fp32: sums in another order, magnified by 6 steps of AdamW.
    np.testing.assert_allclose(curve(config), curve(alone), rtol=2e-4)
    ours, theirs = read_adapters(config), read_adapters(alone)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=2e-4)
    assert (run_folder(config) / "audit/report.json").is_file()


def test_a_run_resumes_on_any_mesh(folder: Path, alone: RunConfig, ranks: RankPool) -> None:
    stop_after(ranks, make(folder, name="moving", mesh={"data": 2, "x": 2}), 4, 2)
    stop_after(ranks, make(folder, name="moving", mesh={"y": 2}), 2, 4)
    last = make(folder, name="moving", audit={"enabled": False})
    train_checked(last)
    np.testing.assert_allclose(curve(last), curve(alone), rtol=2e-4)


def test_a_run_does_not_resume_on_a_changed_base(folder: Path, ranks: RankPool) -> None:
    base = Path(shutil.copytree(folder / "runs/base/model", folder / "own-base"))
    config = make(folder, name="changed", mesh={"y": 2}, model={"path": str(base), "scratch": None})
    stop_after(ranks, config, 2, 2)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] *= 2
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RecordError, match=r"another base model: its model\.safetensors was chang"):
        train_checked(config.model_copy(update={"parallel": ParallelConfig()}))


@pytest.mark.long
def test_recomputation_and_bf16_train_too(folder: Path, alone: RunConfig, ranks: RankPool) -> None:
    for name, train in (
        ("full", {"activation_checkpointing": "full"}),
        ("selective", {"activation_checkpointing": "selective", "micro_batch_size": 4}),
    ):
        config = make(folder, name=name, train=train, audit={"enabled": False})
        train_checked(config)
        np.testing.assert_allclose(curve(config), curve(alone), rtol=2e-4)
    narrow = make(folder, name="narrow", train={"precision": "bf16"}, audit={"enabled": False})
    train_checked(narrow)
    # 8 bits of mantissa in every operation; the loss is near 6 nats.
    np.testing.assert_allclose(curve(narrow), curve(alone), rtol=2e-2)
    both = make(
        folder,
        name="narrow-mesh",
        mesh={"z": 2},
        train={"precision": "bf16"},
        audit={"enabled": False},
    )
    ranks(train_checked, 2, both)
    np.testing.assert_allclose(curve(both), curve(narrow), rtol=1e-2)
