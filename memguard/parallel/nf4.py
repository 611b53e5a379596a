"""Frozen weights in 4-bit NormalFloat (NF4), quantised and dequantised by bitsandbytes.

    W [N, K]  ->  packed [N K / 2] uint8    two weights a byte: index into the 16 values of NF4
                  scales [N K / 64] fp32    largest absolute value of each 64 weights, in row-major
                                            order; the last block may be shorter

    dequantised  W = value[index] * scale, in fp32, then rounded once to the dtype of the
                 arithmetic, one layer at a time; no gradient

A weight takes 4 + 32 / 64 = 4.5 bits; scales are not quantised again (`bnb_4bit_use_double_quant`).
The layers of bitsandbytes are not used: on CPUs with AVX512-BF16 they repack the weights in
evaluation mode, for kernels with bf16 arithmetic.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCK = 64
"""Weights with a common scale."""


def quantise_nf4(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed weights, ``[ceil(N K / 2)]``, and the scales, ``[ceil(N K / 64)]``."""
    from bitsandbytes.functional import quantize_4bit  # Takes seconds to import.

    packed, state = quantize_4bit(
        weight_NK.detach().contiguous(),
        blocksize=BLOCK,
        compress_statistics=False,
        quant_type="nf4",
    )
    return packed.reshape(-1), state.absmax


def dequantise_nf4(packed: Tensor, scales: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the weights ``[N, K]`` in fp32."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    # As one row: the kernel for CPUs with AVX-512 (bitsandbytes 0.50) takes the scales of other
    # blocks if the length of a row is not a multiple of a block.
    state = QuantState(
        absmax=scales,
        shape=(1, shape[0] * shape[1]),
        dtype=torch.float32,
        blocksize=BLOCK,
        quant_type="nf4",
    )
    weights: Tensor = dequantize_4bit(packed.reshape(-1, 1), state)
    return weights.reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Nf4Weight:
    """The quantised weight of one layer."""

    packed: Tensor
    scales: Tensor
    shape: tuple[int, int]

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Return the weight ``[N, K]``."""
        return dequantise_nf4(self.packed, self.scales, self.shape).to(dtype)


class Nf4Linear(nn.Module):
    """A linear layer with a frozen NF4 weight, for models that are not trained."""

    packed: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        """Quantise the weight of a layer, on the layer's device."""
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        packed, scales = quantise_nf4(layer.weight)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """Return ``[..., N]`` of an input ``[..., K]``."""
        shape = (self.out_features, self.in_features)
        weight_NK = dequantise_nf4(self.packed, self.scales, shape)
        return functional.linear(input, weight_NK.to(input.dtype), self.bias)


def list_quantised(model: Any) -> dict[str, nn.Linear]:
    """Return the layers whose weights are quantised, by name: all linear ones but the head."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
