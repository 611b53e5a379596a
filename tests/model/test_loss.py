"""Losses over a sharded vocabulary against autograd through all logits at once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import RankPool
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from vocab_pieces import (
    MESHES,
    STEPS,
    VOCAB_SIZES,
    Recorder,
    Whole,
    cut_here,
    cut_whole,
    draw_whole,
    draw_wholes,
    take_piece,
)

from memguard.model.lm_head import Head
from memguard.model.loss import sum_nll, token_terms
from memguard.parallel.mesh import Axis

ALL_TERMS = frozenset({"nll", "entropy", "mean_logprob"})


def plain_terms(whole: Whole) -> Tensor:
    """nll, entropy and mean log-probability [3, N] from all logits."""
    logprob_NV = whole.logits().log_softmax(1)
    nll_N = functional.cross_entropy(whole.logits(), whole.labels_N, reduction="none")
    return torch.stack([nll_N, -(logprob_NV.exp() * logprob_NV).sum(1), logprob_NV.mean(1)])


def our_terms(head: Head, hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
    terms = token_terms(head, hidden_ND, labels_N, ALL_TERMS)
    assert terms.entropy_N is not None
    assert terms.mean_logprob_N is not None
    return torch.stack([terms.nll_N, terms.entropy_N, terms.mean_logprob_N])


def sum_losses(kind: str, head: Head, hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
    """The sum of the losses by either function."""
    if kind == "sum":
        return sum_nll(head, hidden_ND, labels_N)
    return token_terms(head, hidden_ND, labels_N).nll_N.sum()


def draw_factors(num_tokens: int) -> Tensor:
    """What a loss multiplies each term with: another number for each."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(3, num_tokens, generator=generator, dtype=torch.float64)


def check_against_plain(whole: Whole, chunk_tokens: int, axes: Sequence[Axis] = ()) -> None:
    """Compare values and all gradients with those of the whole, on this rank."""
    y, x = axes or (Axis(name="y"), Axis(name="x"))
    # float64: other orders of summation differ by the last bits of sums of a few hundred numbers
    # of the size of the largest hidden state.
    tolerance = 1e-12 * max([1.0, *whole.hidden_ND.abs().flatten().tolist()])
    assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=tolerance)
    factors_3N = draw_factors(len(whole.labels_N))
    leaves = [leaf.detach().clone().requires_grad_() for leaf in whole.leaves]
    bias_V = leaves[2] if whole.bias_V is not None else None
    plain = replace(whole, hidden_ND=leaves[0], weight_VD=leaves[1], bias_V=bias_V)
    for kind in ("sum", "terms"):
        head, hidden_ND = cut_whole(whole, axes, chunk_tokens=chunk_tokens)
        if kind == "sum":
            ours = sum_nll(head, hidden_ND, whole.labels_N)
            theirs = plain_terms(plain)[0].sum()
            (ours * 0.3).backward()
            expected = torch.autograd.grad(theirs * 0.3, leaves)
        else:
            ours = our_terms(head, hidden_ND, whole.labels_N)
            theirs = plain_terms(plain)
            (ours * factors_3N).sum().backward()
            expected = torch.autograd.grad((theirs * factors_3N).sum(), leaves)
        assert_close(ours.detach(), theirs.detach())
        assert_close(hidden_ND.grad, take_piece(expected[0], 1, y))
        weight_VD = take_piece(take_piece(expected[1], 0, x), 1, y)
        assert_close(head.weight_VD.grad, weight_VD)
        if head.bias_V is not None:
            assert_close(head.bias_V.grad, take_piece(expected[2], 0, x))


@settings(deadline=None, max_examples=60)
@given(whole=draw_wholes(), chunk_tokens=st.integers(1, 12))
def test_values_and_gradients_are_those_of_all_logits(whole: Whole, chunk_tokens: int) -> None:
    check_against_plain(whole, chunk_tokens)


def check_on_ranks(degrees: tuple[int, int]) -> None:
    axes = cut_here(degrees)
    for vocab_size in VOCAB_SIZES:
        for bias, steps in ((True, STEPS), (False, ())):
            check_against_plain(draw_whole(7, vocab_size, bias=bias, steps=steps), 3, axes)
    check_against_plain(draw_whole(0, 131), 3, axes)


@pytest.mark.parametrize("degrees", MESHES)
def test_a_sharded_head_has_the_losses_and_gradients_of_the_whole(
    ranks: RankPool, degrees: tuple[int, int]
) -> None:
    ranks(check_on_ranks, degrees[0] * degrees[1], degrees)


class Matmuls(TorchDispatchMode):
    """Notes the dtypes that matrices are multiplied in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.dtypes.add(made.dtype)
        return made


def test_autocast_computes_in_bf16_and_keeps_the_parameters_dtype() -> None:
    whole = draw_whole(400, 131, dtype=torch.float32, dim=64)
    labels_N = whole.labels_N
    exact, plain = (
        [leaf.detach().to(dtype).requires_grad_() for leaf in whole.leaves]
        for dtype in (torch.float64, torch.float32)
    )
    exact_loss = functional.cross_entropy(functional.linear(*exact), labels_N, reduction="sum")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = functional.linear(*plain)
        plain_loss = functional.cross_entropy(logits.float(), labels_N, reduction="sum")
    exact_loss.backward()
    plain_loss.backward()
    for kind in ("sum", "terms"):
        head, hidden_ND = cut_whole(whole, chunk_tokens=6)
        with Matmuls() as matmuls, torch.autocast("cpu", dtype=torch.bfloat16):
            loss = sum_losses(kind, head, hidden_ND, labels_N)
            loss.backward()
        assert matmuls.dtypes == {torch.bfloat16}
        assert loss.dtype == torch.float32
        # Roundings of 2^-9 each, which cancel over 400 tokens: torch's own autocast is off by 1e-4.
        assert float(loss.detach()) == pytest.approx(float(exact_loss.detach()), rel=1e-3)
        ours = [hidden_ND.grad, head.weight_VD.grad, head.bias_V.grad]
        for gradient, theirs, truth in zip(ours, plain, exact, strict=True):
            assert gradient.dtype == torch.float32
            assert truth.grad is not None
            assert theirs.grad is not None
            # torch's own autocast is off by .8 %, ours by 1.1 to 1.3 %: it adds the bias to logits
            # that are rounded already, and sums a rounded gradient chunk by chunk.
            error, their_error = (
                float((each.double() - truth.grad).norm()) for each in (gradient, theirs.grad)
            )
            assert error < 2.5 * their_error


def test_gradients_of_a_bf16_head_are_summed_in_fp32() -> None:
    """Over many chunks: in bf16 a sum of 256 equal terms takes no further one."""
    whole = draw_whole(512, 5, dtype=torch.bfloat16)
    leaves = [leaf.detach().double().requires_grad_() for leaf in whole.leaves]
    functional.cross_entropy(functional.linear(*leaves), whole.labels_N, reduction="sum").backward()
    for kind in ("sum", "terms"):
        head, hidden_ND = cut_whole(whole, chunk_tokens=2)
        sum_losses(kind, head, hidden_ND, whole.labels_N).backward()
        for gradient, leaf in zip((head.weight_VD.grad, head.bias_V.grad), leaves[1:], strict=True):
            assert gradient.dtype == torch.bfloat16
            # What is rounded once is off by .2 %; summed in bf16, by 1.4 and 2.2 %.
            error = (gradient.double() - leaf.grad).norm() / leaf.grad.norm()  # type: ignore[operator]
            assert error < 6e-3


def test_backward_inside_autocast_keeps_the_forwards_dtype() -> None:
    whole = draw_whole(20, 131, dtype=torch.float32, dim=64)
    found = []
    for autocast in (False, True):
        head, hidden_ND = cut_whole(whole, chunk_tokens=6)
        total = our_terms(head, hidden_ND, whole.labels_N).sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            total.backward()
        found.append((hidden_ND.grad, head.weight_VD.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_float64_stays_float64_under_autocast() -> None:
    whole = draw_whole(5, 11)
    head, hidden_ND = cut_whole(whole)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = sum_nll(head, hidden_ND, whole.labels_N)
    # float64, as above.
    torch.testing.assert_close(ours.detach(), plain_terms(whole)[0].sum(), rtol=1e-12, atol=0)


def test_a_common_factor_is_not_rounded_to_bf16() -> None:
    whole = draw_whole(64, 131, dtype=torch.bfloat16, dim=32)
    found = []
    for factor in (1.0, 1 / 3):
        head, hidden_ND = cut_whole(whole, chunk_tokens=10)
        (sum_nll(head, hidden_ND, whole.labels_N) * factor).backward()
        found.append(hidden_ND.grad.double())
    ratio = (found[0] * found[1]).sum() / found[0].square().sum()
    # 2,048 numbers rounded to nearest: errors of 2^-9 each cancel. bf16(1/3) is 1/3 + 0.1 %.
    assert float(ratio) == pytest.approx(1 / 3, rel=2e-4)


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_in_place_of_hidden_states_are_left_as_they_were(autocast: bool) -> None:
    whole = draw_whole(9, 17, dtype=torch.float32)
    logits_NV = whole.logits().requires_grad_()
    before_NV = logits_NV.detach().clone()
    head = Head(weight_VD=None, vocab_size=17, chunk_tokens=4)
    plain_N = functional.cross_entropy(logits_NV, whole.labels_N, reduction="none")
    (expected,) = torch.autograd.grad(plain_N.sum(), logits_NV)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        total = sum_nll(head, logits_NV, whole.labels_N)
        terms = token_terms(head, logits_NV, whole.labels_N)
    assert torch.equal(logits_NV.detach(), before_NV)
    # fp32, sums of 17.
    torch.testing.assert_close(terms.nll_N, plain_N, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total, plain_N.sum(), rtol=1e-5, atol=1e-6)
    for ours in (total, terms.nll_N.sum()):
        (gradient,) = torch.autograd.grad(ours, logits_NV)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def test_only_what_was_asked_for_is_there() -> None:
    whole = draw_whole(4, 11)
    head, hidden_ND = cut_whole(whole)
    terms = token_terms(head, hidden_ND, whole.labels_N, frozenset({"entropy"}))
    assert terms.entropy_N is not None
    assert terms.mean_logprob_N is None
    with pytest.raises(AssertionError, match="does not compute"):
        token_terms(head, hidden_ND, whole.labels_N, frozenset({"perplexity"}))


def test_a_frozen_head_passes_gradients_on() -> None:
    whole = draw_whole(6, 11)
    expected, frozen = (cut_whole(whole, chunk_tokens=4) for _ in range(2))
    for parameter in (frozen[0].weight_VD, frozen[0].bias_V):
        parameter.requires_grad_(False)
    for head, hidden_ND in (expected, frozen):
        for kind in ("sum", "terms"):
            sum_losses(kind, head, hidden_ND, whole.labels_N).backward()
    total: Any = sum_nll(*frozen, whole.labels_N)
    assert total.grad_fn.gradients.weight_VD is total.grad_fn.gradients.bias_V is None
    assert torch.equal(frozen[1].grad, expected[1].grad)  # type: ignore[arg-type]


def record_costs(degrees: tuple[int, int] | None) -> dict[str, tuple[int, list[tuple[str, int]]]]:
    """The largest tensor and the collectives of each pass over 32 tokens, 8 at a time."""
    axes = () if degrees is None else cut_here(degrees)
    whole = draw_whole(32, 131, dim=4)
    head, hidden_ND = cut_whole(whole, axes, chunk_tokens=8)
    given, costs = (head, hidden_ND, whole.labels_N), {}

    def note(name: str, work: Callable[[], Any]) -> Any:
        with Recorder() as recorder:
            result = work()
        costs[name] = (recorder.largest, recorder.collectives)
        return result

    with torch.no_grad():
        note("sum without gradients", lambda: sum_nll(*given))
    total = note("sum", lambda: sum_nll(*given))
    note("sum backward", total.backward)
    terms = note("terms", lambda: our_terms(*given))
    note("terms backward", lambda: terms.sum().backward())
    return costs


def test_one_process_makes_one_chunk_of_logits_at_a_time() -> None:
    costs = record_costs(None)
    assert {name for name, (largest, _) in costs.items() if largest == 8 * 131} == {
        "sum without gradients",
        "sum",
        "terms",
        "terms backward",
    }
    # The weight's gradient: logits are not made again.
    assert costs["sum backward"][0] == 131 * 4
    assert not any(collectives for _, collectives in costs.values())


def test_a_rank_makes_its_piece_of_a_chunk_and_sends_few_numbers(ranks: RankPool) -> None:
    costs = ranks(record_costs, 4, (2, 2))[0]
    # Over y the logits [8, 66]; over x the maximum, two or four sums, the gradient [8, 2].
    logits, maximum, hidden = ("all_reduce", 8 * 66), ("all_reduce", 8), ("all_reduce", 8 * 2)
    expected = {
        "sum without gradients": [logits, maximum, ("all_reduce", 2 * 8)],
        "sum": [logits, maximum, ("all_reduce", 2 * 8), hidden],
        "sum backward": [],
        "terms": [logits, maximum, ("all_reduce", 4 * 8)],
        "terms backward": [logits, hidden],
    }
    assert {name: collectives for name, (_, collectives) in costs.items()} == {
        name: collectives * 4 for name, collectives in expected.items()
    }
    assert max(largest for largest, _ in costs.values()) == 8 * 66
