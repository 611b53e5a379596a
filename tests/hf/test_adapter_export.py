"""Exported adapters load in plain peft, with the outputs of the model that was trained."""

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from mesh_export import read_all
from ranks import RankPool
from tiny_families import build
from torch import Tensor

from memguard.data.tokenization import train_bpe
from memguard.hf.adapter_export import make_peft_config, write_adapter
from memguard.hf.assembly import Assembly, build_meta_layer, fill_layer
from memguard.hf.load import load_model
from memguard.hf.safetensors import ModuleWeights
from memguard.parallel.linear import to_local
from memguard.parallel.lora import LoraSpec, attach_lora, fill_lora, is_adapter_parameter
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape

SPECS = {
    "gaussian": LoraSpec(r=4, alpha=6, init="gaussian"),
    "rslora": LoraSpec(r=3, alpha=2.5, use_rslora=True, target_modules=("q_proj", "down_proj")),
    "dora": LoraSpec(r=4, alpha=6, use_dora=True),
    "dropout": LoraSpec(r=4, alpha=6, dropout=0.2, target_modules=("layers.1.mlp.up_proj",)),
}


def build_trained(spec: LoraSpec) -> Any:
    """Return a model with adapters none of whose parts is as it was initialised."""
    model = build("qwen2")
    attach_lora(model, spec)
    fill_lora(model, spec)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter_parameter(name):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def list_adapters(model: Any) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if is_adapter_parameter(n)}


def save(model: Any, spec: LoraSpec, folder: Path) -> Path:
    build("qwen2").save_pretrained(folder / "base")
    config = make_peft_config(model, spec, base=str(folder / "base"), revision=None)
    tokenizer = train_bpe(["a cat and a dog"], vocab_size=300)
    write_adapter(list_adapters(model), config, tokenizer, folder / "adapter", card="# card\n")
    return folder / "adapter"


@torch.no_grad()
def compute_logits(model: Any) -> Tensor:
    logits: Tensor = model.eval()(torch.arange(24).reshape(2, 12)).logits
    return logits


@pytest.mark.parametrize("kind", SPECS)
def test_plain_peft_computes_the_same_logits(kind: str, tmp_path: Path) -> None:
    spec = SPECS[kind]
    model = build_trained(spec)
    folder = save(model, spec, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # peft warns about missing and unexpected tensors.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        adapted = peft.PeftModel.from_pretrained(build("qwen2"), str(folder))
    expected = compute_logits(model)
    assert not torch.allclose(expected, compute_logits(build("qwen2")), atol=1e-2)
    # fp32: a few hundred operations; the merged weights are rounded once more.
    torch.testing.assert_close(compute_logits(adapted), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(compute_logits(load_model(str(folder))), expected, rtol=0, atol=5e-5)
    assert {path.name for path in folder.iterdir()} >= {"README.md", "tokenizer.json"}


def test_the_configuration_is_that_of_peft(tmp_path: Path) -> None:
    spec = SPECS["rslora"]
    folder = save(build_trained(spec), spec, tmp_path)
    fields = json.loads((folder / "adapter_config.json").read_text())
    assert fields["target_modules"] == ["down_proj", "q_proj"]
    assert fields["base_model_name_or_path"] == str(tmp_path / "base")
    config = peft.LoraConfig.from_pretrained(str(folder))
    assert (config.r, config.lora_alpha, config.use_rslora) == (3, 2.5, True)
    assert config.task_type == "CAUSAL_LM"


def gather(spec: LoraSpec) -> dict[str, Tensor]:
    """On a rank of 4: the gathered adapters, whose values are those of `build_trained`."""
    mesh = build_mesh(MeshShape(y=2, x=2), "cpu")
    assembly = Assembly(mesh=mesh, device=torch.device("cpu"), adapter=spec)
    layer = build_meta_layer(build("qwen2").config, assembly)
    fill_layer(layer, ModuleWeights(build("qwen2")), name="tiny")
    trained = dict(build_trained(spec).named_parameters())
    with torch.no_grad():
        for name, parameter in layer.lm.model.named_parameters():
            if is_adapter_parameter(name):
                local, full = to_local(parameter), trained[name]
                for dim, axis in enumerate(("y", "x")):
                    placement = parameter.placements[dim]
                    if placement.is_shard():
                        mesh_axis = mesh.axis(axis)  # type: ignore[arg-type]
                        full = full.chunk(mesh_axis.degree, placement.dim)[mesh_axis.rank]
                local.copy_(full)
    tensors = read_all(layer.lm.model, mesh)
    return {name: tensor for name, tensor in tensors.items() if is_adapter_parameter(name)}


def test_a_mesh_writes_the_tensors_of_one_process(ranks: RankPool) -> None:
    spec = SPECS["dora"]
    written = list_adapters(build_trained(spec))
    for tensors in ranks(gather, 4, spec):
        assert tensors.keys() == written.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, written[name]), name
