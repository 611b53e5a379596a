"""Collectives over one axis, and their gradients.

    name               forward         backward              used for
    copy_to_axis       t               all-reduce(dt)        a weight each rank uses for its heads
    sum_over_axis      all-reduce(t)   dt                    a sum all ranks use in the same way
    sum_for_each       all-reduce(t)   all-reduce(dt)        a sum each rank uses for its shard
    gather_from_axis   all-gather(t)   reduce-scatter(dt)    key/value heads several ranks share;
                                                             features of which each rank needs all
    scatter_over_axis  reduce-scatter  all-gather(dt)        a sum of which each rank needs a piece

Only functional collectives are used: they are asynchronous until `wait`, and selective
checkpointing, CommDebugMode, fake tensors and torch.compile support them. An all-reduce first
copies its input. Where the input is not needed again (``owned``) it is reduced in place, unless one
of these is active: CommDebugMode does not count it, and selective checkpointing and the compiler
need operations without side effects (the compiler itself omits the copy).
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memguard.parallel.mesh import Axis

# The operators are used directly because their Python wrappers are renamed between releases.
_ops = torch.ops._c10d_functional
RANGE = "memguard over "
"""Begin of the names of ranges in profiles; the axis follows."""


def all_reduce(tensor: Tensor, axis: Axis, op: str = "sum", *, owned: bool = False) -> Tensor:
    """Return the sum (or ``op``: "max", "min") over the axis; no gradient.

    ``owned``: whether ``tensor`` may be overwritten.
    """
    if axis.degree == 1:
        return tensor
    return wait(start_all_reduce(tensor, axis, op, owned=owned))


def start_all_reduce(tensor: Tensor, axis: Axis, op: str = "sum", *, owned: bool = False) -> Tensor:
    """Start an all-reduce whose result must be passed through `wait`; see `all_reduce`."""
    if axis.degree == 1:
        return tensor
    if not tensor.is_contiguous():
        tensor, owned = tensor.contiguous(), True
    if owned and can_overwrite():
        return _start(_ops.all_reduce_, axis, tensor, op)
    return _start(_ops.all_reduce, axis, tensor, op)


def _start(operation: Any, axis: Axis, *arguments: Any) -> Tensor:
    """Start a collective, in a profile in a range that names the axis."""
    is_profiled = not torch.compiler.is_compiling() and torch.autograd.profiler._is_profiler_enabled
    with _RecordFunctionFast(RANGE + axis.name) if is_profiled else nullcontext():
        started: Tensor = operation(*arguments, axis.group_name)
    return started


def can_overwrite() -> bool:
    """Whether nothing records operations, so that one may have a side effect."""
    return not (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or _get_current_dispatch_mode() is not None
    )


def wait(tensor: Tensor) -> Tensor:
    """Return the result of a started collective."""
    finished: Tensor = _ops.wait_tensor(tensor)
    return finished


def all_gather(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the pieces of all ranks along the last dimension, in rank order; no gradient."""
    if axis.degree == 1:
        return tensor
    pieces = gather_rows(tensor[None], axis)
    # Attention's fused kernels require keys and values whose features are contiguous.
    return pieces.movedim(0, -2).flatten(-2)


def gather_rows(rows: Tensor, axis: Axis) -> Tensor:
    """Return the rows of all ranks along the first dimension, in rank order; no gradient."""
    if axis.degree == 1:
        return rows
    return wait(_start(_ops.all_gather_into_tensor, axis, rows.contiguous(), axis.degree))


def _reduce_scatter(tensor: Tensor, axis: Axis) -> Tensor:
    """Return this rank's piece, along the last dimension, of the sum over the axis."""
    pieces = tensor.reshape(*tensor.shape[:-1], axis.degree, tensor.shape[-1] // axis.degree)
    rows = pieces.movedim(-2, 0).flatten(0, 1).contiguous()
    return wait(_start(_ops.reduce_scatter_tensor, axis, rows, "sum", axis.degree))


def copy_to_axis(tensor: Tensor, axis: Axis) -> Tensor:
    """Return ``tensor``; its gradient is the sum over the axis."""
    return tensor if axis.degree == 1 else _Copy.apply(tensor, axis)


def sum_over_axis(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the sum over the axis, for identical use on all ranks: the gradient is unchanged.

    May overwrite ``tensor``, which must not be a leaf or needed for another gradient.
    """
    return tensor if axis.degree == 1 else _Sum.apply(tensor, axis)  # type: ignore[no-untyped-call]


def sum_for_each(tensor: Tensor, axis: Axis) -> Tensor:
    """Return the sum over the axis, for different use on each rank: gradients are summed too."""
    return tensor if axis.degree == 1 else _SumForEach.apply(tensor, axis)


def gather_from_axis(tensor: Tensor, axis: Axis) -> Tensor:
    """Return all ranks' pieces along the last dimension; gradients of a piece are summed."""
    return tensor if axis.degree == 1 else _Gather.apply(tensor, axis)


def scatter_over_axis(tensor: Tensor, axis: Axis) -> Tensor:
    """Return this rank's piece, along the last dimension, of the sum over the axis."""
    return tensor if axis.degree == 1 else _Scatter.apply(tensor, axis)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, axis: Axis) -> Tensor:
        total = all_reduce(tensor, axis, owned=True)
        if total is tensor:
            ctx.mark_dirty(tensor)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


_Collective = Callable[[Tensor, Axis], Tensor]


def _make_function(send: _Collective, send_back: _Collective) -> Any:
    """Return the autograd function of a collective and of that of its gradient."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
            ctx.axis = axis
            return send(tensor, axis)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return send_back(grad, ctx.axis), None

    return Function


_Copy = _make_function(lambda tensor, axis: tensor.view_as(tensor), all_reduce)
_SumForEach = _make_function(all_reduce, all_reduce)
_Gather = _make_function(all_gather, _reduce_scatter)
_Scatter = _make_function(_reduce_scatter, all_gather)
