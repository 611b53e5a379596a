"""One bias shared by all blocks gives the numbers of a mask turned into one by each."""

from typing import Any

import pytest
import torch
from tiny_families import VOCAB_SIZE, build
from torch import Tensor

from memguard.parallel.attention import prepare_attention
from memguard.parallel.shard import Checkpointing, checkpoint_blocks

LENGTHS = (7, 4, 1, 5)
LAYERS = ["sliding_attention", "full_attention"] * 2


def packed_row() -> dict[str, Tensor]:
    """Ids and positions [2, 17] of four documents a row."""
    ids = torch.randint(
        3, VOCAB_SIZE, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(0)
    )
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).repeat(2, 1)
    return {"input_ids": ids, "position_ids": positions}


def watch_masks(model: Any) -> list[Tensor]:
    """Collect what the blocks are called with, after every other hook."""
    seen: list[Tensor] = []

    def look(block: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["attention_mask"])

    for block in model.model.layers:
        block.register_forward_pre_hook(look, with_kwargs=True)
    return seen


def gradients(model: Any) -> list[Tensor]:
    row = packed_row()
    model(**row, labels=row["input_ids"], use_cache=False).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3_text", "mixtral"])
def test_gradients_are_the_same_bits(family: str, recompute: Checkpointing) -> None:
    plain, shared = build(family).train(), build(family).train()
    prepare_attention(shared, "cpu")
    for model in (plain, shared):
        checkpoint_blocks(model, recompute)
    for _ in range(2):
        for ours, theirs in zip(gradients(shared), gradients(plain), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_masks_of_eager_attention_stay_as_they_are() -> None:
    """MPT's are boolean too, but True where a token is hidden."""
    plain, prepared = build("mpt"), build("mpt")
    prepare_attention(prepared, "cpu")
    for ours, theirs in zip(gradients(prepared), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_all_blocks_get_one_bias_and_the_next_forward_another() -> None:
    model = build("llama")
    prepare_attention(model, "cpu")
    seen = watch_masks(model)
    model(**packed_row(), use_cache=False)
    first, second = seen
    assert first is second
    assert first.dtype == torch.float32
    assert first.unique().tolist() == [-torch.inf, 0.0]
    model(**packed_row(), use_cache=False)
    assert seen[2] is seen[3]
    assert seen[2] is not first


def test_two_masks_are_shared_apart() -> None:
    model = build("gemma3_text", num_hidden_layers=4, layer_types=LAYERS)
    prepare_attention(model, "cpu")
    seen = watch_masks(model)
    model(**packed_row(), use_cache=False)
    assert seen[0] is seen[2]
    assert seen[1] is seen[3]
    assert not torch.equal(seen[0], seen[1])


def test_the_bias_has_the_dtype_of_the_arithmetic() -> None:
    model = build("llama")
    prepare_attention(model, "cpu")
    seen = watch_masks(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**packed_row(), use_cache=False)
    assert {each.dtype for each in seen} == {torch.bfloat16}


def test_rows_without_a_mask_are_left_alone() -> None:
    model = build("llama")
    prepare_attention(model, "cpu")
    seen = watch_masks(model)
    model(input_ids=packed_row()["input_ids"], use_cache=False)
    assert seen == [None, None]
