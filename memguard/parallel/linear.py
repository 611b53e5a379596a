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

A layer may have a low-rank adapter (`lora`) of rank R; W is then frozen and has no wgrad:

    A_RK       [R, K/in]     replicated over `out`         D: dropout mask, 1 if kept
    B_NR       [N/out, R]    replicated over `in`          s: scale / (1 - rate)
    m_N        [N/out]       as b_N; only of DoRA

    forward    Y  = all-reduce over in (X @ W.T + s H @ B.T) + b       H = (D * X) @ A.T
    dgrad      dX = all-reduce over out (dY @ W + D * (G @ A))         G = s dY @ B
    dA         G.T @ (D * X)      partial over `out`, summed once a step (`lora`)
    dB         s dY.T @ H         partial over `in`, the same

The frozen W may be in NF4 (`nf4`) if y = x = 1: its blocks are cut and gathered over z instead of
its rows, and forward and dgrad each dequantise it, so that the weights of one layer at a time are
dense.

H and G are partial sums too, so the adapter adds no collective of the size of an activation. With
DoRA the sum is multiplied before the bias is added; the norm is a constant for the gradients:

    n  = norms of the rows of W + s B A         one all-reduce over in of [N/out] squares
    Y  = m / n * all-reduce over in (...) + b

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

A layer whose output is several projections (`fused`) is one layer here. A weight that is stored as
[K, N] (GPT-2's Conv1D) is read as a transposed view, and its gradient is computed in that layout.

Source of the algorithm: AxoNN (arXiv 2305.13525), with z left to FSDP2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from memguard.parallel.collectives import (
    all_reduce,
    can_overwrite,
    gather_from_axis,
    start_all_reduce,
    sum_over_axis,
    wait,
)
from memguard.parallel.fused import Parts
from memguard.parallel.mesh import Axis
from memguard.parallel.nf4 import BLOCK, Nf4Weight, count_blocks, quantise_nf4


def to_local(parameter: Tensor) -> Tensor:
    """Return this rank's piece of a parameter; gradients flow into the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """The adapter of one layer for one input."""

    A_RK: Tensor
    """Local, in the dtype of the weight."""
    B_NR: Tensor
    scale: float
    mask_MK: Tensor | None = None
    """False for dropped features of the input; None without dropout."""


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
            weights = [layer.stored_weight() for layer in self.members]
            adapters = [layer.low_rank(input_MK) for layer in self.members]
            outputs = linear_4d(input_MK, weights, member.in_axis, member.out_axis, adapters)
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
    parts: Parts | None
    """Of an output that is several projections; None for one projection."""
    stores_in_out: bool
    """Whether the weight is stored as ``[K, N]``."""
    group: LinearGroup4D | None
    lora_A: Any
    lora_B: Any
    lora_magnitude_vector: Any
    lora_scale: float | None
    """Scale of the adapter in ``lora_A`` and ``lora_B``; None without an adapter."""
    lora_dropout_rate: float
    packed: Tensor
    scales: Tensor
    """Parameters of a layer in NF4, whose ``weight`` is no parameter and on the meta device: shape
    and dtype only. The scales are stored as the bits of int32, which FSDP2 never casts."""
    draw_mask: Callable[[Tensor], Tensor] | None
    """Returns the dropout mask of an input in training; None without dropout."""

    @staticmethod
    def convert(
        linear: nn.Module,
        *,
        in_axis: Axis,
        out_axis: Axis,
        kv_replicas: Axis | None = None,
        parts: Parts | None = None,
    ) -> "Linear4D":
        """Change the class of a linear layer in place; its parameters are sharded elsewhere.

        Args:
            linear: an ``nn.Linear`` or transformers' ``Conv1D``; keeps its parameters, their names
                and its hooks.
            in_axis: shards the in-features: y for a plain layer, x for a transposed one.
            out_axis: shards the out-features.
            kv_replicas: ranks that each store a part of one key/value head and gather all of it.
            parts: of an output that is several projections.
        """
        conv: Any = linear if isinstance(linear, Conv1D) else None
        linear.__class__ = Linear4D
        assert isinstance(linear, Linear4D), "its class was just set"
        linear.stores_in_out = conv is not None
        if conv is not None:
            linear.in_features, linear.out_features = conv.nx, conv.nf
        linear.in_axis, linear.out_axis, linear.group = in_axis, out_axis, None
        linear.kv_replicas = kv_replicas or Axis(name="x")
        linear.parts = parts
        linear.lora_scale = linear.draw_mask = None
        return linear

    def use_nf4(self) -> None:
        """Freeze the weight and store it in NF4; `fill_nf4` sets the values."""
        device, dtype = self.weight.device, self.weight.dtype
        shape = (self.out_features, self.in_features)
        assert to_local(self.weight).shape == shape, "a weight in NF4 is not split over y and x"
        num_blocks = count_blocks(self.weight.numel())
        del self.weight
        self.weight = torch.empty(shape, dtype=dtype, device="meta")
        for name, size, kind in (
            ("packed", (num_blocks, BLOCK // 2), torch.uint8),
            ("scales", (num_blocks,), torch.int32),
        ):
            stored = torch.empty(size, dtype=kind, device=device)
            self.register_parameter(name, nn.Parameter(stored, requires_grad=False))

    @torch.no_grad()
    def fill_nf4(self, weights: Tensor) -> None:
        """Set the values of the blocks that this rank stores.

        Args:
            weights: of these blocks, or the whole weight where all blocks are stored.
        """
        packed, scales = quantise_nf4(weights.to(self.device))
        to_local(self.packed).copy_(packed)
        to_local(self.scales).copy_(scales.view(torch.int32))

    @property
    def device(self) -> torch.device:
        """Device on which the layer computes."""
        return self.packed.device if self.is_quantised else self.weight.device

    @property
    def is_quantised(self) -> bool:
        """Whether the weight is in NF4."""
        return "packed" in self._parameters

    def stored_weight(self) -> Tensor | Nf4Weight:
        """Return the local weight as it is stored; in NF4 it is whole only if gathered over z."""
        if self.is_quantised:
            scales = to_local(self.scales).view(torch.float32)
            return Nf4Weight(to_local(self.packed), scales, (self.out_features, self.in_features))
        weight = to_local(self.weight)
        return weight.T if self.stores_in_out else weight

    def forward(self, input: Tensor) -> Tensor:
        """Return the local output ``[..., N/out]`` of the local input ``[..., K/in]``."""
        if self.group is not None:
            output = self.group.take(self, input)
        else:
            weights, adapters = [self.stored_weight()], [self.low_rank(input)]
            (output,) = linear_4d(input, weights, self.in_axis, self.out_axis, adapters)
        if hasattr(self, "lora_magnitude_vector"):
            output = output * self._scale_rows().to(output.dtype)
        if self.bias is not None:
            # After the all-reduce, so that the bias is added once.
            output = output + to_local(self.bias)
        if self.parts is None or self.kv_replicas.degree == 1:
            return gather_from_axis(output, self.kv_replicas)
        sizes = list(self.parts.local_sizes(self.out_axis.degree))
        pieces = torch.split(output, sizes, -1)
        return torch.cat(
            [
                gather_from_axis(piece, self.kv_replicas)
                if number in self.parts.key_value
                else piece
                for number, piece in enumerate(pieces)
            ],
            -1,
        )

    def low_rank(self, input_MK: Tensor) -> LowRank | None:
        """Return the adapter as it is applied to this input; None without an adapter."""
        if self.lora_scale is None:
            return None
        A_RK, B_NR = (to_local(factor.weight) for factor in (self.lora_A, self.lora_B))
        mask_MK, scale = None, self.lora_scale
        if self.draw_mask is not None and self.training:
            mask_MK, scale = self.draw_mask(input_MK), scale / (1 - self.lora_dropout_rate)
        return LowRank(
            A_RK=A_RK.to(input_MK.dtype),
            B_NR=B_NR.to(input_MK.dtype),
            scale=scale,
            mask_MK=mask_MK,
        )

    def _scale_rows(self) -> Tensor:
        """Return DoRA's factor of each row, ``[N/out]``, in the dtype of the adapter."""
        assert self.lora_scale is not None, "a magnitude belongs to two factors"
        magnitude_N, A_RK, B_NR = (
            to_local(part.weight) for part in (self.lora_magnitude_vector, self.lora_A, self.lora_B)
        )
        with torch.no_grad():
            weight_NK = _dense(self.stored_weight(), A_RK.dtype).to(A_RK.dtype)
            scaled_NR = B_NR * self.lora_scale
            # |W|^2 + 2 W.(sBA) + |sBA|^2 of each row: no product has the size of the weight, which
            # selective checkpointing would keep.
            squares_N = weight_NK.norm(dim=1).square()
            cross_NR = 2 * (weight_NK @ A_RK.T) + scaled_NR @ (A_RK @ A_RK.T)
            squares_N = squares_N + (cross_NR * scaled_NR).sum(1)
            squares_N = all_reduce(squares_N, self.in_axis)
        return magnitude_N / squares_N.sqrt()

    def extra_repr(self) -> str:
        """Describe how the layer is sharded."""
        local = tuple(to_local(self.weight).shape)
        return f"{super().extra_repr()}, in/{self.in_axis.name}, out/{self.out_axis.name}, {local}"


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
    def forward(
        ctx: Any,
        input_MK: Tensor,
        in_axis: Axis,
        out_axis: Axis,
        scales: tuple[float | None, ...],
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        num_weights = len(scales) or len(tensors)
        weights_NK, factors = tensors[:num_weights], tensors[num_weights:]
        outputs, hidden = [], []
        for number, weight in enumerate(weights_NK):
            output = functional.linear(input_MK, _dense(weight, input_MK.dtype))
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
                part = grad_MN @ _dense(ctx.quantised[number] or weight, grad_MN.dtype)
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


def _dense(weight_NK: Tensor | Nf4Weight, dtype: torch.dtype) -> Tensor:
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
