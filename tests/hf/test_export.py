"""Modules into folders: bit-equal in plain transformers, whole, and nothing twice."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_families import FAMILIES, VOCAB_SIZE, build

from memguard.hf.checkpoint import load_tokenizer
from memguard.hf.export import export_model
from memguard.hf.load import count_parameters, load_model

pytestmark = pytest.mark.slow


def export(model: Any, tokenizer: Any, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    export_model(model, tokenizer, folder, dtype=dtype, card="# card, naïve\n")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_model_loads_bit_equal_in_plain_transformers(
    tmp_path: Path, tokenizer: Any, family: str, tied: bool
) -> None:
    model = build(family, tie_word_embeddings=tied)
    export(model, tokenizer, tmp_path / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    read, written = plain.state_dict(), model.state_dict()
    assert read.keys() == written.keys()
    for name, weight in written.items():
        assert torch.equal(read[name], weight), name
    head, embedding = plain.get_output_embeddings(), plain.get_input_embeddings()
    assert (head.weight is embedding.weight) is tied
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        ours = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(ours, plain(input_ids=ids, use_cache=False).logits)


def test_the_folder_holds_everything_and_no_weight_twice(tmp_path: Path, tokenizer: Any) -> None:
    model = build("gpt2", tie_word_embeddings=True)
    export(model, tokenizer, tmp_path / "runs" / "model")
    folder = tmp_path / "runs" / "model"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert (folder / "README.md").read_text(encoding="utf-8") == "# card, naïve\n"
    assert load_tokenizer(str(folder))("a cat")["input_ids"] == tokenizer("a cat")["input_ids"]
    stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert stored == count_parameters(model)
    # Others may read it, as any folder made by save_pretrained.
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_trained_model_is_exported_with_its_trained_weights(
    tmp_path: Path, tokenizer: Any
) -> None:
    model = build("llama", tie_word_embeddings=True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.arange(3, 12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    export(model, tokenizer, tmp_path / "model")
    plain = load_model(str(tmp_path / "model"))
    for name, weight in model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], weight), name
    assert model.training


@pytest.mark.quick
def test_a_head_that_differs_from_its_tied_embedding_is_exported_as_untied(
    tmp_path: Path, tokenizer: Any
) -> None:
    export(build("llama", tie_word_embeddings=False), tokenizer, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = load_model(str(tmp_path / "model"))
    export(model, tokenizer, tmp_path / "again")
    # Other programs tie the weights if the configuration says so.
    assert (
        json.loads((tmp_path / "again" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(plain.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(plain.lm_head.weight, plain.model.embed_tokens.weight)


@pytest.mark.quick
def test_a_bf16_export_is_the_rounded_model_and_leaves_the_module_alone(
    tmp_path: Path, tokenizer: Any
) -> None:
    model = build("llama", tie_word_embeddings=True)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    export(model, tokenizer, tmp_path / "model", torch.bfloat16)
    assert model.dtype == model.config.dtype == torch.float32
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    # "auto" is what transformers takes by default: the stored type.
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert plain.dtype == torch.bfloat16
    stored = sum(w.numel() for w in load_file(tmp_path / "model" / "model.safetensors").values())
    assert stored == count_parameters(model), "tied weights are stored once, also when cast"
    for name, weight in before.items():
        assert torch.equal(model.state_dict()[name], weight)
        assert torch.equal(plain.state_dict()[name], weight.bfloat16())


def test_an_older_folder_is_replaced_whole(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"old")
    export(build("llama"), tokenizer, folder)
    load_model(str(folder))
    assert not list(folder.glob("model-0*"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.quick
def test_a_failed_export_leaves_the_older_folder_and_nothing_else(tmp_path: Path) -> None:
    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("disk full")

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "old").touch()
    with pytest.raises(OSError, match="disk full"):
        export(build("llama"), Broken(), folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (folder / "old").exists()


def test_unusable_generation_settings_do_not_cost_the_trained_weights(
    folder: Path, tmp_path: Path, tokenizer: Any
) -> None:
    # Real checkpoints have them; transformers refuses to write them in some versions.
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    model = load_model(str(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5
    export(model, tokenizer, tmp_path / "out")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert plain.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], weight), name


def test_a_real_checkpoint_survives_load_and_export(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "checkpoints" / "stories260K"
    model = load_model(str(source))
    export(model, load_tokenizer(str(source)), tmp_path / "model")
    again = load_model(str(tmp_path / "model"))
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


def test_parameters_are_counted_once_where_they_are_tied() -> None:
    tied, untied = (
        count_parameters(build("llama", tie_word_embeddings=tie)) for tie in (True, False)
    )
    assert untied - tied == VOCAB_SIZE * 32
