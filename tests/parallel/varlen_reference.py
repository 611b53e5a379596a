"""torch's varlen attention on the CPU, in any dtype, by the formula, one document at a time.

With it, the models here run the path of GPUs: torch calls the kernels below where it would call
flash attention's. Forward and backward are separate operations, as on GPUs.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from memguard.parallel import attention

EVERY_DTYPE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Document:
    """Attention of one document, forward and backward, by the formula."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: tuple[int, int],
        scale: float | None,
    ) -> None:
        """Compute the weights of queries [T, H, d] for keys and values of fewer heads."""
        self.num_key_heads = key.shape[1]
        groups = query.shape[1] // self.num_key_heads
        self.scale = query.shape[2] ** -0.5 if scale is None else scale
        self.q_HTd = query.transpose(0, 1)
        self.k_HTd, self.v_HTd = (
            tensor.transpose(0, 1).repeat_interleave(groups, 0) for tensor in (key, value)
        )
        place = torch.arange(len(query))
        before = place[:, None] - place
        seen = before >= -window[1]
        if window[0] >= 0:
            seen &= before <= window[0]
        scores = (self.q_HTd @ self.k_HTd.mT * self.scale).masked_fill(~seen, -torch.inf)
        self.lse_HT = scores.logsumexp(-1)
        self.p_HTT = (scores - self.lse_HT[..., None]).exp()

    def forward(self) -> Tensor:
        return (self.p_HTT @ self.v_HTd).transpose(0, 1)

    def backward(self, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad_HTd = grad_out.transpose(0, 1)
        weighted = grad_HTd @ self.v_HTd.mT
        grad_scores = self.p_HTT * (weighted - (self.p_HTT * weighted).sum(-1, keepdim=True))
        grad_q = grad_scores @ self.k_HTd * self.scale
        shared = (grad_scores.mT @ self.q_HTd * self.scale, self.p_HTT.mT @ grad_HTd)
        grad_k, grad_v = (each.unflatten(0, (self.num_key_heads, -1)).sum(1) for each in shared)
        return grad_q.transpose(0, 1), grad_k.transpose(0, 1), grad_v.transpose(0, 1)


def split(ends: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the part of each document of flattened rows."""
    yield from zip(*(tensor.split(ends.diff().tolist()) for tensor in tensors), strict=True)


class Calls:
    """What the kernels were called with."""

    def __init__(self) -> None:
        self.heads: list[tuple[int, int]] = []
        """Query heads and key heads."""
        self.windows: list[tuple[int, int]] = []
        self.num_backward = 0


@contextlib.contextmanager
def reference_varlen() -> Iterator[Calls]:
    """Let models prepared inside run varlen attention on the CPU."""
    calls = Calls()

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        is_causal: bool = False,
        scale: float | None = None,
        window_size: Any = None,
        *_: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert int(cu_seq_q.diff().max()) == max_q == max_k
        assert int(cu_seq_q[-1]) == len(query)
        calls.heads.append((query.shape[1], key.shape[1]))
        calls.windows.append(tuple(window_size))
        documents = [
            Document(*parts, tuple(window_size), scale)
            for parts in split(cu_seq_q, query, key, value)
        ]
        lse = torch.cat([document.lse_HT for document in documents], 1)
        output = torch.cat([document.forward() for document in documents])
        return output, lse.float(), torch.zeros(2, dtype=torch.uint64)

    def backward(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        is_causal: bool,
        rng_state: Tensor,
        scale: float | None = None,
        window_size: Any = None,
    ) -> tuple[Tensor, ...]:
        calls.num_backward += 1
        parts = [
            Document(q, k, v, tuple(window_size), scale).backward(grad)
            for q, k, v, grad in split(cu_seq_q, query, key, value, grad_out)
        ]
        return tuple(torch.cat(grads) for grads in zip(*parts, strict=True))

    library = torch.library.Library("torch_attn", "IMPL")
    library.impl("_varlen_attn", forward, "CPU")
    library.impl("_varlen_attn_backward", backward, "CPU")
    try:
        with (
            mock.patch.object(attention, "HALF_DTYPES", EVERY_DTYPE),
            mock.patch.object(attention, "_has_flash", return_value=True),
        ):
            yield calls
    finally:
        library._destroy()
