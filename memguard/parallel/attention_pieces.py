"""Packed rows, and their causal attention in pieces, which skips masked query-key pairs.

    scores of T queries and T keys      k k . .      Q_THd, K_THd, V_THd, bias_TT
    in n pieces of C = T/n queries      k k . .      . = -inf for every query of the piece
                                        k k k k
                                        k k k k
    piece i     softmax(Q_C K^T + bias) V  over keys 0 .. (i+1) C only       (n+1) / 2n of the work

Rows that hold one document each need no bias, and torch's kernels skip the keys above the diagonal.
With a bias, which separates documents, torch computes all pairs. Heads are local: no collective.

Where the documents of packed rows begin, as attention kernels need it:

    rows of T = 4     a a a d        documents of the flattened rows    a a a|d|b b c c
                      b b c c        cu_seqlens                         0     3 4   6   8
                                     first key of each query            0 0 0 3
                                                                        0 0 2 2

A query at t sees the keys from the first key to t; a sliding window of W moves the first key to at
least t - W + 1. Padding is a document of its own. Nothing of it reads a value back from a GPU.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_MAX_PIECES = 8
# Below these lengths, launching another kernel costs more than computing the masked pairs.
MIN_PIECE = {"cpu": 128}
_MIN_PIECE_ELSEWHERE = 512
UNSUPPORTED = ("position_bias", "cache", "softcap")
"""Optional attention arguments that neither pieces nor varlen attention support."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


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


def attend_in_pieces(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention output ``[B, T, H, d]``; implements transformers' attention interface.

    Args:
        module: the attention layer.
        query: ``[B, H, T, d]``.
        key: ``[B, H/groups, T, d]``.
        value: as ``key``.
        attention_mask: causal ``[B, 1, T, T]``. Without a mask, or with fewer queries than keys,
            transformers' SDPA attention runs instead.
        dropout: dropout probability of the attention weights.
        scaling: factor of the scores; None uses 1/sqrt(d).
        kwargs: passed to transformers' SDPA attention if it runs.
    """
    num_tokens = query.shape[2]
    size = _piece_tokens(num_tokens, query.device.type)
    whole = (
        attention_mask is None
        or attention_mask.shape[-2:] != (num_tokens, num_tokens)
        or key.shape[2] != num_tokens
        or size >= num_tokens
        # Lengths change from step to step, and each would trigger a recompilation.
        or torch.compiler.is_compiling()
        or any(kwargs.get(name) is not None for name in UNSUPPORTED)
    )
    if whole:
        return attend_whole(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    assert attention_mask is not None, "checked above"
    # Torch's attention casts by itself, but would do so once per piece.
    query, key, value = cast_for_attention(query, key, value)
    key, value = repeat_heads(query, key, value)
    pieces = [
        functional.scaled_dot_product_attention(
            query[:, :, start : start + size],
            key[:, :, : start + size],
            value[:, :, : start + size],
            attn_mask=attention_mask[:, :, start : start + size, : start + size],
            dropout_p=dropout,
            scale=scaling,
        ).transpose(1, 2)
        for start in range(0, num_tokens, size)
    ]
    return torch.cat(pieces, dim=1), None


def attend_whole(
    module: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run transformers' SDPA attention, in fp32 on CUDA with keys and values of every head.

    CUDA's fused kernels take grouped heads in half precision only; torch would compute all scores,
    T x T a head. With a mask transformers repeats keys itself.
    """
    dtype = attention_dtype(query.dtype, query.device.type)
    is_wide = query.device.type == "cuda" and dtype.itemsize >= torch.float32.itemsize
    if is_wide and attention_mask is None and kwargs.get("cache") is None:
        key, value = repeat_heads(query, key, value)
        if kwargs.get("is_causal") is None:
            kwargs["is_causal"] = getattr(module, "is_causal", True)
        module = None  # Its number of groups is not that of these keys.
    attended, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, **kwargs
    )
    return attended, None


def repeat_heads(query: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return keys and values ``[B, H, T, d]``, repeated for the heads that share them."""
    groups = query.shape[1] // tensors[0].shape[1]
    return tuple(each if groups == 1 else each.repeat_interleave(groups, 1) for each in tensors)


def _piece_tokens(num_tokens: int, device_type: str) -> int:
    """Return C: at most eight pieces, none too short; a multiple of 128 for kernel efficiency."""
    shortest = MIN_PIECE.get(device_type, _MIN_PIECE_ELSEWHERE)
    return max(shortest, -(-num_tokens // (_MAX_PIECES * 128)) * 128)


class SharedBias:
    """A forward pre-hook that replaces each block's boolean mask by one shared additive bias.

        mask_B1TT   bool, True where a token is seen     from transformers, the same for all blocks
        bias_B1TT   0 where True, -inf elsewhere         added by scaled_dot_product_attention

    torch converts a mask into a bias at every call and keeps each bias for backward: T^2 numbers
    per row and block. Here all blocks share one bias; the results are the same.
    """

    def __init__(self, first: nn.Module) -> None:
        """Store the first block, at which a forward begins."""
        self._first = first
        # Keyed by id(mask); a few families use two masks, one of them a sliding window.
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Replace the mask in the arguments; return None, no change, if there is none."""
        mask = kwargs.get("attention_mask")
        hidden = args[0] if args else kwargs.get("hidden_states")
        # A compiled block makes its own bias: a lookup by id would trigger recompilation each step.
        if torch.compiler.is_compiling() or not isinstance(hidden, Tensor):
            return None
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 4:
            return None
        dtype = attention_dtype(hidden.dtype, hidden.device.type)
        return args, {**kwargs, "attention_mask": self._bias(block, mask, dtype)}

    def _bias(self, block: nn.Module, mask: Tensor, dtype: torch.dtype) -> Tensor:
        _, bias = self._biases.get(id(mask), (mask, None))
        if bias is None or bias.dtype != dtype:
            if block is self._first:
                # Drops the biases of the previous forward; a recomputed first block reuses its own.
                self._biases.clear()
            # GPU kernels need rows that begin at multiples of 8 and copy any other mask.
            num_keys = mask.shape[-1]
            padded = (*mask.shape[:-1], -(-num_keys // 8) * 8)
            bias = mask.new_zeros(padded, dtype=dtype)[..., :num_keys]
            bias.masked_fill_(~mask, -torch.inf)
            self._biases[id(mask)] = mask, bias
        return bias


def attention_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """Return the dtype in which attention of ``dtype`` inputs computes: autocast lowers it."""
    if dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return dtype
    return torch.get_autocast_dtype(device_type)


def cast_for_attention(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast queries, keys and values to the dtype in which attention computes."""
    dtype = attention_dtype(tensors[0].dtype, tensors[0].device.type)
    return tuple(tensor.to(dtype) for tensor in tensors)
