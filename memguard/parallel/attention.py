"""Causal attention of packed rows in pieces, without the pairs that nobody sees.

    scores of T queries and T keys      k k . .      Q_THd, K_THd, V_THd, bias_TT
    in n pieces of C = T/n queries      k k . .      . = -inf for every query of the piece
                                        k k k k
                                        k k k k
    piece i     softmax(Q_C K^T + bias) V  over keys 0 .. (i+1) C only       (n+1) / 2n of the work

Rows that hold one document each need no bias, and torch leaves out what lies after the diagonal;
with a bias, which keeps documents apart, it multiplies everything. Heads are local: no collective.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "memguard_pieces"
"""Of this attention among those of transformers."""
_MAX_PIECES = 8
# Below these lengths, starting another kernel costs more than the pairs it leaves out.
MIN_PIECE = {"cpu": 128}
_MIN_PIECE_ELSEWHERE = 512
# What an attention may be asked for besides, and no piece would know of.
_WHOLE_ONLY = ("position_bias", "cache", "softcap")


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
    """Return the attended values ``[B, T, H, d]``; an attention function of transformers.

    Args:
        module: the attention layer.
        query: ``[B, H, T, d]``.
        key: ``[B, H/groups, T, d]``.
        value: as ``key``.
        attention_mask: causal ``[B, 1, T, T]``; without one, or with fewer queries than keys, this
            is transformers' own.
        dropout: of the attention's weights.
        scaling: of the scores; None takes 1/sqrt(d).
        kwargs: passed on where this is transformers' own.
    """
    num_tokens = query.shape[2]
    size = _piece_tokens(num_tokens, query.device.type)
    whole = (
        attention_mask is None
        or attention_mask.shape[-2:] != (num_tokens, num_tokens)
        or key.shape[2] != num_tokens
        or size >= num_tokens
        # Lengths change from step to step, and each would be compiled anew.
        or torch.compiler.is_compiling()
        or any(kwargs.get(name) is not None for name in _WHOLE_ONLY)
    )
    if whole:
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return attended, None
    assert attention_mask is not None, "checked above"
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        # As torch's attention does by itself, but once and not piece by piece.
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (each.to(dtype) for each in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
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
    """Return C: at most eight pieces, none too short; a multiple of 128, as kernels like it."""
    shortest = MIN_PIECE.get(device_type, _MIN_PIECE_ELSEWHERE)
    return max(shortest, -(-num_tokens // (_MAX_PIECES * 128)) * 128)


def use_pieces(model: Any) -> None:
    """Let a causal model whose attention is torch's attend in pieces.

    Its configuration is exported as before: transformers never writes which attention runs.
    """
    if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        transformers.AttentionInterface.register(NAME, attend_in_pieces)
        transformers.AttentionMaskInterface.register(NAME, sdpa_mask)
        model.config._attn_implementation = NAME
