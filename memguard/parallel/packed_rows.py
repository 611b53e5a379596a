"""Where the documents of packed rows begin, as attention kernels need it.

    rows of T = 4     a a a d        documents of the flattened rows    a a a|d|b b c c
                      b b c c        cu_seqlens                         0     3 4   6   8
                                     first key of each query            0 0 0 3
                                                                        0 0 2 2

A query at t sees the keys from the first key to t; a sliding window of W moves the first key to at
least t - W + 1. Padding is a document of its own. Nothing here reads a value back from a GPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """The documents of some rows, which are flattened into one sequence of B T tokens."""

    cu_seqlens: Tensor
    """[documents + 1] int32, on the device of the model: start of each document, then B T."""
    max_seqlen: int
    """Length of the longest document (tokens)."""

    @classmethod
    def of_equal_documents(
        cls, num_documents: int, num_tokens: int, *, device: torch.device
    ) -> "Packing":
        """Return the packing of documents of equal length, such as rows of one document each."""
        ends = torch.arange(num_documents + 1, dtype=torch.int32, device=device)
        return cls(cu_seqlens=ends * num_tokens, max_seqlen=num_tokens)


def find_first_keys(
    cu_seqlens: Tensor, num_rows: int, num_tokens: int, window: int | None = None
) -> Tensor:
    """Return ``[B, T]`` int32: the first token of its row that each token sees.

    Args:
        cu_seqlens: ends of documents in the flattened rows, see `Packing`.
        num_rows: B.
        num_tokens: T.
        window: tokens that a sliding window shows, the query included; None: no window.
    """
    tokens = torch.arange(num_rows * num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    column_BT = tokens.view(num_rows, num_tokens) % num_tokens
    first_BT = column_BT - (tokens - cu_seqlens[document]).view(num_rows, num_tokens)
    return first_BT if window is None else torch.maximum(first_BT, column_BT - (window - 1))


def make_dense_mask(first_BT: Tensor) -> Tensor:
    """Return ``[B, 1, T, T]``, True where a query sees a key, for kernels that need a mask."""
    column = torch.arange(first_BT.shape[1], device=first_BT.device)
    seen_BTT = (column >= first_BT[:, :, None]) & (column <= column[:, None])
    return seen_BTT[:, None]
