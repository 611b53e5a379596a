"""What is refused before it is built, what is built without storage, and what is stored when."""

import re
from typing import Any

import pytest
import torch
import transformers
from fake_mesh import simulated_mesh
from ranks import RankPool
from tiny_families import build
from torch.distributed.tensor import DTensor

from memguard.errors import ConfigError, MemguardError, ModelError
from memguard.hf.assembly import Assembly, allocate, build_meta_layer, fill_layer, find_sizes
from memguard.hf.load import count_parameters
from memguard.hf.safetensors import ModuleWeights
from memguard.model.trainable import list_dropout
from memguard.parallel.lora import LoraSpec
from memguard.parallel.mesh import build_mesh
from memguard.parallel.mesh_shape import MeshShape

CPU = torch.device("cpu")


def fields(**changes: Any) -> Any:
    return build("llama").config.to_dict() | changes


def refuse_all(shape: MeshShape, all_fields: list[dict[str, Any]]) -> list[MemguardError]:
    """On a rank: how each configuration is refused, where building anything is an error."""

    def build_nothing(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was built")

    mesh = build_mesh(shape, "cpu")
    found: list[MemguardError] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_config", build_nothing)
        for each in all_fields:
            config = transformers.LlamaConfig(**each)
            try:
                build_meta_layer(config, Assembly(mesh=mesh, device=CPU))
            except MemguardError as error:
                found.append(error)
    return found


def test_an_impossible_configuration_is_refused_in_one_line() -> None:
    """Of a family that is built to find its sizes."""
    config = transformers.AutoConfig.for_model("bloom", hidden_size=30, n_layer=2, n_head=4)
    with pytest.raises(ModelError, match="the model of type 'bloom' cannot be loaded as a causal"):
        find_sizes(config)


def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_built(ranks: RankPool) -> None:
    configurations = [
        fields(num_attention_heads=6, num_key_value_heads=6, hidden_size=48),
        fields(intermediate_size=50),
        # 2 + 2 + 1: the fourth rank would have no row of the vocabulary.
        fields(vocab_size=5, pad_token_id=0),
    ]
    for found in ranks(refuse_all, 4, MeshShape(x=4), configurations):
        heads, width, vocabulary = found
        for error in found:
            assert isinstance(error, ConfigError)
            assert "'parallel.x'" in str(error)
        assert "6 attention heads" in str(heads)
        assert "FFN width of 50" in str(width)
        assert "some of the model's 5 vocabulary entries" in str(vocabulary)


def refuse_dropout() -> str:
    mesh = build_mesh(MeshShape(x=2), "cpu")
    config = transformers.LlamaConfig(**fields(attention_dropout=0.1))
    with pytest.raises(ModelError) as caught:
        build_meta_layer(config, Assembly(mesh=mesh, device=CPU))
    # An audit drops nothing.
    build_meta_layer(config, Assembly(mesh=mesh, device=CPU, is_trained=False))
    return str(caught.value)


def switch_off_dropout(shape: MeshShape) -> dict[str, float]:
    mesh = build_mesh(shape, "cpu")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96)
    layer = build_meta_layer(config, Assembly(mesh=mesh, device=CPU, dropout=0.0))
    assert layer.lm.model.config.attn_pdrop == 0.1, "the exported configuration stays"
    return list_dropout(layer.lm.model)


@pytest.mark.parametrize("shape", [MeshShape(z=2), MeshShape(x=2)], ids=str)
def test_dropout_can_be_switched_off(ranks: RankPool, shape: MeshShape) -> None:
    assert ranks(switch_off_dropout, 2, shape) == [{}, {}]


@pytest.mark.parametrize("shape", [MeshShape(z=2), MeshShape(x=2)], ids=str)
def test_adapters_keep_their_own_dropout(shape: MeshShape) -> None:
    adapter = LoraSpec(r=2, alpha=2, dropout=0.3)
    config = transformers.LlamaConfig(**fields(attention_dropout=0.1))
    with simulated_mesh(shape) as mesh:
        assembly = Assembly(mesh=mesh, device=CPU, dropout=0.0, adapter=adapter)
        layer = build_meta_layer(config, assembly)
    assert list_dropout(layer.lm.model) == {"lora_dropout_rate": 0.3}


def test_dropout_is_refused_by_its_field(ranks: RankPool) -> None:
    for message in ranks(refuse_dropout, 2):
        assert "must not drop activations" in message
        assert "on this mesh" in message
        assert "attention_dropout=0.1" in message
        assert "Set 'train.dropout' to 0, or use the axes data and z" in message
        assert "\n" not in message


def list_storage(shape: MeshShape, is_tied: bool) -> dict[str, Any]:
    """On a rank: where parameters are after each step, and how they are placed."""
    mesh = build_mesh(shape, "cpu")
    plain = build("llama", tie_word_embeddings=is_tied)
    layer = build_meta_layer(plain.config, Assembly(mesh=mesh, device=CPU, dtype=torch.bfloat16))
    lm, model = layer.lm, layer.lm.model
    found: dict[str, Any] = {"count": count_parameters(layer.lm.model)}
    found["meta"] = all(p.is_meta for p in model.parameters())
    found["buffers"] = all(not b.is_meta for b in model.buffers())
    allocate(layer.lm, layer.assembly.device)
    found["allocated"] = all(not p.is_meta for p in model.parameters())
    found["tied"] = model.lm_head.weight is model.model.embed_tokens.weight
    fill_layer(layer, ModuleWeights(plain), name="test")
    found["filled"] = stored(model)
    found["dtypes"] = {p.dtype for p in model.parameters()}
    ids = torch.ones(1, 4, dtype=torch.long)

    def work() -> torch.Tensor:
        return lm.sum_nll(lm.hidden_states(ids).flatten(0, 1), ids.flatten())

    with torch.no_grad():
        lm(work)
    found["after a forward without gradients"] = stored(model)
    lm(work)
    found["after a forward with gradients"] = stored(model)
    with torch.no_grad():
        lm(work)
    found["and after one without again"] = stored(model)
    lm(work).backward()
    found["after backward"] = stored(model)
    return found


def stored(model: Any) -> bool:
    """Whether every parameter is this rank's shard over z, y and x."""
    return all(
        isinstance(p, DTensor) and p.device_mesh.mesh_dim_names == ("z", "y", "x")
        for p in model.parameters()
    )


@pytest.mark.parametrize("is_tied", [False, True])
def test_storage_and_when_parameters_are_gathered(ranks: RankPool, is_tied: bool) -> None:
    plain = build("llama", tie_word_embeddings=is_tied)
    expected = {
        "count": sum(p.numel() for p in plain.parameters()),
        "meta": True,
        "buffers": True,
        "allocated": True,
        "tied": is_tied,
        "filled": True,
        "dtypes": {torch.bfloat16},
        "after a forward without gradients": True,
        # The last norm and the head wait for backward.
        "after a forward with gradients": False,
        "and after one without again": True,
        "after backward": True,
    }
    assert ranks(list_storage, 2, MeshShape(z=2), is_tied) == [expected] * 2


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        # A buffer: what is added to the scores by which a router chooses.
        ("dots1", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ],
)
def test_missing_weights_and_buffers_are_named(family: str, name: str) -> None:
    plain = build(family)
    with simulated_mesh(MeshShape(x=2)) as mesh:
        layer = build_meta_layer(plain.config, Assembly(mesh=mesh, device=CPU))
        module, _, leaf = name.rpartition(".")
        delattr(plain.get_submodule(module), leaf)
        with pytest.raises(ModelError, match=f"holey.*{re.escape(name)}"):
            fill_layer(layer, ModuleWeights(plain), name="holey")
