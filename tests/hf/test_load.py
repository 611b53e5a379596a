"""Folders and configurations into modules: exact, or refused with a reason in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_damages import LOADED, change_config
from tiny_families import build

from memguard.errors import ModelError
from memguard.hf import checkpoint
from memguard.hf.checkpoint import find_positions, load_config, load_tokenizer
from memguard.hf.from_config import build_scratch_model
from memguard.hf.load import load_model


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    # A name that is no folder must not be looked for on the network.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_folder_is_loaded_as_it_was_saved(folder: Path) -> None:
    model = load_model(str(folder))
    assert not model.training
    assert model.dtype == torch.float32
    for (name, ours), theirs in zip(
        model.state_dict().items(), build("llama").state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert load_model(str(folder), dtype=torch.bfloat16).dtype == torch.bfloat16
    assert (
        load_model(str(folder), attn_implementation="eager").config._attn_implementation == "eager"
    )


def test_what_a_family_freezes_is_frozen_when_it_is_loaded(tmp_path: Path) -> None:
    """from_pretrained makes it trainable; without a gradient it has no moments to resume with."""
    model = build("ernie4_5_moe")
    model.save_pretrained(tmp_path)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"}
    loaded = load_model(str(tmp_path)).named_parameters()
    assert {name for name, parameter in loaded if not parameter.requires_grad} == frozen


def test_a_family_without_sdpa_is_loaded_with_eager_attention(tmp_path: Path) -> None:
    build("gemma2").save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).config._attn_implementation == "eager"


@pytest.mark.parametrize("damage", LOADED)
def test_what_cannot_be_loaded_is_refused_in_one_line(folder: Path, damage: str) -> None:
    break_it, message = LOADED[damage]
    break_it(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(str(folder))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_remote_code_is_not_run(folder: Path) -> None:
    witness = folder / "witness"
    for name in ("c", "m"):
        (folder / f"{name}.py").write_text(f"open({str(witness)!r}, 'w')\nclass C: pass\nM = C\n")
    change_config(folder, auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"})
    # A family that transformers knows is loaded with transformers' own code ...
    assert isinstance(load_model(str(folder)), transformers.LlamaForCausalLM)
    # ... another one not at all.
    change_config(folder, model_type="foo")
    for load in (load_model, load_config, load_tokenizer):
        with pytest.raises(ModelError):
            load(str(folder))
    assert not witness.exists()


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"must be a folder with config\.json; it is a file"):
        load_model(str(folder / "config.json"))


@pytest.mark.parametrize("name", ["nobody/has-this-model", "has-this-model"])
def test_an_unknown_hub_id_is_named(name: str) -> None:
    with pytest.raises(ModelError, match=name):
        load_model(name)


def test_a_tokenizer_that_is_missing_or_broken(
    folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="it has none of a tokenizer's files"):
        load_tokenizer(str(folder))
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(str(folder))("a cat")["input_ids"] == tokenizer("a cat")["input_ids"]
    for name, words in (
        ("tokenizer.json", "no usable tokenizer in"),
        ("tokenizer_config.json", "tokenizer_config.json is not JSON"),
    ):
        kept = (folder / name).read_text()
        (folder / name).write_text(kept[:100])
        with pytest.raises(ModelError, match=words):
            load_tokenizer(str(folder))
        (folder / name).write_text(kept)
    # Whether its libraries are installed or not, transformers advises another one, tiktoken.
    (folder / "tokenizer.json").rename(folder / "kept.json")
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    monkeypatch.setattr(checkpoint, "_LIBRARIES", {"sentencepiece": "no_such_module"})
    with pytest.raises(ModelError, match=r"is of SentencePiece.*pip install sentencepiece"):
        load_tokenizer(str(folder))
    (folder / "tokenizer.model").unlink()
    # With settings alone transformers makes up a tokenizer without a word for this family.
    change_config(folder, model_type="gpt2")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(ModelError, match="the file of its vocabulary is missing"):
        load_tokenizer(str(folder))


def test_max_positions_comes_from_the_configuration(folder: Path) -> None:
    assert find_positions(load_config(str(folder))) == 64
    change_config(folder, model_type="gpt2", n_positions=128)
    assert find_positions(load_config(str(folder))) == 64, (
        "gpt2 calls it n_positions; the later name wins"
    )
    change_config(folder, model_type="bloom", max_position_embeddings=None)
    assert find_positions(load_config(str(folder))) is None
    (folder / "config.json").write_text("3")
    with pytest.raises(ModelError, match="must be a JSON object"):
        load_config(str(folder))


TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def scratch(tokenizer: Any, seed: int = 0, **fields: Any) -> Any:
    return build_scratch_model(
        {**TINY, **fields}, vocab_size=300, tokenizer=tokenizer, seed=seed, attn="sdpa"
    )


def test_initial_weights_are_decided_by_the_seed_alone(tokenizer: Any) -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    one = scratch(tokenizer)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = scratch(tokenizer), scratch(tokenizer, seed=1)
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_a_scratch_model_takes_size_and_ids_from_the_tokenizer(tokenizer: Any) -> None:
    model = scratch(tokenizer, vocab_size=5)
    assert model.config.vocab_size == 300
    assert model.get_input_embeddings().weight.shape == (300, 32)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.dtype == torch.float32
    assert not model.training
    assert scratch(tokenizer, pad_token_id=7).config.pad_token_id == 7, "what is said is kept"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llamma"}, r"llamma"),
        ({"model_type": "t5"}, r"T5Config"),
        ({"hidden_size": "wide"}, r"'hidden_size' expected int, got str"),
        ({"hidden_size": 30}, r"hidden size \(30\) is not a multiple"),
        ({"hiden_size": 64}, r"'hiden_size' is not a field of it; did you mean 'hidden_size'"),
        ({"num_attention_heads": 0}, r"'num_attention_heads' must be a whole number from 1"),
        ({"hidden_act": "geluu"}, r"geluu"),
    ],
)
def test_configurations_that_describe_no_model(
    tokenizer: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        scratch(tokenizer, **fields)
    assert str(caught.value).startswith("'model.scratch.config'")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def _turns_more_slowly(model: Any) -> bool:
    expected = 500.0 ** (-torch.arange(0, 8, 2) / 8)
    return torch.allclose(model.model.rotary_emb.inv_freq, expected)


@pytest.mark.parametrize(
    ("fields", "is_taken"),
    [
        ({"rope_theta": 500.0, "rope_scaling": None}, _turns_more_slowly),
        (
            {"partial_rotary_factor": 0.5},
            lambda model: model.config.rope_parameters["partial_rotary_factor"] == 0.5,
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "transformers_version": "4.40", "left_over": 1},
            lambda model: model.config.left_over == 1,
        ),
        (
            {
                "model_type": "qwen3_moe",
                "head_dim": 8,
                "num_experts": 4,
                "moe_intermediate_size": 16,
            },
            lambda model: (
                model.model.layers[0].self_attn.q_norm.weight.shape == (8,)
                and model.model.layers[0].mlp.experts.down_proj.shape == (4, 32, 16)
            ),
        ),
    ],
    ids=["rope_theta", "partial_rotary_factor", "left over", "experts"],
)
def test_fields_of_published_configurations_are_taken(
    tokenizer: Any, fields: dict[str, Any], is_taken: Callable[[Any], bool]
) -> None:
    assert is_taken(scratch(tokenizer, **fields))
