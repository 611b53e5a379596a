"""Memory of the device while a model is loaded onto it: never the dense weights together.

Live bytes are counted on a GPU that is not there. Allowed are 1.15 of what the loaded model stores,
and the largest tensor once in bf16 and once in fp32: it is dense while it is quantised.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_gpu import GPU, counted_gpu
from safetensors.torch import load_file, save_file
from tiny_adapters import save_adapter

from memguard.config import RunConfig
from memguard.hf.assembly import Assembly
from memguard.hf.load import load_assembled
from memguard.hf.load_as import LoadedForm
from memguard.runtime import Runtime
from memguard.workflows.common import setup

pytestmark = pytest.mark.slow

# Large enough for a tensor to be a small part of the model.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
LARGEST = 128 * 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base in bf16, and an adapter that was trained on it in NF4."""
    folder = tmp_path_factory.mktemp("peak")
    save_adapter(folder, base=SIZES, r=2)
    for path, metadata, dtype in (
        (folder / "base/model.safetensors", {}, torch.bfloat16),
        (folder / "adapter/adapter_model.safetensors", {"base_quantization": "nf4"}, None),
    ):
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt", **metadata})
    return folder


def train(folder: Path, **adapter: Any) -> Any:
    """The model of a run on one GPU, before its first step."""
    values = {
        "name": "x",
        "model": {"path": str(folder / "base")},
        "data": {"train": "a.jsonl"},
        "adapter": {"name": "lora", "r": 2, "quantization": "nf4", **adapter},
        "train": {"precision": "bf16", "activation_checkpointing": "none"},
    }
    runtime = Runtime(device=GPU)
    context = setup.DistributedContext(runtime=runtime, mesh=None)
    return setup.start_model(RunConfig.model_validate(values), None, context).lm.model


def audit(path: Path) -> Any:
    """The model of an audit, in fp32."""
    assembly = Assembly(mesh=None, device=GPU, quantization="nf4", is_trained=False)
    return load_assembled(str(path), assembly).lm.model


def quantise(folder: Path) -> Any:
    """A model as it may be shipped, from bf16."""
    form = LoadedForm(name="nf4", stored=torch.bfloat16, dtype=torch.bfloat16)
    return form.load(str(folder / "base"), GPU, attn=None).model


@pytest.mark.parametrize(
    "load",
    [
        train,
        lambda folder: train(folder, use_dora=True),
        lambda folder: audit(folder / "adapter"),
        lambda folder: audit(folder / "base"),
        quantise,
    ],
    ids=["LoRA", "DoRA", "audit of an adapter", "audit of its base", "quantised"],
)
def test_one_dense_tensor_at_a_time_is_on_the_device(
    folder: Path, load: Callable[[Path], Any]
) -> None:
    with counted_gpu() as memory:
        model = load(folder)
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {GPU.type}
    stored = sum(tensor.nbytes for tensor in tensors)
    num_weights = sum(tensor.numel() for name, tensor in load_base(folder) if "proj" in name)
    # 4.5 bits a weight, and embedding, head, norms and adapters.
    assert num_weights * 4.5 / 8 < stored < num_weights * 2 / 2.5
    assert stored <= memory.peak_bytes <= 1.15 * stored + (2 + 4) * LARGEST
    # Every tensor of the base once as it is in the file, in bf16; adapters, and 1 % for buffers.
    in_file = sum(tensor.nbytes for _, tensor in load_base(folder))
    adapters = sum(part.nbytes for name, part in model.named_parameters() if "lora" in name)
    assert in_file <= memory.moved_bytes <= 1.01 * in_file + adapters


def load_base(folder: Path) -> list[tuple[str, torch.Tensor]]:
    return list(load_file(folder / "base/model.safetensors").items())
