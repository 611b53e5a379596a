"""Changes of a checkpoint's folder, and the refusal that each must end in."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
Change = Callable[[Path], object]
_DEEP = "[" * 100_000 + "]" * 100_000


def change_config(folder: Path, *, name: str = "config.json", **fields: Any) -> None:
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def edit_weights(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], *, file: str = WEIGHTS
) -> None:
    state = load_file(folder / file)
    change(state)
    save_file(state, folder / file, {"format": "pt"})


def change(**fields: Any) -> Change:
    return lambda folder: change_config(folder, **fields)


def replace(name: str, content: bytes | str) -> Change:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(raw)


def store(name: str, dtype: torch.dtype) -> Change:
    """Store a weight in another dtype, or one more tensor."""

    def write(state: dict[str, torch.Tensor]) -> None:
        state[name] = state.get(name, torch.zeros(4, 4)).to(dtype)

    return lambda folder: edit_weights(folder, write)


def drop(part: str) -> Change:
    def write(state: dict[str, torch.Tensor]) -> None:
        for name in [name for name in state if part in name]:
            del state[name]

    return lambda folder: edit_weights(folder, write)


def cut(content: Callable[[bytes], bytes]) -> Change:
    """Replace the weights by something made of their bytes."""
    return lambda folder: (folder / WEIGHTS).write_bytes(content((folder / WEIGHTS).read_bytes()))


def split(weight_map: object) -> Change:
    def write(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return write


REFUSED: dict[str, tuple[Change, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
    "config cut off": (replace("config.json", '{"model_type": "lla'), r"config\.json is not JSON"),
    "config not text": (replace("config.json", b"\xff\xfe\x00"), r"config\.json is not JSON"),
    "config a list": (replace("config.json", "[]"), r"must be a JSON object"),
    "config a number": (replace("config.json", "3"), r"must be a JSON object"),
    "a deep config": (replace("config.json", _DEEP), r"config\.json is nested too deeply"),
    "a huge config": (replace("config.json", b" " * (65 << 20)), r"at most 64 MiB; it has 65"),
    "0 heads": (
        change(num_attention_heads=0),
        r"'num_attention_heads' must be a whole number from 1 to 1,048,576; got 0",
    ),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), r"safetensors; it has none at all"),
    "pickled only": (
        lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"),
        r"only pickled ones, which are never read.*save_pretrained",
    ),
    "weights cut off": (
        cut(lambda content: content[: len(content) // 2]),
        r"cannot be loaded.*its header describes [\d,]+ bytes of tensors, and it has",
    ),
    "weights of a few bytes": (cut(lambda content: content[:4]), r"cannot be loaded.*header"),
    "weights that are something else": (
        cut(lambda _: b"version https://git-lfs.github.com/spec/v1\n"),
        r"cannot be loaded.*header",
    ),
    "an adapter": (
        replace("adapter_config.json", '{"peft_type": "LORA"}'),
        r"must not have adapter_config\.json here: an adapter \(peft\) is read only from",
    ),
    "int8": (store(Q_PROJ, torch.int8), rf"'{Q_PROJ}' is stored as 'I8'; .*quantised"),
    "float8": (store(Q_PROJ, torch.float8_e4m3fn), r"stored as 'F8_E4M3'; .*quantised"),
    "packed int32": (store("model.layers.0.q_proj.qweight", torch.int32), r"as 'I32'; .*quantised"),
    "int64": (store(Q_PROJ, torch.int64), r"is stored as 'I64'"),
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
        replace(WEIGHTS, (1 << 60).to_bytes(8, "little") + b"{}"),
        r"not a complete safetensors file \(its header length is invalid\)",
    ),
    "a deep header": (
        replace(WEIGHTS, len(_DEEP).to_bytes(8, "little") + _DEEP.encode()),
        r"not a complete safetensors file",
    ),
    "a header of numbers": (
        replace(WEIGHTS, (9).to_bytes(8, "little") + b'{"a": 34}'),
        r"header does not describe tensors",
    ),
}
"""Found before torch is imported, from names, configuration, index and headers."""

LOADED: dict[str, tuple[Change, str]] = {
    "no folder": (shutil.rmtree, r"there is no folder"),
    "no model type": (replace("config.json", "{}"), r"model_type"),
    "unknown model type": (change(model_type="foo"), r"(no usable config|cannot be loaded).*foo"),
    "not a causal model": (change(model_type="t5"), r"cannot be loaded.*T5"),
    "a field of the wrong kind": (
        change(hidden_size="wide"),
        r"'hidden_size'.*expected int, got str",
    ),
    "remote code": (
        change(model_type="foo", auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}),
        r"it needs custom code, and remote code is never run",
    ),
    "a weight missing": (
        drop("layers.1.mlp.up"),
        r"1 weights are missing .*model\.layers\.1\.mlp\.up_proj\.weight.*would be random",
    ),
    "many weights missing": (change(num_hidden_layers=4), r"18 weights are missing .* and 10 more"),
    "weights of another size": (
        change(intermediate_size=64),
        r"mlp\.down_proj\.weight \[32, 48\] instead of \[32, 64\]",
    ),
}
"""Found when the model is loaded."""
