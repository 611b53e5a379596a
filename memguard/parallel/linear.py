"""Linear layers of a sharded model, alone and in groups.

A *plain* layer (q, k, v, gate, up, head) shards its in-features K over the axis `in` = y and its
out-features N over `out` = x; in a *transposed* layer (o, down), `in` is x and `out` is y.
`linear_function` has the equations of their products. A layer has these parameters:

    weight_NK       [N/out, K/in]     or [K, N] as GPT-2's Conv1D stores it, read as a transposed
                                      view; its gradient is computed in that layout
    bias_N          [N/out]           added after the all-reduce, once
    packed, scales                    instead of the weight: frozen, in NF4 (`nf4`), if y = x = 1
    lora_A, lora_B  [R, K], [N, R]    an adapter (`lora`); the weight is then frozen
    lora_magnitude  [N/out]           of DoRA

With DoRA the sum over `in` is multiplied before the bias is added; the norm is a constant for the
gradients:

    n  = norms of the rows of W + s B A         one all-reduce over in of [N/out] squares
    Y  = m / n * all-reduce over in (...) + b

Layers that read the same input (q, k, v; gate, up) form a group, whose products share collectives.
The model's code belongs to transformers and calls the layers one by one, so a group keeps state
between calls: the first call computes the outputs of all its layers, and each later call returns
the stored output. A layer whose output is several projections (`fused`) is one layer here.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from memguard.parallel.collectives import all_reduce, gather_from_axis
from memguard.parallel.fused import FeatureOrder, Parts
from memguard.parallel.linear_function import LowRank, dense, linear_4d
from memguard.parallel.mesh import Axis
from memguard.parallel.nf4 import BLOCK, Nf4Weight, count_blocks, quantise_nf4


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
        """Set the values of the blocks that this rank stores, from these or the whole weight."""
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

    def find_order(self, leaf: str) -> FeatureOrder | None:
        """Return the order of a parameter's features if it is not that of files."""
        # An adapter's first factor has no out-features.
        if self.parts is None or leaf == "lora_A.weight":
            return None
        dim = 1 if self.stores_in_out and leaf == "weight" else 0
        return self.parts.order(self.out_axis.degree, dim)

    def low_rank(self, input_MK: Tensor) -> LowRank | None:
        """Return the adapter as it is applied to this input; None without an adapter."""
        if self.lora_scale is None:
            return None
        A_RK, B_NR = (to_local(factor.weight) for factor in (self.lora_A, self.lora_B))
        mask_MK, scale = None, self.lora_scale
        if self.draw_mask is not None and self.training:
            mask_MK, scale = self.draw_mask(input_MK), scale / (1 - self.lora_dropout_rate)
        return LowRank(
            A_RK=A_RK.to(input_MK.dtype), B_NR=B_NR.to(input_MK.dtype), scale=scale, mask_MK=mask_MK
        )

    def _scale_rows(self) -> Tensor:
        """Return DoRA's factor of each row, ``[N/out]``, in the dtype of the adapter."""
        assert self.lora_scale is not None, "a magnitude belongs to two factors"
        magnitude_N, A_RK, B_NR = (
            to_local(part.weight) for part in (self.lora_magnitude_vector, self.lora_A, self.lora_B)
        )
        with torch.no_grad():
            weight_NK = dense(self.stored_weight(), A_RK.dtype).to(A_RK.dtype)
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


@torch.no_grad()
def is_linear(module: nn.Module) -> bool:
    """Whether an unsharded module computes ``input @ weight.T + bias``; of a subclass, by a run."""
    forward = type(module).forward
    if forward in (nn.Linear.forward, Linear4D.forward, Conv1D.forward):
        return True
    if not isinstance(module, nn.Linear):
        return False
    probe: Any = copy.copy(module)
    generator = torch.Generator().manual_seed(0)
    weight_NK, bias_N, input_MK = (
        torch.randn(*shape, generator=generator) for shape in ((3, 4), (3,), (2, 4))
    )
    probe._parameters = {"weight": nn.Parameter(weight_NK), "bias": nn.Parameter(bias_N)}
    expected_MN = functional.linear(input_MK, weight_NK, bias_N)
    return bool(torch.allclose(probe(input_MK), expected_MN, rtol=1e-4, atol=1e-5))


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is a `Conv1D`, sharded or not, whose weight is [in, out]."""
    return isinstance(module, Conv1D) or (isinstance(module, Linear4D) and module.stores_in_out)
