"""Frozen weights in 4-bit NormalFloat (NF4), quantised and dequantised by bitsandbytes.

                                                                      over z     over y, x
    W [N, K]  ->  packed [B, 32] uint8   two weights a byte: index    B cut      not split
                                         into the 16 values of NF4
                  scales [B] fp32        largest absolute value of    B cut      not split
                                         each block

Block b has the weights 64 b to 64 b + 63 of W in row-major order, B = ceil(N K / 64), whatever the
length of a row; the last block is filled up with zeros. Blocks are quantised one by one, so that a
rank reads and quantises those that it stores. One equation a pass:

    before     packed, scales = all-gather over z         FSDP2, with the other weights of a unit
    forward    W = value[index] * scale, in fp32, rounded once to the dtype of the arithmetic as
               it is written: in bf16 2.6 bytes a weight are moved
    dgrad      the same again
    wgrad      none: W is frozen

Both are gathered in NF4; the dense weight of one layer exists at a time. A weight takes
4 + 32 / 64 = 4.5 bits, divided by z on each rank; scales are not quantised again
(`bnb_4bit_use_double_quant`). The layers of bitsandbytes are not used: on CPUs with AVX512-BF16
they repack the weights in evaluation mode, for kernels with bf16 arithmetic.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memguard.errors import ModelError

BLOCK = 64
"""Weights with a common scale."""
_PART = 2**24
"""Weights that are in fp32 at a time, while they are quantised: 64 MiB."""


def count_blocks(num_weights: int) -> int:
    """Return the number of blocks of a tensor."""
    return -(-num_weights // BLOCK)


def quantise_nf4(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed weights ``[B, 32]`` and scales ``[B]`` of whole blocks.

    The weights, of any shape, begin with a block, and end with one or with the tensor.
    """
    from bitsandbytes.functional import quantize_4bit  # Takes seconds to import.

    packed, scales = [], []
    # In parts, so that little is in fp32 at a time.
    for part in torch.split(weights.detach().reshape(-1), _PART):
        flat = part.to(torch.float32)
        if missing := -len(flat) % BLOCK:  # Padding copies.
            flat = functional.pad(flat, (0, missing))
        values, state = quantize_4bit(
            flat, blocksize=BLOCK, compress_statistics=False, quant_type="nf4"
        )
        packed.append(values.reshape(-1, BLOCK // 2))
        scales.append(state.absmax)
    return torch.cat(packed), torch.cat(scales)


def dequantise_nf4(
    packed: Tensor,
    scales: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    in_backward: bool = False,
) -> Tensor:
    """Return the weights in this shape; zeros that fill up a block are left out.

    ``packed`` is ``[B, 32]``, ``scales`` is ``[B]``; products in fp32 are rounded to ``dtype``.
    In backward the call differs from that of forward: of two equal ones the compiler keeps the
    first one's result, the dense weight of every layer.
    """
    from bitsandbytes.functional import QuantState, dequantize_4bit

    # bitsandbytes rounds to bf16 as it writes; other dtypes are cast from fp32.
    written = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    # As one row: the kernel for CPUs with AVX-512 (bitsandbytes 0.50) takes the scales of other
    # blocks if the length of a row is not a multiple of a block.
    state = QuantState(
        absmax=scales,
        shape=(1, 1, len(scales) * BLOCK) if in_backward else (1, len(scales) * BLOCK),
        dtype=written,
        blocksize=BLOCK,
        quant_type="nf4",
    )
    weights: Tensor = dequantize_4bit(packed.reshape(-1, 1), state)
    return weights.reshape(-1)[: torch.Size(shape).numel()].reshape(shape).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Nf4Weight:
    """The quantised weight of one layer."""

    packed: Tensor
    scales: Tensor
    shape: tuple[int, int]

    def dequantise(self, dtype: torch.dtype, *, in_backward: bool = False) -> Tensor:
        """Return the weight ``[N, K]``."""
        return dequantise_nf4(self.packed, self.scales, self.shape, dtype, in_backward=in_backward)


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
        weight_NK = dequantise_nf4(self.packed, self.scales, shape, input.dtype)
        return functional.linear(input, weight_NK, self.bias)


def list_quantised(model: Any) -> dict[str, nn.Linear]:
    """Return the layers whose weights are quantised, by name: all linear ones but the head.

    Raises:
        ModelError: the layers already round their weights, as those of BitNet do.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelError(
            f"{type(model).__name__} cannot be quantised: its configuration has "
            "'quantization_config', so its layers already round their weights. Use its weights "
            "as they are"
        )
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
