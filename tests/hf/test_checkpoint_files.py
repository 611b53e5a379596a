"""What is refused before torch is imported: alike for one process, for a mesh and for `plan`."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_damages import Q_PROJ, REFUSED, change, replace, split, store
from safetensors.torch import load_file

from memguard.errors import ModelError
from memguard.hf import checkpoint
from memguard.hf.checkpoint import get_folder
from memguard.hf.checkpoint_files import check_folder, read_headers
from memguard.hf.load import load_model


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_name_in_one_line(folder: Path, case: str) -> None:
    spoil, message = REFUSED[case]
    spoil(folder)
    for refuse in (check_folder, load_model, lambda path: get_folder(path, None)):
        with pytest.raises(ModelError, match=message) as caught:
            refuse(str(folder))
        assert str(caught.value).startswith(f"model '{folder}'")
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("transformer.h.0.attn.bias", torch.uint8),
        ("gpt_neox.layers.0.attention.bias", torch.bool),
        ("embeddings.position_ids", torch.int64),
        ("batches_seen", torch.int64),
    ],
)
def test_buffers_of_whole_numbers_pass(folder: Path, name: str, dtype: torch.dtype) -> None:
    store(name, dtype)(folder)
    check_folder(str(folder))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_headers_are_those_of_the_files(folder: Path, dtype: torch.dtype) -> None:
    store(Q_PROJ, dtype)(folder)
    ((path, tensors),) = read_headers(folder, name="model")
    state = load_file(path)
    assert {name: each.shape for name, each in tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }
    assert (
        tensors[Q_PROJ].dtype
        == {"float64": "F64", "float16": "F16", "bfloat16": "BF16"}[
            str(dtype).removeprefix("torch.")
        ]
    )


def test_fields_of_a_dense_model_and_null_pass(folder: Path) -> None:
    change(num_local_experts=0, head_dim=None, quantization_config=None)(folder)
    check_folder(str(folder))


def test_it_needs_no_torch() -> None:
    program = (
        "import sys; import memguard.hf.adapter_files, memguard.hf.identity; "
        "assert not {'torch', 'transformers', 'safetensors'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_is_refused_of_a_hub_id_is_refused_before_its_weights_are_fetched(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def fetch(_path: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert revision == "main"
        fetched.extend(allow_patterns)
        return str(folder)

    monkeypatch.setattr(checkpoint.huggingface_hub, "snapshot_download", fetch)
    assert get_folder("someone/model", "main") == folder
    assert fetched == ["*.json", "model.safetensors"]
    fetched.clear()
    split({"a": "a.safetensors", "b": "b.safetensors"})(folder)
    with pytest.raises(ModelError, match=r"'someone/model'.* lacks a\.safetensors, b"):
        get_folder("someone/model", "main")
    assert fetched == ["*.json", "model.safetensors", "a.safetensors", "b.safetensors"]
    fetched.clear()
    replace("adapter_config.json", "{}")(folder)
    with pytest.raises(ModelError, match="model 'someone/model' must not have adapter_config"):
        get_folder("someone/model", "main")
    assert fetched == ["*.json"]
