"""Attention in pieces and a bias shared by all blocks give what attention at once gives."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_families import VOCAB_SIZE, build
from torch import Tensor

from memguard.parallel.attention import choose_attention, prepare_attention
from memguard.parallel.attention_pieces import _piece_tokens
from memguard.parallel.shard import Checkpointing, checkpoint_blocks

pytestmark = pytest.mark.slow

# 300 tokens: pieces of 128, 128 and 44.
LENGTHS = (7, 140, 1, 152)


def packed_row(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    """Ids and positions of one document for each length, in two rows."""
    ids = torch.randint(
        3, VOCAB_SIZE, (2, sum(lengths)), generator=torch.Generator().manual_seed(0)
    )
    positions = torch.cat([torch.arange(length) for length in lengths]).repeat(2, 1)
    return {"input_ids": ids, "position_ids": positions}


def build_pair(family: str, **overrides: Any) -> tuple[Any, Any]:
    """A model as it is, and the same in pieces."""
    models = [build(family, max_position_embeddings=512, **overrides).double() for _ in range(2)]
    prepare_attention(models[1], "cpu")
    return models[0], models[1]


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the number of keys of each call of torch's attention."""
    calls: list[int] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def count(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        calls.append(key.shape[2])
        return attend(query, key, value, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", count)
    return calls


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_packed_rows_have_the_same_loss_and_gradients(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, pieces = build_pair(family)
    calls = count_calls(monkeypatch)
    row = packed_row()
    for model in (whole, pieces):
        model(**row, labels=row["input_ids"], use_cache=False).loss.backward()
    assert calls == [300, 300, 128, 256, 300, 128, 256, 300]
    expected = dict(whole.named_parameters())
    for name, parameter in pieces.named_parameters():
        # float64; keys left out had the weight zero exactly, so only sums are ordered otherwise.
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-10, atol=1e-12)


def test_rows_without_a_mask_are_attended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = build_pair("llama")
    calls = count_calls(monkeypatch)
    ids = packed_row()["input_ids"]
    expected = whole(input_ids=ids, use_cache=False).logits
    assert torch.equal(pieces(input_ids=ids, use_cache=False).logits, expected)
    assert calls == [300] * 4


def test_generation_is_the_same() -> None:
    whole, pieces = build_pair("llama")
    ids = packed_row()["input_ids"][:, :200]
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(pieces.generate(ids, **arguments), whole.generate(ids, **arguments))


def test_other_attention_stays() -> None:
    model = build("llama", attn="eager")
    assert prepare_attention(model, "cpu").kernel == "own"
    assert model.config._attn_implementation == "eager"


def test_nothing_of_it_is_exported() -> None:
    whole, pieces = build_pair("llama")
    assert pieces.config._attn_implementation == "memguard_pieces"
    assert pieces.config.to_json_string() == whole.config.to_json_string()


@settings(max_examples=200, deadline=None)
@given(num_tokens=st.integers(1, 200_000), device=st.sampled_from(["cpu", "cuda"]))
def test_pieces_are_few_and_not_short(num_tokens: int, device: str) -> None:
    size = _piece_tokens(num_tokens, device)
    assert size % 128 == 0
    assert size >= {"cpu": 128, "cuda": 512}[device]
    assert -(-num_tokens // size) <= 8


SHORT = (7, 4, 1, 5)
LAYERS = ["sliding_attention", "full_attention"] * 2


def watch_masks(family: str, **overrides: Any) -> tuple[Any, list[Tensor]]:
    """A prepared model, and the list of the masks that its blocks get after every other hook."""
    model = build(family, **overrides)
    prepare_attention(model, "cpu")
    seen: list[Tensor] = []

    def look(block: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["attention_mask"])

    for block in model.model.layers:
        block.register_forward_pre_hook(look, with_kwargs=True)
    return model, seen


def gradients(model: Any) -> list[Tensor]:
    row = packed_row(SHORT)
    model(**row, labels=row["input_ids"], use_cache=False).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        *itertools.product(
            ("llama", "mistral", "qwen3", "gemma3_text", "mixtral"), ("none", "full", "selective")
        ),
        # Masks of eager attention stay: MPT's are boolean too, but True where a token is hidden.
        ("mpt", "none"),
    ],
)
def test_gradients_are_the_same_bits(family: str, recompute: Checkpointing) -> None:
    plain, shared = build(family).train(), build(family).train()
    prepare_attention(shared, "cpu")
    for model in (plain, shared):
        checkpoint_blocks(model, recompute)
    for _ in range(2):
        for ours, theirs in zip(gradients(shared), gradients(plain), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_all_blocks_get_one_bias_and_the_next_forward_another() -> None:
    model, seen = watch_masks("llama")
    model(**packed_row(SHORT), use_cache=False)
    first, second = seen
    assert first is second
    assert first.dtype == torch.float32
    assert first.unique().tolist() == [-torch.inf, 0.0]
    model(**packed_row(SHORT), use_cache=False)
    assert seen[2] is seen[3]
    assert seen[2] is not first


def test_two_masks_are_shared_apart() -> None:
    model, seen = watch_masks("gemma3_text", num_hidden_layers=4, layer_types=LAYERS)
    model(**packed_row(SHORT), use_cache=False)
    assert seen[0] is seen[2]
    assert seen[1] is seen[3]
    assert not torch.equal(seen[0], seen[1])


def test_the_bias_has_the_dtype_of_the_arithmetic() -> None:
    model, seen = watch_masks("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**packed_row(SHORT), use_cache=False)
    assert {each.dtype for each in seen} == {torch.bfloat16}


def test_rows_without_a_mask_are_left_alone() -> None:
    model, seen = watch_masks("llama")
    model(input_ids=packed_row(SHORT)["input_ids"], use_cache=False)
    assert seen == [None, None]


def test_a_soft_cap_is_not_left_to_attention_that_drops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of transformers 5.17, which takes SDPA attention for Gemma 2."""
    expected = build("gemma2", attn_logit_softcapping=0.01)
    family = next(each for each in type(expected).__mro__ if "_supports_sdpa" in vars(each))
    monkeypatch.setattr(family, "_supports_sdpa", True)
    model = build("gemma2", attn_logit_softcapping=0.01)
    model.config._attn_implementation = "sdpa"
    expected.set_attn_implementation("eager")
    model.load_state_dict(expected.state_dict())
    ids = torch.arange(12)[None]
    attention = prepare_attention(model, "cpu")
    assert attention.kernel == "own"
    assert torch.equal(model.eval()(ids).logits, expected.eval()(ids).logits)
    assert choose_attention(model, "cuda") in ("flex", "own")
    attention.restore(model)
    assert model.config._attn_implementation == "sdpa"
