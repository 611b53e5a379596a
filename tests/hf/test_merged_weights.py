"""Merged weights: those of peft's merge, in any rectangle, on one process and on a mesh."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_load_sharded import Degrees, compare, load
from tiny_adapters import save_adapter
from tiny_families import VOCAB_SIZE, build
from torch import distributed as dist

from memguard.errors import ModelError
from memguard.hf import checkpoint
from memguard.hf.load import load_model
from memguard.hf.merged_weights import open_merged
from memguard.hf.safetensors import FolderWeights
from memguard.parallel.layout import ShardSlice

pytestmark = pytest.mark.slow

LORA: dict[str, Any] = {}
DORA = {"use_dora": True}
RSLORA = {"use_rslora": True}
HEAD = {"target_modules": ["q_proj", "down_proj", "lm_head"]}
RANKS = {"rank_pattern": {"q_proj": 7}}
BIAS = {"attention_bias": True}


def draw_ids() -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, (4, 20), generator=torch.Generator().manual_seed(1))


def compute_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(draw_ids()).logits
    return logits


@pytest.mark.parametrize(
    ("family", "base", "fields"),
    [
        ("llama", {"tie_word_embeddings": True}, LORA),
        ("llama", BIAS, DORA),
        ("qwen2", {}, RSLORA),
        ("qwen3", {}, {**DORA, **RSLORA, **RANKS}),
        ("llama", {}, HEAD),
        ("llama", {}, {**HEAD, **DORA}),
        *(
            pytest.param(family, {}, DORA, marks=pytest.mark.long)
            for family in ("mistral", "gemma2", "gpt_neox", "phi3", "olmo2", "starcoder2")
        ),
    ],
)
def test_logits_are_those_of_peft_merged_and_unmerged(
    tmp_path: Path, family: str, base: dict[str, Any], fields: dict[str, Any]
) -> None:
    adapted = save_adapter(tmp_path, family, base=base, **fields)
    ours = compute_logits(load_model(str(tmp_path / "adapter")))
    unmerged = compute_logits(adapted)
    plain = compute_logits(load_model(str(tmp_path / "base")))
    assert (plain - unmerged).abs().max() > 0.5
    # fp32 rounding over two layers, of logits up to 5: 4e-6 and 6e-6 were measured.
    assert (ours - unmerged).abs().max() < 5e-5
    assert (ours - compute_logits(adapted.merge_and_unload())).abs().max() < 5e-5


def test_weights_are_the_formula_in_float64_rounded_once(tmp_path: Path) -> None:
    save_adapter(tmp_path, **DORA, target_modules=["up_proj"])
    stored = {
        name: tensor.double()
        for name, tensor in load_file(tmp_path / "adapter" / "adapter_model.safetensors").items()
    }
    source, _ = open_merged(tmp_path / "adapter")
    name = "model.layers.1.mlp.up_proj"
    prefix = f"base_model.model.{name}"
    weight = load_file(tmp_path / "base" / "model.safetensors")[f"{name}.weight"].double()
    low_rank = stored[f"{prefix}.lora_B.weight"] @ stored[f"{prefix}.lora_A.weight"]
    changed = weight + 6 / 4 * low_rank
    norm = changed.pow(2).sum(1).sqrt()
    wanted = stored[f"{prefix}.lora_magnitude_vector"][:, None] / norm[:, None] * changed
    assert torch.equal(source.read(f"{name}.weight", whole(48, 32)), wanted.float())


def whole(*shape: int) -> ShardSlice:
    return ShardSlice(start=tuple(0 for _ in shape), shape=shape)


@pytest.mark.parametrize("fields", [LORA, DORA])
@pytest.mark.parametrize("block", [1 << 22, 100, 1])
def test_a_rectangle_is_cut_from_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], block: int
) -> None:
    save_adapter(tmp_path, **fields)
    source, _ = open_merged(tmp_path / "adapter")
    name = "model.layers.0.mlp.up_proj.weight"
    full = source.read(name, whole(48, 32))
    monkeypatch.setattr("memguard.hf.merged_weights._BLOCK_ELEMENTS", block)
    for start, shape in (((5, 7), (20, 11)), ((47, 0), (1, 32)), ((0, 31), (48, 1))):
        rectangle = ShardSlice(start=start, shape=shape)
        assert torch.equal(source.read(name, rectangle), full[rectangle.slices])
    empty = source.read(name, ShardSlice(start=(48, 0), shape=(0, 32)))
    assert tuple(empty.shape) == (0, 32)


@pytest.mark.parametrize(
    ("stored", "merged"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_a_base_of_low_precision_is_merged_in_float32(
    tmp_path: Path, stored: torch.dtype, merged: torch.dtype
) -> None:
    save_adapter(tmp_path, target_modules=["q_proj"])
    build("llama").to(stored).save_pretrained(tmp_path / "base")
    source, base = open_merged(tmp_path / "adapter")
    names = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight")
    assert [source.read(name, whole(32, 32)).dtype for name in names] == [merged, stored]
    assert source.shapes == FolderWeights(base).shapes


def test_a_base_without_prefix_is_read(tmp_path: Path) -> None:
    """Checkpoints of a base model alone lack `model.`."""
    adapted = save_adapter(tmp_path, base={"tie_word_embeddings": True})
    file = tmp_path / "base" / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    ours = compute_logits(load_model(str(tmp_path / "adapter")))
    assert (ours - compute_logits(adapted)).abs().max() < 5e-5


def load_and_compare(folders: dict[str, torch.dtype], degrees: Degrees) -> list[list[str]]:
    """On a rank: what differs from the merged model of one process."""
    return [
        compare(load(folder, degrees, dtype), load_model(folder, dtype=dtype))
        for folder, dtype in folders.items()
    ]


@pytest.mark.parametrize(
    "degrees",
    [
        (1, 1, 2, 2),
        *(
            pytest.param(degrees, marks=pytest.mark.mesh)
            for degrees in ((1, 2, 2, 2), (1, 1, 1, 4), (2, 2, 1, 1))
        ),
    ],
)
def test_every_shard_is_the_rectangle_of_the_model_of_one_process(
    ranks: Any, tmp_path: Path, degrees: Degrees
) -> None:
    save_adapter(tmp_path / "lora", base={"tie_word_embeddings": True})
    save_adapter(tmp_path / "dora", "qwen2", **DORA)
    folders = {
        str(tmp_path / "lora" / "adapter"): torch.float32,
        str(tmp_path / "dora" / "adapter"): torch.bfloat16,
    }
    for found in ranks(load_and_compare, torch.Size(degrees).numel(), folders, degrees):
        assert found == [[], []]


@pytest.mark.parametrize("stores_head", [True, False])
def test_a_head_that_shares_the_embedding_is_refused(tmp_path: Path, stores_head: bool) -> None:
    save_adapter(tmp_path, base={"tie_word_embeddings": True}, target_modules=["q_proj", "lm_head"])
    if stores_head:
        file = tmp_path / "base" / "model.safetensors"
        tensors = load_file(file)
        head = tensors["model.embed_tokens.weight"].clone()
        save_file({**tensors, "lm_head.weight": head}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layer 'lm_head' shares its weight with the embedding"):
        load_model(str(tmp_path / "adapter"))


def test_a_header_that_the_library_does_not_take_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path, target_modules=["q_proj"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["__metadata__"] = ["pt"]
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[start:])
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors is not a complete safeten"):
        open_merged(tmp_path / "adapter")


def test_another_kind_of_layer_is_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft sets fan_in_fan_out for Conv1D.
        save_adapter(tmp_path, "gpt2", target_modules=["c_proj"], fan_in_fan_out=True)
    with pytest.raises(ModelError, match="'fan_in_fan_out' is not supported"):
        load_model(str(tmp_path / "adapter"))
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace('"fan_in_fan_out": true', '"r": 4'))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    # Square weights match in either orientation; others are refused for their shape.
    square = {name: tensor for name, tensor in load_file(file).items() if ".attn." in name}
    save_file(square, file)
    with pytest.raises(ModelError, match=r"must be a linear layer .* has a Conv1D there"):
        load_model(str(tmp_path / "adapter"))


def test_a_copied_head_that_differs_from_the_base_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path, **HEAD)
    load_model(str(tmp_path / "adapter"))
    build("llama", seed=1).save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match=r"copy of the base weights of 'lm_head' differs from"):
        load_model(str(tmp_path / "adapter"))


@pytest.mark.quick
def test_a_damaged_record_of_the_run_is_told_to_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is not told waits for rank 0."""
    save_adapter(tmp_path)
    (tmp_path / "trained.json").write_text("{")
    told: list[Any] = []

    def gather(values: list[Any], value: Any, **_: Any) -> None:
        values[:] = [value] * len(values)

    for name, result in (("is_initialized", True), ("get_rank", 0), ("get_world_size", 2)):
        monkeypatch.setattr(dist, name, lambda result=result: result)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda said, **_: told.extend(said))
    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(ModelError, match=r"trained\.json") as caught:
        open_merged(tmp_path / "adapter")
    assert told[-1] == str(caught.value)


def test_several_devices_are_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    with pytest.raises(ModelError, match=r"'audit\.device_map'.*merge it first with memguard exp"):
        load_model(str(tmp_path / "adapter"), devices={"": "cpu"})


def test_a_base_on_the_hub_is_downloaded_in_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = save_adapter(tmp_path)
    config = tmp_path / "adapter" / "adapter_config.json"
    text = config.read_text().replace(str(tmp_path / "base"), "someone/base")
    config.write_text(text.replace('"revision": null', '"revision": "v2"'))

    def fetch(path: str, *, revision: str | None, **_: object) -> str:
        assert (path, revision) == ("someone/base", "v2")
        return str(tmp_path / "base")

    monkeypatch.setattr(checkpoint.huggingface_hub, "snapshot_download", fetch)
    ours = compute_logits(load_model(str(tmp_path / "adapter")))
    assert (ours - compute_logits(adapted)).abs().max() < 5e-5

    def fail(*_: object, **__: object) -> str:
        raise OSError("no network\nat all")

    monkeypatch.setattr(checkpoint.huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=r"its base model: model 'someone/base' cannot be down"):
        load_model(str(tmp_path / "adapter"))
