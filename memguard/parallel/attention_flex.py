"""Attention with a soft cap or sinks on GPUs: torch's flex attention with a mask of blocks.

    scores      cap tanh(Q K^T / cap), if there is a cap       blocks of 128 x 128
    mask        blocks before a query's document, behind its   . . . .     . not computed
                window or after the query are skipped          # f . .     f computed without a mask
    sinks       O e^lse / (e^lse + e^sink)                     . # # .     # computed with a mask
                with lse = log sum e^scores                    . . # #

torch's `create_block_mask` first makes the mask of all T x T pairs, unless it is compiled. Here the
blocks follow from the first key of each query, which never decreases along a row:

    first block of a block of queries       first key of its first query / 128
    computed without a mask                 from the first key of its last query, rounded up, to the
                                            block before the block of queries

Gradients pass through the log-sum-exp too. Heads are local: no collective.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from memguard.parallel.attention_pieces import cast_for_attention, find_first_keys, make_dense_mask

_BLOCK = 128


def attend_flex(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    block_masks: dict[int | None, BlockMask] | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Return the attention output ``[B, T, H, d]``; implements transformers' attention interface.

    Without `block_masks` (a cache, fp32) and with dropout, which flex attention does not have, the
    family's own attention runs.

    Its other arguments are those of `attend_varlen`, with an additive mask, and of the families:
    ``softcap``, the cap of the scores, and ``s_aux`` ``[H]``, the attention sinks. ``block_masks``
    are those of `make_block_masks`, by window.
    """
    if block_masks is None or dropout > 0:
        if block_masks is not None:
            assert cu_seq_lens_q is not None, "they are passed together"
            first_BT = find_first_keys(
                cu_seq_lens_q, query.shape[0], query.shape[2], sliding_window
            )
            seen = make_dense_mask(first_BT)
            attention_mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill(
                ~seen, torch.finfo(query.dtype).min
            )
        own: Callable[..., tuple[Tensor, Any]]
        own = sys.modules[type(module).__module__].eager_attention_forward
        return own(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            s_aux=s_aux,
            **kwargs,
        )
    query, key, value = cast_for_attention(query, key, value)
    # Inside a compiled block, flex attention is compiled with the block.
    attend = flex_attention if torch.compiler.is_compiling() else _compiled()
    attended, statistics = attend(
        query,
        key,
        value,
        score_mod=None if softcap is None else _cap(softcap),
        block_mask=block_masks[sliding_window],
        scale=scaling,
        enable_gqa=True,
        # The kernel for few queries accepts fewer shapes: a power of two of query heads a key head.
        kernel_options={"BACKEND": "TRITON"},
        return_aux=AuxRequest(lse=s_aux is not None),
    )
    if s_aux is not None:
        share_BHT = torch.sigmoid(statistics.lse - s_aux.float()[:, None])
        attended = attended * share_BHT[..., None].to(attended.dtype)
    return attended.transpose(1, 2).contiguous(), None


@functools.cache
def _compiled() -> Any:
    """Return compiled flex attention; uncompiled it computes all T x T scores."""
    return torch.compile(flex_attention)


def _cap(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def make_block_mask(first_BT: Tensor) -> BlockMask:
    """Return the blocks of 128 queries and 128 keys that causal attention computes.

    ``first_BT`` has the first key of each query, from `find_first_keys`.
    """
    num_tokens = first_BT.shape[1]
    starts = torch.arange(0, num_tokens, _BLOCK, device=first_BT.device)
    ends = (starts + _BLOCK - 1).clamp(max=num_tokens - 1)
    block = torch.arange(len(starts), device=first_BT.device)
    lowest_BN = first_BT[:, starts] // _BLOCK
    full_BN = torch.minimum((first_BT[:, ends] + _BLOCK - 1) // _BLOCK, block)
    # The blocks with a mask: those from the lowest to the first full one, and that of the queries.
    num_before_BN = full_BN - lowest_BN
    partial_BNN = torch.where(
        block < num_before_BN[..., None], lowest_BN[..., None] + block, block[:, None]
    )
    full_BNN = (full_BN[..., None] + block).clamp(max=len(starts) - 1)

    def is_seen(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first_BT[row, query])

    return BlockMask.from_kv_blocks(
        (num_before_BN + 1)[:, None].int(),
        partial_BNN[:, None].int(),
        (block - full_BN)[:, None].int(),
        full_BNN[:, None].int(),
        BLOCK_SIZE=_BLOCK,
        mask_mod=is_seen,
        seq_lengths=(num_tokens, num_tokens),
    )


def make_block_masks(
    cu_seqlens: Tensor, num_rows: int, num_tokens: int, windows: tuple[int | None, ...]
) -> dict[int | None, BlockMask]:
    """Return the blocks of packed rows for each sliding window of a model; None: no window."""
    return {
        window: make_block_mask(find_first_keys(cu_seqlens, num_rows, num_tokens, window))
        for window in windows
    }
