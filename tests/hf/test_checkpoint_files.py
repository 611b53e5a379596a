"""What is refused before torch is imported: alike for one process, for a mesh and for `plan`."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import build

from memguard.errors import ModelError
from memguard.hf import checkpoint
from memguard.hf.checkpoint import get_folder
from memguard.hf.checkpoint_files import check_folder, read_headers
from memguard.hf.load import load_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    build("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def change(**fields: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return write


def store(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    """Store a weight in another dtype, or one more tensor."""

    def write(folder: Path) -> None:
        file = folder / "model.safetensors"
        state = load_file(file)
        state[name] = state.get(name, torch.zeros(4, 4)).to(dtype)
        save_file(state, file, {"format": "pt"})

    return write


def replace(name: str, content: bytes | str) -> Callable[[Path], object]:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(raw)


def split(weight_map: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return write


_DEEP = "[" * 100_000 + "]" * 100_000
_Q_PROJ = "model.layers.0.self_attn.q_proj.weight"

REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "an adapter": (
        replace("adapter_config.json", '{"peft_type": "LORA"}'),
        r"must not have adapter_config\.json here: an adapter \(peft\) is read only from",
    ),
    "int8": (store(_Q_PROJ, torch.int8), rf"'{_Q_PROJ}' is stored as 'I8'; .*quantised"),
    "float8": (store(_Q_PROJ, torch.float8_e4m3fn), r"stored as 'F8_E4M3'; .*quantised"),
    "packed int32": (store("model.layers.0.q_proj.qweight", torch.int32), r"as 'I32'; .*quantised"),
    "int64": (store(_Q_PROJ, torch.int64), r"is stored as 'I64'"),
    "quantization_config": (
        change(quantization_config={"quant_method": "fp8"}),
        r"'quantization_config' says that the weights are quantised",
    ),
    "mxfp4": (
        change(quantization_config={"quant_method": "mxfp4"}),
        r"they are in MXFP4; use the model's bfloat16 form, .*Mxfp4Config\(dequantize=True\)",
    ),
    "quantised inside": (
        change(text_config={"quantization_config": {"quant_method": "gptq"}}),
        r"'quantization_config' says that the weights are quantised",
    ),
    "another file": (
        change(transformers_weights="other.safetensors"),
        r"'transformers_weights' names another file",
    ),
    "-1 layers": (change(num_hidden_layers=-1), r"'num_hidden_layers' must be .* 4,096; got -1$"),
    "0 layers": (change(num_hidden_layers=0), r"'num_hidden_layers' must be .*; got 0$"),
    "a billion layers": (change(num_hidden_layers=10**9), r"'num_hidden_layers'.*got 1000000000$"),
    "layers beyond count": (change(n_layer=10**4000), r"'n_layer'.*got 1000000000\d{20}\.\.\.$"),
    "a wide layer": (change(hidden_size=10**12), r"'hidden_size' must be a whole number from 1"),
    "an empty vocabulary": (change(vocab_size=0), r"'vocab_size' must be"),
    "inside": (change(text_config={"num_hidden_layers": -1}), r"'num_hidden_layers' must be"),
    "a deep config": (replace("config.json", _DEEP), r"config\.json is nested too deeply"),
    "a huge config": (replace("config.json", b" " * (65 << 20)), r"at most 64 MiB; it has 65"),
    "a list": (replace("config.json", "[]"), r"must be a JSON object"),
    "absolute": (split({"a": "/etc/x.safetensors"}), r"names '/etc/x\.safetensors'; it must name"),
    "upwards": (split({"a": "b/../../x.safetensors"}), r"files inside the model's folder"),
    "a pickle": (split({"a": "pytorch_model.bin"}), r"names 'pytorch_model\.bin'; it must name"),
    "a number": (split({"a": 3}), r"names '3'; it must name"),
    "a null byte": (split({"a": "\0.safetensors"}), r"names '\\x00\.safetensors'; it must"),
    "a deep index": (
        lambda f: [spoil(f) for spoil in (split({}), replace(INDEX, _DEEP))],
        r"index\.json is nested too deeply",
    ),
    "a header that claims much": (
        replace("model.safetensors", (1 << 60).to_bytes(8, "little") + b"{}"),
        r"not a complete safetensors file \(its header length is invalid\)",
    ),
    "a deep header": (
        replace("model.safetensors", len(_DEEP).to_bytes(8, "little") + _DEEP.encode()),
        r"not a complete safetensors file",
    ),
    "a header of numbers": (
        replace("model.safetensors", (9).to_bytes(8, "little") + b'{"a": 34}'),
        r"header does not describe tensors",
    ),
}


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
    store(_Q_PROJ, dtype)(folder)
    ((path, tensors),) = read_headers(folder, name="model")
    state = load_file(path)
    assert {name: each.shape for name, each in tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }
    assert (
        tensors[_Q_PROJ].dtype
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
