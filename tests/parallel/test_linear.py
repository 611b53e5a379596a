"""Sharded linear layers, alone and in groups, against `nn.Linear` on one process."""

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import RankPool
from test_collectives import Operators, draw
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memguard.parallel.linear import Linear4D, LinearGroup4D
from memguard.parallel.linear_function import linear_4d
from memguard.parallel.mesh import Axis, Mesh4D, build_mesh
from memguard.parallel.mesh_shape import MeshShape

# float64: sums of a dozen products, in another order over the ranks.
EXACT = {"rtol": 0.0, "atol": 1e-13}

ALONE = Axis(name="x")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer and its input."""

    in_features: int
    out_features: int
    bias: bool = False
    is_transposed: bool = False
    lead: tuple[int, ...] = (3,)
    """Sizes of the input before its features."""


# 7 and 5 fall into uneven pieces over 2 and 3 ranks.
CASES = [
    Case(in_features=in_features, out_features=out, bias=bias, is_transposed=is_transposed)
    for (in_features, out), bias, is_transposed in itertools.product(
        ((6, 12), (5, 7)), (False, True), (False, True)
    )
] + [Case(in_features=6, out_features=12, bias=True, lead=(2, 3))]


def piece(tensor: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's piece along a dimension, as torch.chunk cuts it."""
    return tensor.chunk(axis.degree, dim)[axis.rank].contiguous()


def build_linear(case: Case, seed: int = 0) -> nn.Linear:
    linear = nn.Linear(case.in_features, case.out_features, bias=case.bias, dtype=torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(linear.parameters()):
            parameter.copy_(draw(10 * seed + number, *parameter.shape))
    return linear


def shard_linear(case: Case, mesh: Mesh4D, seed: int = 0) -> Linear4D:
    full = build_linear(case, seed)
    names: list[Any] = ["x", "y"] if case.is_transposed else ["y", "x"]
    in_axis, out_axis = (mesh.axis(name) for name in names)
    full.weight = nn.Parameter(piece(piece(full.weight.data, 0, out_axis), 1, in_axis))
    if case.bias:
        full.bias = nn.Parameter(piece(full.bias.data, 0, out_axis))
    return Linear4D.convert(full, in_axis=in_axis, out_axis=out_axis)


def run_cases(degrees: tuple[int, int], cases: list[Case]) -> list[list[Tensor]]:
    """On a rank: differences of output, input gradient, weight gradient, bias gradient."""
    y, x = degrees
    mesh = build_mesh(MeshShape(y=y, x=x), "cpu")
    found = []
    for case in cases:
        ours, theirs = shard_linear(case, mesh), build_linear(case)
        full_MK = draw(1, *case.lead, case.in_features).requires_grad_()
        local_MK = piece(full_MK.detach(), -1, ours.in_axis).requires_grad_()
        expected, output = theirs(full_MK), ours(local_MK)
        grad = draw(2, *expected.shape)
        expected.backward(grad)
        output.backward(piece(grad, -1, ours.out_axis))
        pairs = [
            (output, piece(expected, -1, ours.out_axis)),
            (local_MK.grad, piece(full_MK.grad, -1, ours.in_axis)),
            (ours.weight.grad, piece(piece(theirs.weight.grad, 0, ours.out_axis), 1, ours.in_axis)),
        ]
        if case.bias:
            pairs.append((ours.bias.grad, piece(theirs.bias.grad, 0, ours.out_axis)))
        for one, other in pairs:
            assert one.shape == other.shape
        found.append([(one - other).detach().abs().max() for one, other in pairs])
    return found


@pytest.mark.parametrize("degrees", [(1, 2), (2, 1), (2, 2), (1, 3)], ids=str)
def test_a_layer_equals_the_plain_one(ranks: RankPool, degrees: tuple[int, int]) -> None:
    for found in ranks(run_cases, degrees[0] * degrees[1], degrees, CASES):
        for case, differences in zip(CASES, found, strict=True):
            assert max(differences) <= EXACT["atol"], (case, differences)


def run_shared_heads() -> list[Tensor]:
    """On a rank of four: two key heads of four features, each shared by two ranks."""
    case = Case(in_features=6, out_features=8, bias=True)
    mesh = build_mesh(MeshShape(x=4), "cpu")
    ours = shard_linear(case, mesh)
    ours = Linear4D.convert(
        ours, in_axis=ours.in_axis, out_axis=ours.out_axis, kv_replicas=mesh.kv_replicas(2)
    )
    rank = mesh.axis("x").rank
    input_MK = draw(1, 2, 3, 6).requires_grad_()
    head = ours(input_MK)
    head.backward(draw(50 + rank, 2, 3, 4))
    return [head.detach(), input_MK.grad, ours.weight.grad, ours.bias.grad]  # type: ignore[list-item]


def test_a_head_that_several_ranks_share(ranks: RankPool) -> None:
    theirs = build_linear(Case(in_features=6, out_features=8, bias=True))
    input_MK = draw(1, 2, 3, 6).requires_grad_()
    heads = theirs(input_MK).split(4, -1)
    # Every rank uses its head for queries of its own.
    sum((heads[rank // 2] * draw(50 + rank, 2, 3, 4)).sum() for rank in range(4)).backward()
    for rank, (head, grad_input, grad_weight, grad_bias) in enumerate(ranks(run_shared_heads, 4)):
        torch.testing.assert_close(head, heads[rank // 2].detach(), **EXACT)
        torch.testing.assert_close(grad_input, input_MK.grad, **EXACT)
        torch.testing.assert_close(grad_weight, theirs.weight.grad.chunk(4)[rank], **EXACT)
        torch.testing.assert_close(grad_bias, theirs.bias.grad.chunk(4)[rank], **EXACT)


QKV = [Case(in_features=6, out_features=n, bias=True) for n in (12, 4, 4)]


def run_group(degrees: tuple[int, int]) -> list[list[str]]:
    """On a rank: a group and the same layers one by one, in every order of calls."""
    mesh = build_mesh(MeshShape(y=degrees[0], x=degrees[1]), "cpu")
    full_MK = draw(1, 3, 6)
    called = []
    for order in ((0, 1, 2), (2, 0, 1)):
        results = []
        for is_grouped in (False, True):
            layers = [shard_linear(case, mesh, seed) for seed, case in enumerate(QKV)]
            if is_grouped:
                LinearGroup4D(layers)
            input_MK = piece(full_MK, -1, mesh.axis("y")).requires_grad_()
            with Operators() as forward:
                outputs = {number: layers[number](input_MK) for number in order}
            loss = sum((outputs[n] * draw(n, *outputs[n].shape)).sum() for n in range(3))
            with Operators() as backward:
                loss.backward()
            parameters = [each for layer in layers for each in (layer.weight, layer.bias)]
            results.append(
                [outputs[n].detach() for n in range(3)]
                + [input_MK.grad, *(parameter.grad for parameter in parameters)]
            )
            called.append([*forward.names, "|", *backward.names])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, **EXACT)
    return called


@pytest.mark.parametrize("degrees", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_a_group_gives_the_same_with_one_collective_each_way(
    ranks: RankPool, degrees: tuple[int, int]
) -> None:
    y, x = degrees
    once = ["_c10d_functional.all_reduce", "_c10d_functional.wait_tensor"]
    for called in ranks(run_group, y * x, degrees):
        for alone, grouped in zip(called[::2], called[1::2], strict=True):
            assert len([name for name in alone if "all_reduce" in name]) == 3 * (y > 1) + 3 * (
                x > 1
            )
            assert grouped == [*(once if y > 1 else []), "|", *(once if x > 1 else [])]


class Matmuls(Operators):
    """Lists matrix multiplications too."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation is torch.ops.aten.mm.default:
            self.names.append("mm")
        return super().__torch_dispatch__(operation, types, args, kwargs)


def list_backward() -> list[str]:
    mesh = build_mesh(MeshShape(x=2), "cpu")
    layer = shard_linear(Case(in_features=6, out_features=4), mesh)
    output = layer(draw(1, 3, 6).requires_grad_())
    with Matmuls() as operators:
        output.sum().backward()
    return operators.names


def test_the_gradient_of_the_weight_is_computed_while_the_other_travels(ranks: RankPool) -> None:
    for names in ranks(list_backward, 2):
        assert [name.split(".")[-1] for name in names] == ["mm", "all_reduce", "mm", "wait_tensor"]


def make_group(*out_features: int, dtype: torch.dtype = torch.float64) -> list[Linear4D]:
    """A group on one rank, without a process group."""
    layers = []
    for seed, number in enumerate(out_features):
        linear = build_linear(Case(in_features=6, out_features=number), seed).to(dtype)
        layers.append(Linear4D.convert(linear, in_axis=ALONE, out_axis=ALONE))
    LinearGroup4D(layers)
    return layers


def call_all(layers: Sequence[Linear4D], input_MK: Tensor) -> None:
    for layer in layers:
        expected = nn.functional.linear(input_MK, layer.weight)
        torch.testing.assert_close(layer(input_MK), expected, **EXACT)


def test_another_input_within_a_round_is_an_error() -> None:
    query, key, value = make_group(4, 2, 2)
    first, second = draw(1, 3, 6), draw(2, 3, 6)
    query(first)
    with pytest.raises(RuntimeError, match="3 grouped linear layers must read the same input"):
        key(second)
    # Equal numbers in another tensor are another input: the gradient would go to the first.
    with pytest.raises(RuntimeError, match="layer 2 was called with a different one"):
        value(first.clone())
    call_all([query, key, value], second)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_a_round_left_unfinished_does_not_reach_the_next(order: tuple[int, ...]) -> None:
    layers = make_group(4, 2, 2)
    for finished in (1, 2):
        # As after an exception between the calls.
        interrupted = draw(1, 3, 6)
        for number in order[:finished]:
            layers[number](interrupted)
        call_all([layers[number] for number in order], draw(2, 3, 6))


def test_a_recompute_that_stops_early_does_not_poison_the_next_forward() -> None:
    gate, up = make_group(4, 4)
    num_calls = 0

    def block(input_MK: Tensor) -> Tensor:
        nonlocal num_calls
        # Nothing after the sine is kept for backward: the second call is not repeated.
        bent = gate(input_MK).sin()
        num_calls += 1
        return bent + up(input_MK)

    for number in range(3):
        input_MK = draw(number, 3, 6).requires_grad_()
        num_calls = 0
        checkpoint(block, input_MK, use_reentrant=False).sum().backward()
        assert num_calls == 1, "the recomputation stopped before the second member"
        found = input_MK.grad, gate.weight.grad.clone(), up.weight.grad.clone()
        gate.zero_grad()
        up.zero_grad()
        plain_MK = input_MK.detach().clone().requires_grad_()
        weights = [layer.weight.detach().requires_grad_() for layer in (gate, up)]
        bent, straight = (nn.functional.linear(plain_MK, weight) for weight in weights)
        (bent.sin() + straight).sum().backward()
        for one, other in zip(found, (plain_MK.grad, *(w.grad for w in weights)), strict=True):
            torch.testing.assert_close(one, other, **EXACT)


def test_a_member_called_twice_is_computed_twice() -> None:
    gate, up = make_group(4, 4)
    input_MK = draw(1, 3, 6).requires_grad_()
    (gate(input_MK) + gate(input_MK) + up(input_MK)).sum().backward()
    plain_MK = input_MK.detach().clone().requires_grad_()
    weights = [layer.weight.detach().requires_grad_() for layer in (gate, up)]
    outputs = [nn.functional.linear(plain_MK, weight) for weight in weights]
    (2 * outputs[0] + outputs[1]).sum().backward()
    torch.testing.assert_close(input_MK.grad, plain_MK.grad, **EXACT)
    torch.testing.assert_close(gate.weight.grad, weights[0].grad, **EXACT)
    torch.testing.assert_close(up.weight.grad, weights[1].grad, **EXACT)


def test_a_finished_round_keeps_nothing_alive() -> None:
    layers = make_group(4, 2)
    input_MK = draw(1, 3, 6)
    with torch.no_grad():
        outputs = [layer(input_MK) for layer in layers]
    references = [weakref.ref(each) for each in (input_MK, *outputs)]
    del input_MK, outputs
    assert [reference() for reference in references] == [None] * 3


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    gate, up = make_group(4, 4)
    gate.weight.requires_grad_(False)
    (gate(input_MK := draw(1, 3, 6)) * up(input_MK)).sum().backward()
    assert gate.weight.grad is None
    expected = draw(1, 3, 6).T @ nn.functional.linear(input_MK, gate.weight)
    torch.testing.assert_close(up.weight.grad, expected.T, **EXACT)


def test_bfloat16_stays_bfloat16() -> None:
    layers = make_group(4, 4, dtype=torch.bfloat16)
    input_MK = draw(1, 2, 3, 6).bfloat16().requires_grad_()
    plain_MK = input_MK.detach().clone().requires_grad_()
    output = sum(layer(input_MK) for layer in layers)
    expected = sum(nn.functional.linear(plain_MK, layer.weight.detach()) for layer in layers)
    output.sum().backward()
    expected.sum().backward()
    assert output.dtype == input_MK.grad.dtype == layers[0].weight.grad.dtype == torch.bfloat16
    # The same operations on the same numbers.
    assert torch.equal(output, expected)
    assert torch.equal(input_MK.grad, plain_MK.grad)


@pytest.mark.parametrize("num_weights", [1, 2, 3, 4])
def test_frozen_layers_compile_without_a_break(num_weights: int) -> None:
    """Without gradients the compiler calls `forward` itself, with the arguments that it expects."""
    input_MK, *weights = (draw(seed, 4, 6) for seed in range(num_weights + 1))

    def multiply(input_MK: Tensor) -> tuple[Tensor, ...]:
        return linear_4d(input_MK, weights, ALONE, ALONE)

    compiled = torch.compile(multiply, backend="eager", fullgraph=True)
    for output, weight in zip(compiled(input_MK), weights, strict=True):
        assert torch.equal(output, input_MK @ weight.T)
