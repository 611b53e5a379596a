"""Linear layers sharded over y and x, with shared and overlapped collectives.

Tokens M, in-features K, out-features N. A *plain* layer (q, k, v, gate, up, head) shards K over y
and N over x. A *transposed* layer (o, down) shards K over x and N over y, so that the output of one
is the input of the other without a new layout. Each rank holds its own rows of the batch over data
and z; M counts those.

              plain         transposed    over the other axis   over z            over data
    X_MK      [M, K/y]      [M, K/x]      replicated            other rows        other rows
    W_NK      [N/x, K/y]    [N/y, K/x]    -                     first dim cut     replicated
    b_N       [N/x]         [N/y]         replicated            first dim cut     replicated
    Y_MN      [M, N/x]      [M, N/y]      replicated            other rows        other rows

One equation and collective a pass. `in` is the axis that shards K, `out` the axis that shards N:

    before     W  = all-gather over z (stored W)                       FSDP2, prefetched
    forward    Y  = all-reduce over in (X @ W.T) + b                   here
    dgrad      dX = all-reduce over out (dY @ W)                       here
    wgrad      dW = dY.T @ X; reduce-scatter over z, all-reduce over data      FSDP2, overlapped
    dbias      db = dY.sum(0); the same                                FSDP2, overlapped

Neither dW nor db has a collective over x or y: X is replicated over `out` and dY over `in`, so each
rank computes its own shard whole. The bias is added after the all-reduce, once.

Overlap in backward. Autograd's default order waits for the network; here wgrad runs at the same
time:

    without   compute   [dY @ W]                [dY.T @ X]
              network           [ all-reduce dX ]
    here      compute   [dY @ W][dY.T @ X]
              network           [ all-reduce dX ]

Layers that read the same input (q, k, v; gate, up) form a group: one forward all-reduce of their
outputs, concatenated, and one backward all-reduce of the sum of their dX. The model's code belongs
to transformers and calls the layers one by one, so a group keeps state between calls: the first
call computes the outputs of all its layers, and each later call returns the stored output.

Source of the algorithm: AxoNN (arXiv 2305.13525), with z left to FSDP2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from memguard.parallel.collectives import (
    all_reduce,
    gather_from_axis,
    start_all_reduce,
    sum_over_axis,
    wait,
)
from memguard.parallel.mesh import Axis


def to_local(parameter: Tensor) -> Tensor:
    """Return this rank's piece of a parameter; gradients flow into the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class LinearGroup4D:
    """Linear layers that read the same input, computed together although called one by one.

    The layer that is called first computes the outputs of all layers. The others return theirs
    when called with the same tensor, in any order. A recomputed forward starts again.
    """

    def __init__(self, members: Sequence["Linear4D"]) -> None:
        """Group layers whose ``in_axis`` and ``out_axis`` are the same."""
        self.members = tuple(members)
        for member in self.members:
            member.group = self
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def take(self, member: "Linear4D", input_MK: Tensor) -> Tensor:
        """Return one member's output for this input, without its bias.

        Raises:
            RuntimeError: a different member was called with a different input in between.
        """
        number = next(i for i, layer in enumerate(self.members) if layer is member)
        if self._input is not input_MK and number in self._parts:
            raise RuntimeError(
                f"{len(self.members)} grouped linear layers must read the same input tensor; "
                f"layer {number} was called with a different one than the layer before it"
            )
        if number not in self._parts:
            weights = [to_local(layer.weight) for layer in self.members]
            outputs = linear_4d(input_MK, weights, member.in_axis, member.out_axis)
            self._input, self._parts = input_MK, dict(enumerate(outputs))
        part = self._parts.pop(number)
        if not self._parts:
            self._input = None
        return part


class Linear4D(nn.Linear):
    """A linear layer of a sharded model; `convert` turns an `nn.Linear` into one."""

    in_axis: Axis
    out_axis: Axis
    kv_replicas: Axis
    group: LinearGroup4D | None

    @staticmethod
    def convert(
        linear: nn.Module, *, in_axis: Axis, out_axis: Axis, kv_replicas: Axis | None = None
    ) -> "Linear4D":
        """Change the class of a linear layer in place; its parameters are sharded elsewhere.

        Args:
            linear: an ``nn.Linear``; keeps its parameters, their names and its hooks.
            in_axis: shards the in-features: y for a plain layer, x for a transposed one.
            out_axis: shards the out-features.
            kv_replicas: ranks that each store a part of one key/value head and gather all of it.
        """
        linear.__class__ = Linear4D
        assert isinstance(linear, Linear4D), "its class was just set"
        linear.in_axis, linear.out_axis, linear.group = in_axis, out_axis, None
        linear.kv_replicas = kv_replicas or Axis(name="x")
        return linear

    def forward(self, input: Tensor) -> Tensor:
        """Return the local output ``[..., N/out]`` of the local input ``[..., K/in]``."""
        if self.group is not None:
            output = self.group.take(self, input)
        else:
            weights = [to_local(self.weight)]
            (output,) = linear_4d(input, weights, self.in_axis, self.out_axis)
        if self.bias is not None:
            # After the all-reduce, so that the bias is added once.
            output = output + to_local(self.bias)
        return gather_from_axis(output, self.kv_replicas)

    def extra_repr(self) -> str:
        """Describe how the layer is sharded."""
        local = tuple(to_local(self.weight).shape)
        return f"{super().extra_repr()}, in/{self.in_axis.name}, out/{self.out_axis.name}, {local}"


def linear_4d(
    input_MK: Tensor, weights_NK: Sequence[Tensor], in_axis: Axis, out_axis: Axis
) -> tuple[Tensor, ...]:
    """Return ``input @ weight.T`` for each weight, summed over the in-axis.

    Args:
        input_MK: local input ``[..., K/in]``.
        weights_NK: local weights ``[N/out, K/in]`` of layers that share this input.
        in_axis: shards K.
        out_axis: shards N.
    """
    outputs: tuple[Tensor, ...] = _Linear.apply(input_MK, in_axis, out_axis, *weights_NK)  # type: ignore[no-untyped-call]
    if len(outputs) > 1:
        return outputs
    # Outside the autograd function: a recomputed block stops at the last tensor that backward
    # needs, so the last all-reduce of the block is not repeated.
    return (sum_over_axis(outputs[0], in_axis),)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input_MK: Tensor, in_axis: Axis, out_axis: Axis, *weights_NK: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(input_MK, *weights_NK)
        ctx.out_axis = out_axis
        outputs = [functional.linear(input_MK, weight) for weight in weights_NK]
        if in_axis.degree == 1 or len(outputs) == 1:
            return tuple(outputs)
        sizes = [weight.shape[0] for weight in weights_NK]
        return torch.split(all_reduce(torch.cat(outputs, -1), in_axis, owned=True), sizes, -1)

    @staticmethod
    def backward(ctx: Any, *grads_MN: Tensor) -> tuple[Tensor | None, ...]:
        input_MK, *weights_NK = ctx.saved_tensors
        grad_input: Tensor | None = None
        if ctx.needs_input_grad[0]:
            for grad_MN, weight in zip(grads_MN, weights_NK, strict=True):
                part = grad_MN @ weight
                grad_input = part if grad_input is None else grad_input.add_(part)
            assert grad_input is not None, "a group has at least one weight"
            grad_input = start_all_reduce(grad_input, ctx.out_axis, owned=True)
        # The weights' gradients are computed while the all-reduce runs.
        rows_MK = input_MK.reshape(-1, input_MK.shape[-1])
        grad_weights = [
            grad_MN.reshape(-1, grad_MN.shape[-1]).T @ rows_MK if needed else None
            for grad_MN, needed in zip(grads_MN, ctx.needs_input_grad[3:], strict=True)
        ]
        if grad_input is not None and ctx.out_axis.degree > 1:
            grad_input = wait(grad_input)
        return (grad_input, None, None, *grad_weights)
