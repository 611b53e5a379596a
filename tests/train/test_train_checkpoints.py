"""Whole runs from checkpoints of special kinds: ternary weights (BitNet), doubled blocks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cli_examples import make_texts
from ranks import RankPool
from run_examples import make_run, run_folder, train_checked, write_documents
from safetensors.torch import load_file
from test_train_mesh import curve
from tiny_families import build
from transformers.integrations.bitnet import AutoBitLinear

from memguard.config import RunConfig
from memguard.data.tokenization import train_bpe
from memguard.errors import ConfigError, ModelError
from memguard.hf.assembly import Assembly
from memguard.hf.checkpoint_files import check_folder
from memguard.hf.load import load_assembled, load_model
from memguard.parallel.lora import LoraSpec
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape
from memguard.records import AuditReport, load_record

pytestmark = pytest.mark.slow

ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_documents(folder / "documents.jsonl", 27)
    return folder


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    train_bpe(make_texts(60), vocab_size=400).save_pretrained(folder)
    return folder


def set_quantization(folder: Path, fields: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = fields
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def ternary(folder: Path) -> Path:
    """Plain weights, which each forward rounds to -1, 0 and 1 times a scale."""
    path = save(build("bitnet", vocab_size=400, max_position_embeddings=128), folder / "ternary")
    set_quantization(path, ONLINE)
    return path


@pytest.fixture(scope="module")
def doubled(folder: Path) -> Path:
    """A Llama with each block twice, as depth up-scaling leaves it (LESA interpolates them)."""
    fields: dict[str, Any] = {"vocab_size": 400, "max_position_embeddings": 128}
    model = build("llama", **fields)
    deeper = build("llama", **fields, num_hidden_layers=4)
    state = model.state_dict()
    deeper.load_state_dict(
        {
            name: state[name.replace(f"layers.{number}.", f"layers.{number // 2}.")]
            for name in deeper.state_dict()
            for number in [int(name.split(".")[2]) if ".layers." in name else 0]
        }
    )
    return save(deeper, folder / "doubled")


def make(folder: Path, model: Path, *, name: str, mesh: dict[str, int]) -> RunConfig:
    return make_run(
        folder, name=name, model={"scratch": None, "path": str(model)}, parallel=mesh,
        train={"epochs": 1},
    )  # fmt: skip


def train(config: RunConfig) -> None:
    # BitNet's arithmetic is compiled by transformers, which takes a minute here.
    with torch.compiler.set_stance("force_eager"):
        train_checked(config)


def check_run(ranks: RankPool, folder: Path, model: Path, mesh: dict[str, int]) -> RunConfig:
    """Train and audit on one process and on a mesh; return the run on the mesh."""
    alone, sharded = (
        make(folder, model, name="-".join((model.name, *degrees)), mesh=degrees)
        for degrees in ({}, mesh)
    )
    train(alone)
    ranks(train, torch.Size(mesh.values()).numel(), sharded, timeout_s=250)
    # fp32: sums in another order, magnified by AdamW.
    np.testing.assert_allclose(curve(sharded), curve(alone), rtol=2e-4)
    ours, theirs = (run_folder(config) for config in (sharded, alone))
    first, second = (
        load_record(AuditReport, run / "audit" / "report.json") for run in (ours, theirs)
    )
    assert first.verdict == second.verdict
    names = [load_file(run / "model" / "model.safetensors").keys() for run in (ours, theirs)]
    assert names[0] == names[1]
    configs = [json.loads((run / "model" / "config.json").read_text()) for run in (ours, theirs)]
    assert configs[0] == configs[1]
    return sharded


def test_ternary_weights_train_and_audit_on_data_and_z(
    ranks: RankPool, folder: Path, ternary: Path
) -> None:
    config = check_run(ranks, folder, ternary, {"data": 1, "z": 2})
    trained = load_model(str(run_folder(config) / "model"))
    layer = trained.model.layers[0].mlp.up_proj
    assert isinstance(layer, AutoBitLinear), "the export is ternary in its forward, too"
    assert layer.weight.unique().numel() > 3, "and its own weights are not"


@pytest.mark.parametrize(
    "mesh", [{"z": 2, "x": 2}, pytest.param({"z": 2, "y": 2, "x": 2}, marks=pytest.mark.mesh)]
)
def test_a_llama_with_doubled_blocks_trains_and_audits_on_a_mesh(
    ranks: RankPool, folder: Path, doubled: Path, mesh: dict[str, int]
) -> None:
    check_run(ranks, folder, doubled, mesh)


def compare_gradients(model: str) -> list[str]:
    """On a rank: the gradients of z = 2 that differ from those of plain transformers."""
    torch.compiler.set_stance("force_eager")
    mesh = build_mesh(MeshShape(z=2), "cpu")
    layer = load_assembled(model, Assembly(mesh=mesh, device=torch.device("cpu")))
    ids = torch.randint(3, 90, (1, 16), generator=torch.Generator().manual_seed(0))
    labels = ids.flatten()
    lm = layer.lm
    lm(lambda: lm.sum_nll(lm.hidden_states(ids).flatten(0, 1), labels)).backward()
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    logits = plain(input_ids=ids).logits.flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    wanted = dict(plain.named_parameters())
    differing = []
    for name, parameter in lm.model.named_parameters():
        # FSDP2 averages over ranks, which all had the same row.
        ours, theirs = parameter.grad.full_tensor(), wanted[name].grad
        # fp32: sums in another order.
        if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max())):
            differing.append(name)
    return differing if len(wanted) > 20 else ["there are few parameters"]


def test_gradients_of_ternary_weights_are_those_of_one_process(
    ranks: RankPool, ternary: Path
) -> None:
    assert ranks(compare_gradients, 2, str(ternary)) == [[], []]


def refuse_split_and_adapters(model: str) -> list[str]:
    """On a rank: why ternary layers are not split, and have no adapters."""
    device, messages = torch.device("cpu"), []
    adapter = LoraSpec(r=4, alpha=4, target_modules=("q_proj",))
    for shape, spec in ((MeshShape(x=2), None), (MeshShape(z=2), adapter)):
        sharding = Assembly(mesh=build_mesh(shape, "cpu"), device=device, adapter=spec)
        with pytest.raises((ModelError, ConfigError)) as caught:
            load_assembled(model, sharding)
        messages.append(str(caught.value))
    return messages


def test_ternary_layers_are_refused_where_their_rounding_would_be_lost(
    ranks: RankPool, ternary: Path
) -> None:
    split, adapted = ranks(refuse_split_and_adapters, 2, str(ternary))[0]
    assert "It can use the axes data and z" in split
    assert "AutoBitLinear" in adapted


@pytest.mark.parametrize(
    "fields",
    [
        {"quant_method": "bitnet"},
        {"quant_method": "bitnet", "linear_class": "autobitlinear"},
        {**ONLINE, "quantization_mode": "offline"},
    ],
)
def test_packed_ternary_weights_are_refused_with_the_form_to_use(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    build("bitnet").save_pretrained(tmp_path)
    set_quantization(tmp_path, fields)
    with pytest.raises(ModelError, match=r"packed ternary .* 'quantization_mode': 'onl") as caught:
        check_folder(str(tmp_path))
    assert "\n" not in str(caught.value)
