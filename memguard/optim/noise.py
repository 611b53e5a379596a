"""Random bits of every element of a parameter, the same on every mesh.

    bits = hash(key, index of the element in the whole tensor, as files order it)

The index has two parts: the row, which is that of all dimensions but the last and may exceed 2^32,
and the column. A row's two words are made once; an element then takes two multiplications:

    a, b = SplitMix64(key + row * golden ratio)
    bits = xorshift((xorshift(column ^ a) * M1 + b) * M2)

Integers of torch wrap around as those of C do, on CPUs and GPUs, so that the bits are the same.
"""

import math

import torch
from torch import Tensor

from memguard.parallel.local_parameters import LocalParameter

_GOLDEN = 0x9E3779B97F4A7C15
_SPLITMIX = (0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)
_M1, _M2 = 0x7FEB352D, 0x846CA68B


def as_rows(tensor: Tensor) -> Tensor:
    """Return a local tensor with all dimensions but the last as one; a vector as it is."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor.view(-1)


def draw_bits(parameter: LocalParameter, key: int, rows: slice) -> Tensor:
    """Return 32 random bits for each element of some rows of the local tensor, as integers.

    Args:
        parameter: the tensor and its place in the whole one.
        key: 63 bits; another key gives independent bits.
        rows: rows of `as_rows` of the local tensor.
    """
    local = parameter.local
    row_R, column_C = find_place(parameter)
    if local.ndim > 1:
        row_R = row_R[rows]
    else:
        column_C = column_C[rows]
    word_R = row_R.to(local.device) * _signed(_GOLDEN, 64) + key
    for factor, shift in _SPLITMIX:
        word_R = (word_R ^ _shift(word_R, shift, 64)) * _signed(factor, 64)
    words_R2 = (word_R ^ _shift(word_R, 31, 64)).view(torch.int32).view(-1, 2)
    bits = column_C.to(local.device, torch.int32) ^ words_R2[:, :1]
    bits = (bits ^ _shift(bits, 16, 32)).mul_(_M1)
    bits = bits.bitwise_xor_(_shift(bits, 15, 32)).add_(words_R2[:, 1:]).mul_(_signed(_M2, 32))
    bits = bits.bitwise_xor_(_shift(bits, 16, 32))
    return bits if local.ndim > 1 else bits[0]


def find_place(parameter: LocalParameter) -> tuple[Tensor, Tensor]:
    """Return the rows and the columns of the whole tensor that the local one has, in its order.

    A tensor is cut, and its features are ordered, along each dimension on its own.
    """
    shape = parameter.local.shape or (1,)
    places = [torch.zeros(size, dtype=torch.int64) for size in shape]
    for piece in parameter.split():
        for place, here, start in zip(places, piece.slices, piece.start, strict=False):
            place[here] = torch.arange(start, start + here.stop - here.start)
    row_R = torch.zeros(1, dtype=torch.int64)
    for place, size in zip(places[:-1], parameter.source.shape, strict=False):
        row_R = (row_R[:, None] * size + place).flatten()
    assert len(row_R) * len(places[-1]) == math.prod(shape), "a row for each row of the tensor"
    return row_R, places[-1]


def _shift(bits: Tensor, by: int, width: int) -> Tensor:
    """Shift integers of ``width`` bits to the right, with zeros from the left."""
    return (bits >> by) & ((1 << (width - by)) - 1)


def _signed(value: int, width: int) -> int:
    """Return the signed integer of the same bits."""
    return value - (1 << width) if value >> (width - 1) else value
