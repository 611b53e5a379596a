"""Each collective and its gradient, against the same formula on one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from memguard.parallel import collectives
from memguard.parallel.mesh import Axis, build_mesh
from memguard.parallel.mesh_shape import MeshShape

NAMES = ["copy_to_axis", "sum_over_axis", "sum_for_each", "gather_from_axis"]
# Sums of a few float64 numbers, in another order.
EXACT = {"rtol": 0.0, "atol": 1e-14}


class Operators(TorchDispatchMode):
    """Lists the collectives that are called under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "c10d" in operation.namespace:
            self.note(f"{operation.namespace}.{operation._schema.name.split('::')[1]}", args)
        return operation(*args, **(kwargs or {}))

    def note(self, name: str, args: Any) -> None:
        self.names.append(name)


def draw(rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def make_axis(degree: int) -> Axis:
    return build_mesh(MeshShape(x=degree), "cpu").axis("x")


def run_all(degree: int, shape: tuple[int, ...]) -> dict[str, tuple[Tensor, Tensor, list[str]]]:
    """Value, gradient and operators of each function; each rank weighs its result its own way."""
    axis = make_axis(degree)
    found = {}
    for name in NAMES:
        # A weight that all ranks have alike and pieces of each rank.
        tensor = draw(0 if name == "copy_to_axis" else axis.rank, *shape).requires_grad_()
        with Operators() as operators:
            value = getattr(collectives, name)(tensor, axis)
            # What every rank uses alike has one gradient, not one a rank.
            weights = draw(100 if name == "sum_over_axis" else 100 + axis.rank, *value.shape)
            value.backward(weights)
        assert tensor.grad is not None
        found[name] = (value.detach(), tensor.grad, operators.names)
    return found


def restate(name: str, degree: int, shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """One process: the loss is the sum over ranks of their weighed results."""
    pieces = [draw(rank, *shape).requires_grad_() for rank in range(degree)]
    if name == "copy_to_axis":
        values = [pieces[0]] * degree
    elif name == "gather_from_axis":
        values = [torch.cat(pieces, -1)] * degree
    else:
        values = [torch.stack(pieces).sum(0)] * degree
    if name == "sum_over_axis":
        loss = (draw(100, *values[0].shape) * values[0]).sum()
    else:
        loss = sum(
            (draw(100 + rank, *value.shape) * value).sum() for rank, value in enumerate(values)
        )
    wanted = [pieces[0]] if name == "copy_to_axis" else pieces
    gradients = torch.autograd.grad(loss, wanted)
    each = gradients * degree if name == "copy_to_axis" else gradients
    return [(v.detach(), g) for v, g in zip(values, each, strict=True)]


OPERATORS = {
    "copy_to_axis": ["all_reduce"],
    "sum_over_axis": ["all_reduce"],
    "sum_for_each": ["all_reduce", "all_reduce"],
    "gather_from_axis": ["all_gather_into_tensor", "reduce_scatter_tensor"],
}


@pytest.mark.parametrize(("degree", "shape"), [(2, (2, 3, 4)), (3, (5,))])
def test_values_and_gradients(ranks: RankPool, degree: int, shape: tuple[int, ...]) -> None:
    results = ranks(run_all, degree, degree, shape)
    for name in NAMES:
        for found, (value, gradient) in zip(results, restate(name, degree, shape), strict=True):
            torch.testing.assert_close(found[name][0], value, **EXACT)
            torch.testing.assert_close(found[name][1], gradient, **EXACT)
            # Functional ones only: what else sees collectives does not see the others.
            waited = [each for op in OPERATORS[name] for each in (op, "wait_tensor")]
            assert found[name][2] == [f"_c10d_functional.{each}" for each in waited]


def run_plain(degree: int) -> list[Tensor]:
    """Those without a gradient; on a tensor that is not contiguous, which must stay as it is."""
    axis = make_axis(degree)
    tensor = draw(axis.rank, 3, 2).T
    before = tensor.clone()
    found = [collectives.all_reduce(tensor, axis, op) for op in ("sum", "max", "min")]
    found.append(collectives.wait(collectives.start_all_reduce(tensor, axis)))
    found.append(collectives.all_gather(tensor, axis))
    assert torch.equal(tensor, before)
    return found


def test_without_gradients(ranks: RankPool) -> None:
    pieces = [draw(rank, 3, 2).T for rank in range(3)]
    stack = torch.stack(pieces)
    for total, largest, smallest, started, gathered in ranks(run_plain, 3, 3):
        torch.testing.assert_close(total, stack.sum(0), **EXACT)
        assert torch.equal(largest, stack.amax(0))
        assert torch.equal(smallest, stack.amin(0))
        assert torch.equal(started, total)
        assert torch.equal(gathered, torch.cat(pieces, -1))


@pytest.mark.parametrize("name", [*NAMES, "all_reduce", "start_all_reduce", "all_gather"])
def test_an_axis_of_one_rank_needs_no_process_group(name: str) -> None:
    tensor = torch.ones(2, requires_grad=True)
    function: Callable[[Tensor, Axis], Tensor] = getattr(collectives, name)
    assert function(tensor, Axis(name="x")) is tensor


class CountedOperators:
    """Stands for the operators, without a dispatch mode, which would turn reducing in place off."""

    def __init__(self, operators: Any) -> None:
        self._operators = operators
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.names.append(name)
        return getattr(self._operators, name)


def reduce_in_place() -> dict[str, Any]:
    """On a rank: which operators ran, whether the input was overwritten, and the sums."""
    axis = make_axis(2)
    counted = CountedOperators(collectives._ops)
    collectives._ops = counted

    def reduce(tensor: Tensor, **settings: Any) -> tuple[list[str], bool, list[float]]:
        counted.names.clear()
        total = collectives.all_reduce(tensor, axis, **settings)
        overwritten = total.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        return list(counted.names), overwritten, total.flatten().tolist()

    ones = torch.ones(2, 1)
    with torch.no_grad():
        found: dict[str, Any] = {
            "owned": reduce(ones.clone(), owned=True),
            "kept": reduce(ones.clone()),
            # Its copy is owned.
            "strided": reduce(torch.ones(2, 4)[:, ::4]),
        }
        with Operators():
            found["recorded"] = reduce(ones.clone(), owned=True)
        with CommDebugMode() as counts:
            reduce(ones.clone(), owned=True)
        found["counted"] = counts.get_total_counts()
    found["with gradients"] = reduce(ones.clone(), owned=True)
    leaf = torch.ones(3, requires_grad=True)
    counted.names.clear()
    (collectives.sum_over_axis(leaf * 2, axis) ** 2).sum().backward()
    found["sum_over_axis"] = counted.names, leaf.grad.tolist()
    return found


def test_an_input_that_is_not_needed_again_is_reduced_in_place(ranks: RankPool) -> None:
    plain, in_place = ["all_reduce", "wait_tensor"], ["all_reduce_", "wait_tensor"]
    for found in ranks(reduce_in_place, 2):
        assert found == {
            "owned": (in_place, True, [2.0, 2.0]),
            "kept": (plain, False, [2.0, 2.0]),
            "strided": (in_place, False, [2.0, 2.0]),
            "recorded": (plain, False, [2.0, 2.0]),
            "counted": 1,
            "with gradients": (plain, False, [2.0, 2.0]),
            # (2 leaf, summed over two ranks)^2, whose gradient is 2 * 4 * 2.
            "sum_over_axis": (in_place, [16.0] * 3),
        }
