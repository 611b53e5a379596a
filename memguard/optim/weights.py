"""Weights as an optimizer reads and writes them: in fp32, whatever they are stored in.

    fp32    written as they are
    bf16    x -> one of the two neighbours of x in bf16, the upper one with a probability of
            (x - lower) / (upper - lower), so that the mean is x

Rounded to the nearest, updates smaller than half the distance of two neighbours, 1/256 of a weight,
would be lost in every step. The random bits of a weight are the same on every mesh (`noise`), so
that equal updates give equal weights.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from memguard.optim.noise import as_rows, draw_bits
from memguard.parallel.local_parameters import LocalParameter
from memguard.seeds import derive_seed

_PART_ELEMENTS = 1 << 20
_GPU_PARTS = 4
"""Parts that a GPU takes at once: it starts some sixty kernels for one."""


class Weights:
    """Reads and writes the weights of the local tensors, some rows at a time.

    Rows are those of `as_rows`, which serves for gradients and moments too.
    """

    def __init__(self, seed: int) -> None:
        """Keep the run's seed, from which the rounding follows."""
        self._seed = seed

    def parts(self, parameter: LocalParameter) -> Iterator[slice]:
        """Yield all rows of the local tensor in parts of bounded size, or of one row."""
        rows = as_rows(parameter.local)
        largest = _PART_ELEMENTS * (_GPU_PARTS if rows.is_cuda else 1)
        size = max(1, largest // max(1, math.prod(rows.shape[1:])))
        for start in range(0, len(rows) if rows.numel() else 0, size):
            yield slice(start, min(start + size, len(rows)))

    def read(self, parameter: LocalParameter, rows: slice) -> Tensor:
        """Return some rows in fp32, or in float64 as they are; the live rows unless in bf16."""
        part = as_rows(parameter.local.detach())[rows]
        return part.float() if part.dtype == torch.bfloat16 else part

    def write(self, parameter: LocalParameter, rows: slice, value: Tensor, *, step: int) -> None:
        """Write some rows after the update of ``step``, which are rounded if stored in bf16."""
        part = as_rows(parameter.local.detach())[rows]
        if part.dtype == torch.bfloat16:
            key = derive_seed(self._seed, f"rounding {parameter.name}", step)
            value = round_to_bf16(value, draw_bits(parameter, key, rows))
        part.copy_(value)


def round_to_bf16(value: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 numbers stochastically, by the lower 16 of the random bits.

    bf16 is the upper half of fp32: a carry out of the lower half leads to the next number, beyond
    the largest one to infinity. Infinity stays, as NaN does, which a carry could change.
    """
    rounded = ((value.view(torch.int32) + (bits & 0xFFFF)) & -0x10000).view(torch.float32)
    return torch.where(value.isnan(), value, rounded).bfloat16()
