"""A peft folder: what is read of it, which ones are refused, and where its base is."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_damages import Change, change_config, edit_weights, replace
from tiny_adapters import save_adapter
from tiny_families import build

from memguard.errors import ModelError
from memguard.hf.adapter_files import check_model, find_config, is_adapter, read_adapter
from memguard.hf.checkpoint import load_config, load_tokenizer

WEIGHTS = "adapter_model.safetensors"
_Q_PROJ = "model.layers.0.self_attn.q_proj"
_A = f"base_model.model.{_Q_PROJ}.lora_A.weight"
_B = f"base_model.model.{_Q_PROJ}.lora_B.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    save_adapter(folder, target_modules=["q_proj", "down_proj"])
    return folder


@pytest.fixture
def adapter(original: Path, tmp_path: Path) -> Path:
    """A copy whose base is a relative path, next to it."""
    copy = Path(shutil.copytree(original, tmp_path / "copy")) / "adapter"
    change(base_model_name_or_path="../base")(copy)
    return copy


def change(**fields: Any) -> Change:
    return lambda folder: change_config(folder, name="adapter_config.json", **fields)


def store(name: str, tensor: torch.Tensor | None) -> Change:
    def write(state: dict[str, torch.Tensor]) -> None:
        state.pop(name, None)
        state.update({} if tensor is None else {name: tensor})

    return lambda folder: edit_weights(folder, write, file=WEIGHTS)


def test_what_peft_wrote_is_read(original: Path) -> None:
    adapter = read_adapter(original / "adapter")
    assert (adapter.base, adapter.revision) == (str(original / "base"), None)
    assert adapter.describe() == "LoRA, r=4, alpha=6"
    layers = {layer.module: layer for layer in adapter.layers}
    assert len(layers) == 4
    layer = layers[_Q_PROJ]
    assert (layer.r, layer.num_in, layer.num_out, layer.scale) == (4, 32, 32, 1.5)
    check_model(str(original / "adapter"))
    assert find_config(original / "adapter") == original / "base" / "config.json"
    assert load_config(str(original / "adapter")).hidden_size == 32


def test_rslora_dora_and_ranks_by_pattern(tmp_path: Path) -> None:
    fields = {"use_rslora": True, "use_dora": True, "rank_pattern": {"q_proj": 9}}
    save_adapter(tmp_path, target_modules=["q_proj", "v_proj"], **fields)
    adapter = read_adapter(tmp_path / "adapter")
    assert adapter.describe() == "DoRA, r=4, alpha=6, rsLoRA"
    scales = {layer.module.rpartition(".")[2]: layer.scale for layer in adapter.layers}
    assert scales == {"q_proj": 6 / math.sqrt(9), "v_proj": 6 / math.sqrt(4)}


REFUSED: dict[str, tuple[Change, str]] = {
    "another type": (change(peft_type="IA3"), r"'peft_type' must be LORA; got 'IA3'"),
    "another task": (change(task_type="SEQ_CLS"), r"'task_type' must be CAUSAL_LM; got 'SEQ_CLS'"),
    "a rank of 0": (change(r=0), r"'r' must be a whole number from 1 to 65,536; got '0'"),
    "a rank of many": (change(r=10**30), r"'r' must be a whole number"),
    "no alpha": (change(lora_alpha=None), r"'lora_alpha' must be a number"),
    "an infinite alpha": (change(lora_alpha=math.inf), r"'lora_alpha' must be .*; got 'Infinity'"),
    "an alpha that is NaN": (change(lora_alpha=math.nan), r"'lora_alpha' must be a number"),
    "a flag in words": (change(use_dora="yes"), r"'use_dora' must be true or false; got 'yes'"),
    "biases": (change(bias="all"), r"'bias' must be none, .*; got 'all'"),
    "modules_to_save": (change(modules_to_save=["lm_head"]), r"'modules_to_save' is not supported"),
    "experts": (change(target_parameters=["w"]), r"'target_parameters' is not supported"),
    "alphas by pattern": (change(alpha_pattern={"q": 3}), r"'alpha_pattern' is not supported"),
    "replicated layers": (change(layer_replication=[[0, 1]]), r"'layer_replication' is not"),
    "a transposed weight": (change(fan_in_fan_out=True), r"'fan_in_fan_out' is not supported"),
    "a later field": (change(use_something=True), r"'use_something' is not supported"),
    **{
        init: (change(init_lora_weights=init), rf"'init_lora_weights' must be .*; got '{init}'")
        for init in ("pissa", "pissa_niter_4", "olora", "loftq", "corda", "eva")
    },
    "a number as init": (change(init_lora_weights=1), r"'init_lora_weights' must be"),
    "no base": (change(base_model_name_or_path=None), r"'base_model_name_or_path' must name"),
    "a base of two lines": (change(base_model_name_or_path="a\nb"), r"'base_model_name_or_path'"),
    "a revision of 3": (change(revision=3), r"'revision' must be a revision"),
    "not JSON": (replace("adapter_config.json", b"{"), r"adapter_config\.json is not JSON"),
    "a list": (replace("adapter_config.json", b"[]"), r"must be a JSON object"),
    "a huge config": (replace("adapter_config.json", b" " * (5 << 20)), r"at most 4 MiB; it has 5"),
    "a cut file": (replace(WEIGHTS, b"\x08"), r"not a complete safetensors file"),
    "a pickle": (
        lambda f: (f / WEIGHTS).rename(f / "adapter_model.bin"),
        r"must store its adapter in .*; it has only a pickled file, which is never read",
    ),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), r"it has no such file"),
    "int8": (store(_A, torch.zeros(4, 32, dtype=torch.int8)), r"is stored as 'I8'; an adapter"),
    "half a layer": (store(_B, None), r"layer '.*q_proj' must have .*; it has lora_A\.weight \["),
    "another rank": (store(_A, torch.zeros(5, 32)), r"with r = 4; it has .*lora_A\.weight \[5, 32"),
    "a cube": (store(_A, torch.zeros(4, 32, 1)), r"must have lora_A \[r, K\]"),
    "a magnitude without DoRA": (
        store(_A.replace("lora_A.weight", "lora_magnitude_vector"), torch.zeros(32)),
        r"must have lora_A .*lora_magnitude_vector \[32\]",
    ),
    "an embedding": (
        store("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(4, 97)),
        r"lora_embedding_A' is not the adapter of a linear layer",
    ),
    "a trained head": (
        store("base_model.model.lm_head.weight", torch.zeros(97, 32)),
        r"'base_model.model.lm_head.weight' is not the adapter",
    ),
    "a name of another library": (store("lora_q", torch.zeros(4)), r"'lora_q' is not the adapter"),
    "another width": (
        store(_A, torch.zeros(4, 40)),
        r"does not match its base model .*q_proj\.weight \[32, 32\] instead of \[32, 40\]",
    ),
    "another family": (
        lambda f: build("gpt_neox").save_pretrained(f.parent / "base"),
        r"does not match its base model .*, which has no model\.layers\.0\..* and 1 more: it belo",
    ),
    "a base that is missing": (
        change(base_model_name_or_path="/nowhere/base"),
        r"its base model '/nowhere/base' is missing\. Restore that folder, or correct 'base_model",
    ),
    "a relative base that is missing": (
        change(base_model_name_or_path="../other"),
        r"its base model '\.\./other' is missing",
    ),
    "an adapter as base": (
        lambda f: shutil.copy(f / "adapter_config.json", f.parent / "base"),
        r"is an adapter itself \(adapter_config\.json\)\. Merge that one first",
    ),
    "a damaged base": (
        lambda f: (f.parent / "base" / "model.safetensors").write_bytes(b"\x08"),
        r"model\.safetensors is not a complete safetensors file",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_name_in_one_line(adapter: Path, case: str) -> None:
    spoil, message = REFUSED[case]
    check_model(str(adapter))
    spoil(adapter)
    with pytest.raises(ModelError, match=message) as caught:
        check_model(str(adapter))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_weights_beside_an_adapter_are_refused(adapter: Path) -> None:
    shutil.copy(adapter.parent / "base" / "model.safetensors", adapter)
    assert not is_adapter(adapter)
    with pytest.raises(ModelError, match=r"must not have adapter_config\.json here"):
        check_model(str(adapter))


def test_a_relative_base_is_read_from_here_as_in_peft_and_then_from_the_adapter(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(base_model_name_or_path="base")(adapter)
    # It may be a hub id: there is no such folder.
    assert read_adapter(adapter).base == "base"
    shutil.copytree(adapter.parent / "base", adapter / "base")
    assert read_adapter(adapter).base == str(adapter / "base")
    monkeypatch.chdir(adapter.parent)
    assert read_adapter(adapter).base == "base"
    assert find_config(adapter) == Path("base/config.json")


def test_the_tokenizer_is_the_adapters_own_or_that_of_its_base(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def load(path: str, **_: object) -> Any:
        seen.append(path)
        return SimpleNamespace(get_vocab=lambda: {"a": 0}, all_special_tokens=[])

    (adapter / "../base/tokenizer.json").write_text("{}")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    load_tokenizer(str(adapter))
    (adapter / "tokenizer.json").write_text("{}")
    load_tokenizer(str(adapter))
    assert seen == [str(adapter / "../base"), str(adapter)]
