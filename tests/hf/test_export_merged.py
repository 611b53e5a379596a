"""The merged folder: plain transformers' logits of it, its dtypes, memory and refusals."""

import dataclasses
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_adapters import save_adapter
from tiny_families import VOCAB_SIZE, build

from memguard.errors import ModelError
from memguard.hf.adapter_export import (
    LogitDifference,
    compare_logits,
    refuse_difference,
    write_merged,
)
from memguard.hf.load import load_model
from memguard.hf.merged_weights import MergedWeights, attach_adapter, open_merged
from memguard.hf.safetensors import FolderWeights
from memguard.parallel.layout import ShardSlice

pytestmark = pytest.mark.slow

FP32, BF16 = torch.float32, torch.bfloat16


def draw_rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(3, VOCAB_SIZE, (3, 20), generator=generator))


def merge(folder: Path, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    (folder / "out").mkdir()
    source, base = open_merged(folder / "adapter")
    options = {"on_tensor": lambda: None, **options}
    return write_merged(source, base, folder / "out", dtype=dtype, **options)


def compare(folder: Path) -> LogitDifference:
    source, base = open_merged(folder / "adapter")
    return compare_logits(source, base, folder / "out", draw_rows())


@pytest.mark.parametrize(
    ("family", "base", "fields"),
    [
        ("llama", {"tie_word_embeddings": True}, {}),
        ("qwen2", {}, {"use_dora": True, "use_rslora": True}),
        pytest.param(
            *("llama", {}, {"target_modules": ["o_proj", "lm_head"]}), marks=pytest.mark.long
        ),
    ],
)
def test_plain_transformers_gives_the_logits_of_peft(
    tmp_path: Path, family: str, base: dict[str, Any], fields: dict[str, Any]
) -> None:
    adapted = save_adapter(tmp_path, family, base=base, **fields)
    written = merge(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    rows = draw_rows()
    with torch.no_grad():
        one, other = (
            torch.stack([m(row[None]).logits[0] for row in rows]) for m in (adapted, plain)
        )
    measured = (one - other).abs().max()
    assert measured < 1e-4
    difference = compare(tmp_path)
    # The same forward passes, of rows one by one.
    assert difference.largest == pytest.approx(float(measured), rel=1e-3)
    assert difference.largest_logit == pytest.approx(float(one.abs().max()), rel=1e-5)
    assert (difference.num_tokens, written.dtype) == (60, FP32)
    assert 0 <= difference.mean_kl < 1e-9
    refuse_difference(difference, FP32)
    assert written.num_tensors == len(load_file(tmp_path / "out" / "model.safetensors"))


@pytest.mark.parametrize(
    ("stored", "dtype", "wanted"),
    [
        (BF16, None, BF16),
        pytest.param(BF16, FP32, FP32, marks=pytest.mark.long),
        pytest.param(FP32, torch.float16, torch.float16, marks=pytest.mark.long),
    ],
)
def test_the_dtype_is_the_bases_or_the_given_one(
    tmp_path: Path, stored: torch.dtype, dtype: torch.dtype | None, wanted: torch.dtype
) -> None:
    save_adapter(tmp_path)
    build("llama").to(stored).save_pretrained(tmp_path / "base")
    assert merge(tmp_path, dtype=dtype).dtype == wanted
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {wanted}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == str(wanted).removeprefix("torch.")
    base = load_file(tmp_path / "base" / "model.safetensors")
    name = "model.norm.weight"
    assert torch.equal(tensors[name], base[name].to(wanted))
    difference = compare(tmp_path)
    refuse_difference(difference, wanted)
    assert difference.largest > 1e-3 or wanted == FP32


SPOILED: tuple[dict[str, Any], ...] = (
    *({"target_modules": value} for value in ([], {}, 5, ["nope"], [1], None, "([a-z._0-9]+)+!")),
    *({"lora_dropout": value} for value in (None, 2, "x")),
    *({"exclude_modules": value} for value in (".*", 5, "([a-z._0-9]+)+!")),
    *({"layers_to_transform": value} for value in ("abc", [0], -1)),
    {"layers_pattern": "layers"},
    {"layers_to_transform": [0], "layers_pattern": "([a-z._0-9]+)+!"},
    {"self": None},
    {"runtime_config": 3, "peft_version": [], "auto_mapping": "x"},
)


def test_fields_without_effect_are_not_given_to_peft(tmp_path: Path) -> None:
    ranks = {"q_proj": 9, "layers.1.self_attn.v_proj": 2}
    targets = ["q_proj", "v_proj", "lm_head"]
    adapted = save_adapter(tmp_path, target_modules=targets, rank_pattern=ranks, use_rslora=True)
    path = tmp_path / "adapter" / "adapter_config.json"
    written = json.loads(path.read_text())
    row = draw_rows()[0][None]
    with torch.no_grad():
        wanted = adapted(row).logits
        for fields in ({}, *SPOILED):
            # A byte order mark, as editors on Windows write it.
            path.write_text(json.dumps({**written, **fields}), encoding="utf-8-sig")
            source, base = open_merged(tmp_path / "adapter")
            assert torch.equal(attach_adapter(load_model(str(base)), source)(row).logits, wanted)


def test_several_files_have_an_index(tmp_path: Path) -> None:
    save_adapter(tmp_path, use_dora=True)
    merge(tmp_path, max_file_bytes=20_000)
    out = tmp_path / "out"
    assert len(list(out.glob("*.safetensors"))) > 2
    assert json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    refuse_difference(compare(tmp_path), FP32)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_adapter(tmp_path)
    read, alive, largest = MergedWeights.read, [], [0]
    read_base = FolderWeights.read

    def watch(self: MergedWeights, name: str, rectangle: ShardSlice) -> torch.Tensor:
        tensor = read(self, name, rectangle)
        assert not [reference for reference in alive if reference() is not None], name
        alive.append(weakref.ref(tensor))
        return tensor

    def measure(self: FolderWeights, name: str, rectangle: ShardSlice) -> torch.Tensor:
        if "_proj" in name:
            largest[0] = max(largest[0], rectangle.num_elements)
        return read_base(self, name, rectangle)

    monkeypatch.setattr(MergedWeights, "read", watch)
    monkeypatch.setattr(FolderWeights, "read", measure)
    monkeypatch.setattr("memguard.hf.merged_weights._BLOCK_ELEMENTS", 64)
    merged = merge(tmp_path)
    assert len(alive) == merged.num_merged > 1
    # Of the base, only a block of an adapted tensor is read at a time.
    assert largest == [64]


def test_a_difference_beyond_rounding_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    merge(tmp_path)
    for factor in (1.01, float("nan")):
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"].mul_(factor)
        save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=r"than rounding to float32: .* Nothing was writt"):
            refuse_difference(compare(tmp_path), FP32)


def test_the_bounds_grow_with_the_logits_and_the_dtype() -> None:
    difference = LogitDifference(
        num_tokens=1, largest=2e-4, largest_logit=30.0, mean_kl=0.0, max_kl=0.0
    )
    assert difference.is_within(FP32)
    assert difference.find_bounds(FP32)[0] == pytest.approx(6e-4)
    small = dataclasses.replace(difference, largest_logit=3.0)
    assert small.find_bounds(FP32)[0] == 1e-4
    assert not small.is_within(FP32)
    assert small.is_within(BF16)
    assert not dataclasses.replace(difference, mean_kl=2e-6).is_within(FP32)
    with pytest.raises(ModelError, match="--dtype float32 rounds less"):
        refuse_difference(dataclasses.replace(difference, mean_kl=1.0), BF16)
