"""Documents of one packed row do not see each other, family by family."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import FAMILIES, LEAKING, VOCAB_SIZE, build
from torch import Tensor

from memguard.model.causal_lm import CausalLM
from memguard.model.checks import build_causal_lm, keeps_documents_apart

# Rows of documents by their lengths; a document of one token, and padding where a row ends early.
ROWS = [[7, 5, 1, 4], [9, 8], [12]]
LONGEST = 17
# fp32, logits of about 10: other shapes mean another order of summation. A leak is above 0.01.
TOLERANCE = 1e-4


def packed_rows() -> tuple[Tensor, Tensor]:
    """Token ids and positions [3, 17]; padding (id 0) is a document of its own."""
    draw = np.random.default_rng(0)
    ids = draw.integers(3, VOCAB_SIZE, (len(ROWS), LONGEST))
    positions = np.zeros_like(ids)
    for row, lengths in enumerate(ROWS):
        rest = LONGEST - sum(lengths)
        ids[row, LONGEST - rest :] = 0
        positions[row] = np.concatenate([np.arange(n) for n in [*lengths, rest]])
    return torch.from_numpy(ids), torch.from_numpy(positions)


def alone(model: Any, ids: Tensor) -> list[Tensor]:
    """Logits of each document on its own, through the model's plain forward."""
    found = []
    for row, lengths in enumerate(ROWS):
        start = 0
        for length in lengths:
            document = ids[row, start : start + length][None]
            found.append(model(input_ids=document, use_cache=False).logits[0])
            start += length
    return found


def split(logits: Tensor) -> list[Tensor]:
    return [
        piece
        for row, lengths in enumerate(ROWS)
        for piece in logits[row, : sum(lengths)].split(lengths)
    ]


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@torch.no_grad()
def packed_logits(layer: CausalLM) -> list[Tensor]:
    hidden = layer.hidden_states(*packed_rows())
    return split(layer.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2]))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_packed_documents_have_the_logits_they_have_alone(family: str) -> None:
    model = build(family)
    layer = build_causal_lm(model)
    assert keeps_documents_apart(layer)
    expected = alone(model, packed_rows()[0])
    assert largest_difference(packed_logits(layer), expected) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
@torch.no_grad()
def test_eager_attention_keeps_them_apart_too(family: str) -> None:
    model = build(family, attn="eager")
    layer = build_causal_lm(model)
    assert keeps_documents_apart(layer)
    expected = alone(model, packed_rows()[0])
    assert largest_difference(packed_logits(layer), expected) < TOLERANCE


@pytest.mark.parametrize(
    "call",
    [
        {"attention_mask": "ones", "use_cache": False},
        {"attention_mask": None, "use_cache": True},
        {"attention_mask": None},
        {"attention_mask": None, "use_cache": False, "position_ids": None},
    ],
    ids=["mask of ones", "cache", "default cache", "no positions"],
)
@torch.no_grad()
def test_other_forms_of_the_call_leak(call: dict[str, Any]) -> None:
    # So that the tests above can fail, and so that we hear of it if transformers mends this.
    model = build("llama")
    ids, positions = packed_rows()
    call = {"position_ids": positions, **call}
    if call["attention_mask"] == "ones":
        call["attention_mask"] = torch.ones_like(ids)
    logits = model(input_ids=ids, **call).logits
    assert largest_difference(split(logits), alone(model, ids)) > 0.1


@pytest.mark.parametrize("family", LEAKING)
def test_families_that_let_documents_see_each_other_are_found_out(family: str) -> None:
    layer = build_causal_lm(build(family))
    assert not keeps_documents_apart(layer)


@pytest.mark.parametrize("family", LEAKING)
@torch.no_grad()
def test_alone_in_a_row_their_documents_are_right_whatever_the_padding(family: str) -> None:
    model = build(family)
    layer = build_causal_lm(model)
    ids = packed_rows()[0][:, :12]
    lengths = [row[0] for row in ROWS]
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(12 - n)]) for n in lengths])
    hidden = layer.hidden_states(ids, positions)
    for row, length in enumerate(lengths):
        ours = layer.logits(hidden[row, :length])
        theirs = model(input_ids=ids[row, :length][None], use_cache=False).logits[0]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_probing_leaves_mode_and_random_state_alone() -> None:
    layer = build_causal_lm(build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5))
    layer.model.train()
    state = torch.random.get_rng_state()
    # In eval mode: dropout would look like a leak.
    assert keeps_documents_apart(layer)
    assert layer.model.training
    assert torch.equal(torch.random.get_rng_state(), state)


def test_bf16_is_told_apart_from_a_leak() -> None:
    assert keeps_documents_apart(build_causal_lm(build("llama").bfloat16()))
    assert not keeps_documents_apart(build_causal_lm(build("opt").bfloat16()))


def test_probes_run_under_autocast_if_training_does() -> None:
    layer = build_causal_lm(build("llama"))
    dtypes = set()
    first = layer.model.get_submodule("model.layers.0.self_attn.q_proj")
    first.register_forward_hook(lambda *call: dtypes.add(call[2].dtype))
    assert keeps_documents_apart(layer, bf16=True)
    assert dtypes == {torch.bfloat16}
    assert not keeps_documents_apart(build_causal_lm(build("opt")), bf16=True)


def test_a_leak_of_several_rows_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # As flash attention does, which reads positions only where there is one row.
    layer = build_causal_lm(build("llama"))
    whole = layer.hidden_states

    def hidden_states(
        self: Any, ids: torch.Tensor, positions: Any = None, packing: Any = None
    ) -> torch.Tensor:
        return whole(ids, positions if len(ids) == 1 else None)

    monkeypatch.setattr(type(layer), "hidden_states", hidden_states)
    assert not keeps_documents_apart(layer)
