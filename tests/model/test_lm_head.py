"""A weight is widened once where it may be kept, and for each call where it may not."""

import math

import pytest
import torch
from vocab_pieces import cut_whole, draw_whole

from memguard.model import lm_head
from memguard.model.lm_head import Head, WideWeight, widen
from memguard.model.next_token import find_best


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
