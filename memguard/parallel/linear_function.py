"""Products of linear layers over y and x, with shared and overlapped collectives.

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

A layer may have a low-rank adapter (`lora`) of rank R; W is then frozen and has no wgrad:

    A_RK       [R, K/in]     replicated over `out`         D: dropout mask, 1 if kept
    B_NR       [N/out, R]    replicated over `in`          s: scale / (1 - rate)

    forward    Y  = all-reduce over in (X @ W.T + s H @ B.T) + b       H = (D * X) @ A.T
    dgrad      dX = all-reduce over out (dY @ W + D * (G @ A))         G = s dY @ B
    dA         G.T @ (D * X)      partial over `out`, summed once a step (`lora`)
    dB         s dY.T @ H         partial over `in`, the same

H and G are partial sums too, so the adapter adds no collective of the size of an activation. The
frozen W may be in NF4 (`nf4`) if y = x = 1: forward and dgrad each dequantise it, so that the
weights of one layer at a time are dense.

Layers that read the same input share one forward all-reduce of their outputs, concatenated, and one
backward all-reduce of the sum of their dX.

Overlap in backward. Autograd's default order waits for the network; here wgrad runs at the same
time:

    without   compute   [dY @ W]                [dY.T @ X]
              network           [ all-reduce dX ]
    here      compute   [dY @ W][dY.T @ X]
              network           [ all-reduce dX ]

Source of the algorithm: AxoNN (arXiv 2305.13525), with z left to FSDP2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from memguard.parallel.collectives import (
    all_reduce,
    can_overwrite,
    start_all_reduce,
    sum_over_axis,
    wait,
)
from memguard.parallel.mesh import Axis
from memguard.parallel.nf4 import Nf4Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """The adapter of one layer for one input."""

    A_RK: Tensor
    """Local, in the dtype of the weight."""
    B_NR: Tensor
    scale: float
    mask_MK: Tensor | None = None
    """False for dropped features of the input; None without dropout."""


def linear_4d(
    input_MK: Tensor,
    weights_NK: Sequence[Tensor | Nf4Weight],
    in_axis: Axis,
    out_axis: Axis,
    adapters: Sequence[LowRank | None] = (),
) -> tuple[Tensor, ...]:
    """Return ``input @ weight.T`` for each weight, summed over the in-axis.

    Args:
        input_MK: local input ``[..., K/in]``.
        weights_NK: local weights ``[N/out, K/in]`` of layers that share this input; frozen if they
            are in NF4.
        in_axis: shards K.
        out_axis: shards N.
        adapters: of each weight; empty without adapters.
    """
    scales: tuple[float | None, ...] = ()
    factors: list[Tensor | None] = []
    if any(adapters):
        scales = tuple(None if adapter is None else adapter.scale for adapter in adapters)
        for adapter in adapters:
            if adapter is None:
                factors += [None, None, None]
            else:
                factors += [adapter.A_RK, adapter.B_NR, adapter.mask_MK]
    outputs: tuple[Tensor, ...] = _Linear.apply(  # type: ignore[no-untyped-call]
        input_MK, in_axis, out_axis, scales, *weights_NK, *factors
    )
    if len(outputs) > 1:
        return outputs
    # Outside the autograd function: a recomputed block stops at the last tensor that backward
    # needs, so the last all-reduce of the block is not repeated.
    return (sum_over_axis(outputs[0], in_axis),)


class _Linear(torch.autograd.Function):
    """Inputs: X, axes, scales, all weights, then A, B and mask of each weight if there are scales.

    Rows are flattened for products with factors, so that sums can be added in place.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        # Parameters that are named would be as many as the inputs of a group of two layers, from
        # which the compiler concludes without gradients that `forward` has no `ctx`.
        input_MK, in_axis, out_axis, scales, *tensors = inputs
        num_weights = len(scales) or len(tensors)
        weights_NK, factors = tensors[:num_weights], tensors[num_weights:]
        outputs, hidden = [], []
        for number, weight in enumerate(weights_NK):
            output = functional.linear(input_MK, dense(weight, input_MK.dtype))
            if scales and (scale := scales[number]) is not None:
                A_RK, B_NR, mask_MK = factors[3 * number : 3 * number + 3]
                assert A_RK is not None, "a scale belongs to two factors"
                assert B_NR is not None, "a scale belongs to two factors"
                hidden_MR = functional.linear(_masked(input_MK, mask_MK), A_RK)
                output = _add_product(output, hidden_MR, B_NR.T, scale)
                hidden.append(hidden_MR)
            outputs.append(output)
        ctx.out_axis, ctx.scales, ctx.num_weights = out_axis, scales, num_weights
        # A frozen layer without an adapter does not need its input in backward.
        keeps_input = any(ctx.needs_input_grad[4:])
        # Not the dense weights: those of all layers would be in memory until backward.
        ctx.quantised = [w if isinstance(w, Nf4Weight) else None for w in weights_NK]
        saved = [None if isinstance(w, Nf4Weight) else w for w in weights_NK]
        ctx.save_for_backward(input_MK if keeps_input else None, *saved, *factors, *hidden)
        if in_axis.degree == 1 or len(outputs) == 1:
            return tuple(outputs)
        sizes = [output.shape[-1] for output in outputs]
        return torch.split(all_reduce(torch.cat(outputs, -1), in_axis, owned=True), sizes, -1)

    @staticmethod
    def backward(ctx: Any, *grads_MN: Tensor) -> tuple[Tensor | None, ...]:
        input_MK, *saved = ctx.saved_tensors
        weights_NK, rest = saved[: ctx.num_weights], saved[ctx.num_weights :]
        factors, hidden = rest[: 3 * len(ctx.scales)], iter(rest[3 * len(ctx.scales) :])
        # s dY @ B of each layer with an adapter.
        inner = {
            number: grads_MN[number] @ (factors[3 * number + 1] * scale)
            for number, scale in enumerate(ctx.scales)
            if scale is not None
        }
        grad_input: Tensor | None = None
        if ctx.needs_input_grad[0]:
            for number, (grad_MN, weight) in enumerate(zip(grads_MN, weights_NK, strict=True)):
                if (quantised := ctx.quantised[number]) is not None:
                    weight = quantised.dequantise(grad_MN.dtype, in_backward=True)
                part = grad_MN @ weight
                if number in inner:
                    A_RK, _, mask_MK = factors[3 * number : 3 * number + 3]
                    if mask_MK is None:
                        part = _add_product(part, inner[number], A_RK)
                    else:
                        part = part.add_((inner[number] @ A_RK).mul_(mask_MK))
                grad_input = part if grad_input is None else grad_input.add_(part)
            assert grad_input is not None, "a group has at least one weight"
            grad_input = start_all_reduce(grad_input, ctx.out_axis, owned=True)
        # The weights' gradients are computed while the all-reduce runs.
        grad_weights = [
            _weight_gradient(grad_MN, input_MK, weight) if needed else None
            for grad_MN, weight, needed in zip(
                grads_MN, weights_NK, ctx.needs_input_grad[4 : 4 + ctx.num_weights], strict=True
            )
        ]
        grad_factors: list[Tensor | None] = []
        for number, scale in enumerate(ctx.scales):
            if scale is None:
                grad_factors += [None, None, None]
                continue
            dropped_MK = _masked(input_MK, factors[3 * number + 2])
            grad_A = _rows(inner[number]).T @ _rows(dropped_MK)
            grad_B = (_rows(grads_MN[number]).T @ _rows(next(hidden))).mul_(scale)
            grad_factors += [grad_A, grad_B, None]
        if grad_input is not None and ctx.out_axis.degree > 1:
            grad_input = wait(grad_input)
        return (grad_input, None, None, None, *grad_weights, *grad_factors)


def dense(weight_NK: Tensor | Nf4Weight, dtype: torch.dtype) -> Tensor:
    """Return a weight for arithmetic in ``dtype``; only weights in NF4 are converted."""
    return weight_NK.dequantise(dtype) if isinstance(weight_NK, Nf4Weight) else weight_NK


def _weight_gradient(grad_MN: Tensor, input_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return ``dY.T @ X`` in the layout of the weight, so that no later copy changes it."""
    if weight_NK.is_contiguous():
        return _rows(grad_MN).T @ _rows(input_MK)
    return (_rows(input_MK).T @ _rows(grad_MN)).T


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _masked(input_MK: Tensor, mask_MK: Tensor | None) -> Tensor:
    return input_MK if mask_MK is None else input_MK * mask_MK


def _add_product(sum_MN: Tensor, left_MR: Tensor, right_RN: Tensor, scale: float = 1.0) -> Tensor:
    """Return ``sum + scale * left @ right``, in place where nothing records operations."""
    if can_overwrite():
        _rows(sum_MN).addmm_(_rows(left_MR), right_RN, alpha=scale)
        return sum_MN
    # Selective checkpointing keeps the results of mm and addmm. It has kept the sum already, and
    # with a small R the product costs little to compute again.
    added_MN = torch.addbmm(_rows(sum_MN), _rows(left_MR)[None], right_RN[None], alpha=scale)
    return added_MN.view(sum_MN.shape)
