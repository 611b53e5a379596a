"""Stored tensors under the names of modules: what is read for a rectangle, and how it is stored."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_adapters import save_adapter
from tiny_families import build
from transformers.core_model_loading import WeightConverter

from memguard.errors import ModelError
from memguard.hf.adapter_export import write_merged
from memguard.hf.adapter_files import check_model
from memguard.hf.export import StoredForm
from memguard.hf.from_config import build_on_meta
from memguard.hf.load import load_model
from memguard.hf.merged_weights import open_merged
from memguard.hf.safetensors import FolderWeights
from memguard.hf.stored_names import ModuleNames
from memguard.parallel.layout import ShardSlice


class Counted(FolderWeights):
    """Records what is read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.names: list[str] = []
        self.num_elements = 0

    def read(self, name: str, rectangle: ShardSlice) -> torch.Tensor:
        self.names.append(name)
        self.num_elements += rectangle.num_elements
        return super().read(name, rectangle)


def open_counted(folder: Path, family: str) -> tuple[Counted, ModuleNames, Any]:
    model = build(family)
    model.save_pretrained(folder)
    counted = Counted(folder)
    return counted, ModuleNames(counted, build_on_meta(model.config)), model


def test_only_the_bytes_of_a_rectangle_of_experts_are_read(tmp_path: Path) -> None:
    counted, source, model = open_counted(tmp_path, "mixtral")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    rectangle = ShardSlice(start=(1, 50, 3), shape=(2, 50, 7))
    assert source.shapes[name] == (4, 128, 32)
    assert counted.names == [], "nothing is read for names and shapes"
    wanted = model.get_parameter(name)[rectangle.slices]
    assert torch.equal(source.read(name, rectangle), wanted)
    assert counted.num_elements == rectangle.num_elements
    read = [
        f"model.layers.1.block_sparse_moe.experts.{e}.{w}.weight"
        for e in (1, 2)
        for w in ("w1", "w3")
    ]
    assert sorted(counted.names) == sorted(read)
    # Rows of one of the two stored tensors of an expert only.
    counted.names.clear()
    up = ShardSlice(start=(3, 70, 0), shape=(1, 58, 32))
    assert torch.equal(source.read(name, up), model.get_parameter(name)[up.slices])
    assert counted.names == ["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
    first = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    assert source.origin.names[name][0] == first


def test_experts_in_several_precisions_are_read_in_the_best(tmp_path: Path) -> None:
    open_counted(tmp_path, "mixtral")
    file = tmp_path / "model.safetensors"
    tensors = {
        name: tensor.bfloat16() if ".w3." in name or ".experts.0." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    source = ModuleNames(FolderWeights(tmp_path), build_on_meta(model.config))
    for leaf in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{leaf}"
        whole = ShardSlice(start=(0, 0, 0), shape=source.shapes[name])
        assert torch.equal(source.read(name, whole), model.get_parameter(name))


def test_a_tensor_that_is_stored_for_several_layers_is_read_once(tmp_path: Path) -> None:
    counted, source, model = open_counted(tmp_path, "hrm_text")
    names = [name for name in source.shapes if name.endswith(("q_proj.weight", "v_proj.weight"))]
    assert len(names) >= 2
    first = names[0].rpartition(".self_attn.")[0]
    for name in (name for name in names if name.startswith(f"{first}.")):
        rectangle = ShardSlice(start=(3, 0), shape=(4, 32))
        assert torch.equal(source.read(name, rectangle), model.get_parameter(name)[3:7])
    assert [name.rpartition(".attn.")[2] for name in counted.names] == ["gqkv_proj.weight"]


def test_a_renamed_tensor_is_read_by_rectangle(tmp_path: Path) -> None:
    _, source, model = open_counted(tmp_path, "granitemoe")
    name = "model.layers.0.block_sparse_moe.experts.gate_up_proj"
    assert source.origin.names[name] == ("model.layers.0.block_sparse_moe.input_linear.weight",)
    rectangle = ShardSlice(start=(1, 2, 3), shape=(2, 5, 7))
    assert torch.equal(source.read(name, rectangle), model.get_parameter(name)[rectangle.slices])


def test_weights_that_transformers_ignores_are_not_reported(tmp_path: Path) -> None:
    model = build("ernie4_5_moe")
    state = {**model.state_dict(), "model.mtp_block.0.weight": torch.ones(3)}
    model.save_pretrained(tmp_path, state_dict={**state, "score.weight": torch.ones(3)})
    source = ModuleNames(FolderWeights(tmp_path), build_on_meta(model.config))
    assert source.shapes.keys() - model.state_dict().keys() == {"score.weight"}


def test_the_stored_form_is_that_of_save_pretrained(tmp_path: Path) -> None:
    model = build("qwen2_moe")
    model.save_pretrained(tmp_path)
    form = StoredForm(build_on_meta(model.config), dtype=torch.bfloat16)
    stored = FolderWeights(tmp_path).shapes
    assert {tensor.name: tensor.shape for tensor in form.tensors} == stored
    assert {tensor.dtype for tensor in form.tensors} == {torch.bfloat16}
    group = form.group_of["model.layers.1.mlp.experts.2.up_proj.weight"]
    assert group == ("model.layers.1.mlp.experts.gate_up_proj",)
    assert list(form.group_of.values()).count(group) == 8


def test_a_way_of_storing_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where groups and the whole model differ, a file would lack tensors."""
    convert = WeightConverter.convert

    def change(self: WeightConverter, name: str, **options: Any) -> Any:
        is_whole = len(self.layer_targets) > 0 and "layers.1" in name
        result = convert(self, name, **options)
        calls.append(name)
        return dict(list(result.items())[1:]) if is_whole and calls.count(name) > 1 else result

    calls: list[str] = []
    monkeypatch.setattr(WeightConverter, "convert", change)
    with pytest.raises(
        ModelError, match="cannot be exported from a checkpoint: transformers"
    ) as caught:
        StoredForm(build_on_meta(build("mixtral").config), dtype=torch.float32)
    assert "\n" not in str(caught.value)


TARGETS = ["q_proj", "o_proj"]


def compute_logits(model: Any) -> torch.Tensor:
    ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits
    return logits


def test_an_adapter_is_merged_into_a_base_with_other_names(tmp_path: Path) -> None:
    wanted = compute_logits(save_adapter(tmp_path, "mixtral", target_modules=TARGETS))
    source, base = open_merged(tmp_path / "adapter")
    (tmp_path / "out").mkdir()
    write_merged(source, base, tmp_path / "out", dtype=None, on_tensor=lambda: None)
    assert FolderWeights(tmp_path / "out").shapes == FolderWeights(base).shapes
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for model in (merged, load_model(str(tmp_path / "adapter"))):
        # fp32: the adapter is added to the weights instead of to the outputs.
        torch.testing.assert_close(compute_logits(model), wanted, rtol=1e-4, atol=1e-4)


def test_a_layer_that_is_stored_with_others_is_not_merged_into_files(tmp_path: Path) -> None:
    wanted = compute_logits(save_adapter(tmp_path, "hrm_text", target_modules=TARGETS))
    source, base = open_merged(tmp_path / "adapter")
    (tmp_path / "out").mkdir()
    with pytest.raises(
        ModelError, match=r"stores '.*q_proj.*' together with other weights"
    ) as told:
        write_merged(source, base, tmp_path / "out", dtype=None, on_tensor=lambda: None)
    assert "\n" not in str(told.value)
    model = load_model(str(tmp_path / "adapter"))
    torch.testing.assert_close(compute_logits(model), wanted, rtol=1e-4, atol=1e-4)


def test_a_base_with_another_prefix_is_left_to_transformers(tmp_path: Path) -> None:
    save_adapter(tmp_path, "llama", target_modules=TARGETS)
    base = tmp_path / "base"
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    state = {
        name.replace("model.", "model.language_model."): t for name, t in model.state_dict().items()
    }
    model.save_pretrained(base, state_dict=state)
    check_model(str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match="belongs to another model"):
        open_merged(tmp_path / "adapter")
