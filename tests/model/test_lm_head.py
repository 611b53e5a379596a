"""A weight is widened once where it may be kept, and for each call where it may not."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vocab_pieces import cut_whole, draw_whole

from memguard.model import lm_head
from memguard.model.lm_head import Head, WideWeight, widen
from memguard.model.next_token import find_best
from memguard.model.token_scores import score_tokens


def test_a_wide_weight_is_kept() -> None:
    narrow_VD, hidden_ND = torch.randn(6, 4).bfloat16(), torch.randn(2, 4).bfloat16()
    head = Head(weight_VD=narrow_VD, vocab_size=6, wide=WideWeight())
    first, again = widen(head, hidden_ND)[0], widen(head, hidden_ND)[0]
    assert first.weight_VD is again.weight_VD
    torch.testing.assert_close(first.weight_VD, narrow_VD.float(), rtol=0, atol=0)
    # Hidden states in float64 need another one.
    other = widen(head, hidden_ND.double())[0].weight_VD
    assert other is not None
    assert other.dtype == torch.float64


def test_a_weight_that_is_wide_already_is_not_copied() -> None:
    weight_VD = torch.randn(6, 4)
    head = Head(weight_VD=weight_VD, vocab_size=6, wide=WideWeight())
    wide = widen(head, torch.randn(2, 4))[0].weight_VD
    assert wide is not None
    assert wide.data_ptr() == weight_VD.data_ptr()


@pytest.mark.parametrize(("free_bytes", "is_kept"), [(959, False), (960, True), (math.inf, True)])
def test_it_is_kept_only_beside_ten_times_its_size(
    monkeypatch: pytest.MonkeyPatch, free_bytes: float, is_kept: bool
) -> None:
    # 6 x 4 weights of 4 bytes: 96 bytes.
    monkeypatch.setattr(lm_head, "count_free_bytes", lambda device: free_bytes)
    wide, weight_VD = WideWeight(), torch.randn(6, 4).bfloat16()
    first = wide.widen(weight_VD, torch.float32)
    assert (wide.widen(weight_VD, torch.float32) is first) == is_kept


def test_the_best_tokens_are_the_same() -> None:
    whole = draw_whole(5, 37)
    head, hidden_ND = cut_whole(whole)
    assert head.weight_VD is not None
    narrow = Head(weight_VD=head.weight_VD.bfloat16(), vocab_size=37)
    kept = Head(weight_VD=narrow.weight_VD, vocab_size=37, wide=WideWeight())
    expected = find_best(narrow, hidden_ND, 4)
    for _ in range(2):
        found = find_best(kept, hidden_ND, 4)
        assert found.ids_NK.equal(expected.ids_NK)
        assert found.logprob_NK.equal(expected.logprob_NK)


@pytest.mark.parametrize(
    ("weight", "hidden", "is_exact"),
    [
        (torch.bfloat16, torch.bfloat16, True),
        (torch.float32, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.float32, False),
        (torch.float64, torch.float64, False),
    ],
)
def test_only_numbers_of_bf16_are_multiplied_in_tf32(
    weight: torch.dtype, hidden: torch.dtype, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[torch.dtype] = []
    state = {"is_fast": False}

    @contextmanager
    def fast(_: Any) -> Iterator[None]:
        state["is_fast"] = True
        yield
        state["is_fast"] = False

    def note(product: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            assert state["is_fast"] == is_exact
            assert not torch.is_autocast_enabled("cpu")
            result = product(*args, **kwargs)
            inside.append(result.dtype)
            return result

        return run

    monkeypatch.setattr(lm_head, "fast_matmuls", fast)
    monkeypatch.setattr(torch, "mm", note(torch.mm))
    monkeypatch.setattr(lm_head.functional, "linear", note(lm_head.functional.linear))
    head = Head(weight_VD=torch.randn(6, 4, dtype=weight), vocab_size=6)
    hidden_ND = torch.randn(3, 4, dtype=hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        find_best(head, hidden_ND, 2)
        score_tokens(head, hidden_ND, torch.zeros(3, dtype=torch.int64))
    wide = torch.promote_types(torch.promote_types(weight, hidden), torch.float32)
    assert inside == [wide] * 2
    assert not state["is_fast"]
