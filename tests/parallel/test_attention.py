"""Attention in pieces gives what attention at once gives, and is left alone where it must be."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_families import VOCAB_SIZE, build
from torch import Tensor

from memguard.parallel.attention import prepare_attention
from memguard.parallel.attention_pieces import _piece_tokens

# 300 tokens: pieces of 128, 128 and 44.
LENGTHS = (7, 140, 1, 152)


def packed_row() -> dict[str, Tensor]:
    ids = torch.randint(
        3, VOCAB_SIZE, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(0)
    )
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).repeat(2, 1)
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
