"""Causal attention of packed rows, computed in pieces to skip masked query-key pairs.

    scores of T queries and T keys      k k . .      Q_THd, K_THd, V_THd, bias_TT
    in n pieces of C = T/n queries      k k . .      . = -inf for every query of the piece
                                        k k k k
                                        k k k k
    piece i     softmax(Q_C K^T + bias) V  over keys 0 .. (i+1) C only       (n+1) / 2n of the work

Rows that hold one document each need no bias, and torch's kernels skip the keys above the diagonal.
With a bias, which separates documents, torch computes all pairs. Heads are local: no collective.
"""

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
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return attended, None
    assert attention_mask is not None, "checked above"
    # Torch's attention casts by itself, but would do so once per piece.
    query, key, value = cast_for_attention(query, key, value)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
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
