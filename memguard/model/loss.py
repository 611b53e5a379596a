"""Losses of selected tokens over a sharded vocabulary, few logits at a time.

    hidden_ND  [N, D/y]    last hidden states of the selected positions, replicated over x
    weight_VD  [V/x, D/y]  the head; bias_V [V/x]
    labels_N   [N]         the token that follows each position, replicated

    for chunks of C tokens:
      logits_CV = steps(all-reduce over y (hidden_CD @ weight_VD.T) + bias_V)
      lse_C     = log(all-reduce over x (sum exp(logits - max))) + max,   max = all-reduce over x
      nll_C     = lse_C - all-reduce over x (logits[label])               natural log, fp32
      dhidden_CD = all-reduce over x (dlogits_CV @ weight_VD)             overlaps the next line
      dweight_VD += dlogits_CV.T @ hidden_CD

At most [C, V/x] logits exist at a time. The gradient of a plain sum of losses is known up to a
factor, so `sum_nll` computes it in the forward pass. `token_terms` returns one loss per token, for
callers that weight them, and recomputes each chunk's logits in backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memguard.mitigation import TokenTerms
from memguard.model.lm_head import (
    Head,
    apply_logit_transforms,
    iterate_chunks,
    max_of_piece,
    pick_label,
)
from memguard.parallel.collectives import all_reduce, start_all_reduce, wait


def sum_nll(head: Head, hidden_ND: Tensor, labels_N: Tensor) -> Tensor:
    """Return the sum of -log p(label) (nats, fp32), differentiable in hidden states and head."""
    # Inside forward of an autograd function, grad mode is always off.
    wanted = torch.is_grad_enabled()
    return _SumNll.apply(hidden_ND, head.weight_VD, head.bias_V, labels_N, head, wanted)  # type: ignore[no-untyped-call,no-any-return]


def token_terms(
    head: Head, hidden_ND: Tensor, labels_N: Tensor, needs: frozenset[str] = frozenset({"nll"})
) -> TokenTerms:
    """Return per-token terms, each differentiable in hidden states and head.

    Args:
        head: this rank's shard of the head.
        hidden_ND: local hidden states ``[N, D/y]``.
        labels_N: ``[N]`` token ids.
        needs: any of ``nll`` (always computed), ``entropy`` and ``mean_logprob``.
    """
    unknown = needs - {"nll", "entropy", "mean_logprob"}
    assert not unknown, f"the head does not compute {sorted(unknown)}"
    nll_N, entropy_N, mean_logprob_N = _ComputeTerms.apply(
        hidden_ND, head.weight_VD, head.bias_V, labels_N, head
    )  # type: ignore[no-untyped-call]
    return TokenTerms(
        nll_N=nll_N,
        entropy_N=entropy_N if "entropy" in needs else None,
        mean_logprob_N=mean_logprob_N if "mean_logprob" in needs else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """One chunk's distribution over this rank's shard of the vocabulary."""

    logits_CV: Tensor
    """After the steps, fp32 or wider."""
    raw_CV: Tensor | None
    """Before the steps; None if there are none."""
    max_C: Tensor


def _compute_dtype(head: Head, hidden_ND: Tensor) -> torch.dtype:
    """Return the dtype of the head's matmul, which is autocast's if autocast applies."""
    kind = hidden_ND.device.type
    keeps = head.weight_VD is None or hidden_ND.dtype == torch.float64
    if keeps or not torch.is_autocast_enabled(kind):
        return hidden_ND.dtype
    return torch.get_autocast_dtype(kind)


def _widen(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _distribution(head: Head, hidden_CD: Tensor) -> _Chunk:
    raw_CV = head.logits(hidden_CD)
    logits_CV = _widen(apply_logit_transforms(head.steps, raw_CV))
    return _Chunk(
        logits_CV=logits_CV,
        raw_CV=raw_CV if head.steps else None,
        max_C=all_reduce(max_of_piece(logits_CV), head.vocab_axis, "max"),
    )


def _through_steps(head: Head, raw_CV: Tensor | None, grad_CV: Tensor) -> Tensor:
    """Return the gradient before the steps from the gradient after them."""
    if raw_CV is None or not head.steps:
        return grad_CV
    with torch.enable_grad():
        raw_CV = raw_CV.detach().requires_grad_()
        stepped_CV = apply_logit_transforms(head.steps, raw_CV)
        (grad_raw_CV,) = torch.autograd.grad(stepped_CV, raw_CV, grad_CV.to(stepped_CV.dtype))
    return grad_raw_CV


class _Gradients:
    """Gradients of hidden states and head, accumulated chunk by chunk."""

    def __init__(self, head: Head, hidden_ND: Tensor, needed: Sequence[bool]) -> None:
        """Allocate gradients for those of hidden states, weight and bias that need one."""
        self.head = head
        self.hidden_ND = torch.empty_like(hidden_ND) if needed[0] else None
        self.weight_VD = _zeros_like(head.weight_VD) if needed[1] else None
        self.bias_V = _zeros_like(head.bias_V) if needed[2] else None

    def add(self, rows: slice, hidden_CD: Tensor, raw_CV: Tensor | None, grad_CV: Tensor) -> None:
        """Add one chunk's gradient of the logits after the steps."""
        grad_CV = _through_steps(self.head, raw_CV, grad_CV)
        if self.head.weight_VD is None:
            assert self.hidden_ND is not None, "the values passed as hidden states need gradients"
            self.hidden_ND[rows] = grad_CV
            return
        if self.bias_V is not None:
            self.bias_V += grad_CV.sum(0)
        grad_CV = grad_CV.to(hidden_CD.dtype)
        axis, started_CD = self.head.vocab_axis, None
        # Hidden states of frozen blocks need no gradient, on any rank.
        if self.hidden_ND is not None:
            partial_CD = grad_CV @ self.head.weight_VD.to(hidden_CD.dtype)
            started_CD = start_all_reduce(partial_CD, axis, owned=True)
        if self.weight_VD is not None:
            if self.weight_VD.dtype == hidden_CD.dtype:
                self.weight_VD.addmm_(grad_CV.T, hidden_CD)
            else:
                self.weight_VD += grad_CV.T @ hidden_CD
        if self.hidden_ND is not None and started_CD is not None:
            self.hidden_ND[rows] = wait(started_CD) if axis.degree > 1 else started_CD

    def result(self, scale: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias in their dtypes."""
        parameters = (self.hidden_ND, self.head.weight_VD, self.head.bias_V)
        gradients = (self.hidden_ND, self.weight_VD, self.bias_V)
        for gradient in gradients:
            if gradient is None or scale is None:
                continue
            for rows in torch.split(gradient, self.head.chunk_tokens):
                # The factor is not rounded to bf16, which would bias all gradients the same way.
                rows.copy_(rows.to(scale.dtype) * scale)
        return tuple(
            None if gradient is None or parameter is None else gradient.to(parameter.dtype)
            for gradient, parameter in zip(gradients, parameters, strict=True)
        )


def _zeros_like(parameter: Tensor | None) -> Tensor | None:
    """Return zeros to accumulate gradients in: fp32 if the parameter is narrower."""
    if parameter is None:
        return None
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros_like(parameter, dtype=wide)


# Each chunk is processed in a separate function, so that its logits are freed before those of the
# next chunk are allocated.


def _sum_chunk(
    head: Head, rows: slice, hidden_CD: Tensor, labels_C: Tensor, gradients: _Gradients | None
) -> Tensor:
    """Return the sum of a chunk's losses and accumulate its gradients."""
    chunk = _distribution(head, hidden_CD)
    local_C, here_C = head.local_labels(labels_C)
    label_C = pick_label(chunk.logits_CV, local_C, here_C)
    # Logits that the caller passed in must not be changed in place.
    buffer_CV = chunk.logits_CV.clone() if head.weight_VD is None else chunk.logits_CV
    exp_CV = buffer_CV.sub_(chunk.max_C[:, None]).exp_()
    sum_C, label_C = all_reduce(torch.stack([exp_CV.sum(1), label_C]), head.vocab_axis)
    if gradients is not None:
        grad_CV = exp_CV.div_(sum_C[:, None])
        _subtract_at_label(grad_CV, local_C, here_C, here_C.to(grad_CV.dtype))
        gradients.add(rows, hidden_CD, chunk.raw_CV, grad_CV)
    total: Tensor = (sum_C.log() + (chunk.max_C - label_C)).sum()
    return total


def _terms_of_chunk(head: Head, hidden_CD: Tensor, labels_C: Tensor) -> Tensor:
    """Return nll, entropy, mean log-probability and log of the summed exponentials, ``[4, C]``."""
    chunk = _distribution(head, hidden_CD)
    local_C, here_C = head.local_labels(labels_C)
    label_C = pick_label(chunk.logits_CV, local_C, here_C)
    logits_CV = chunk.logits_CV - chunk.max_C[:, None]
    exp_CV = logits_CV.exp()
    parts = [exp_CV.sum(1), label_C, (exp_CV * logits_CV).sum(1), logits_CV.sum(1)]
    sum_C, label_C, weighted_C, all_C = all_reduce(torch.stack(parts), head.vocab_axis)
    log_sum_C = sum_C.log()
    lse_C = log_sum_C + chunk.max_C
    return torch.stack(
        [
            log_sum_C + (chunk.max_C - label_C),
            log_sum_C - weighted_C / sum_C,
            all_C / head.vocab_size - log_sum_C,
            lse_C,
        ]
    )


def _differentiate_chunk(
    head: Head,
    hidden_CD: Tensor,
    labels_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    grad_nll_C: Tensor,
    grad_entropy_C: Tensor,
    grad_mean_C: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return a chunk's logits before the steps and their gradient after them."""
    raw_CV = head.logits(hidden_CD)
    logprob_CV = _widen(apply_logit_transforms(head.steps, raw_CV)) - lse_C[:, None]
    # d nll = p - 1[label];  d entropy = -p (log p + entropy);  d mean = 1/V - p
    weight_CV = (grad_nll_C - grad_mean_C)[:, None] - grad_entropy_C[:, None] * (
        logprob_CV + entropy_C[:, None]
    )
    grad_CV = logprob_CV.exp() * weight_CV + (grad_mean_C / head.vocab_size)[:, None]
    local_C, here_C = head.local_labels(labels_C)
    _subtract_at_label(grad_CV, local_C, here_C, grad_nll_C)
    return raw_CV, grad_CV


class _SumNll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        head: Head,
        wanted: bool,
    ) -> Tensor:
        dtype = _compute_dtype(head, hidden_ND)
        needed = ctx.needs_input_grad
        gradients = _Gradients(head, hidden_ND, needed) if wanted and any(needed) else None
        total = hidden_ND.new_zeros((), dtype=_widen(hidden_ND[:0]).dtype)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows in iterate_chunks(head, len(labels_N)):
                hidden_CD = hidden_ND[rows].to(dtype)
                total += _sum_chunk(head, rows, hidden_CD, labels_N[rows], gradients)
        ctx.gradients = gradients
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "sum_nll is differentiated once"
        gradients, ctx.gradients = ctx.gradients.result(grad), None
        return (*gradients, None, None, None)


class _ComputeTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        head: Head,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return nll, entropy and mean log-probability, ``[N]`` each."""
        dtype = _compute_dtype(head, hidden_ND)
        wide = _widen(hidden_ND[:0]).dtype
        terms_4N = hidden_ND.new_zeros(4, len(labels_N), dtype=wide)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows in iterate_chunks(head, len(labels_N)):
                terms_4N[:, rows] = _terms_of_chunk(head, hidden_ND[rows].to(dtype), labels_N[rows])
        nll_N, entropy_N, mean_logprob_N, lse_N = (term_N.clone() for term_N in terms_4N)
        ctx.save_for_backward(hidden_ND, labels_N, lse_N, entropy_N)
        ctx.head, ctx.dtype = head, dtype
        return nll_N, entropy_N, mean_logprob_N

    @staticmethod
    def backward(ctx: Any, *grads_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, labels_N, lse_N, entropy_N = ctx.saved_tensors
        head: Head = ctx.head
        gradients = _Gradients(head, hidden_ND, ctx.needs_input_grad)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows in iterate_chunks(head, len(labels_N)):
                grads_3C = [grad_N[rows] for grad_N in grads_N]
                saved_2C = lse_N[rows], entropy_N[rows]
                hidden_CD = hidden_ND[rows].to(ctx.dtype)
                raw_CV, grad_CV = _differentiate_chunk(
                    head, hidden_CD, labels_N[rows], *saved_2C, *grads_3C
                )
                gradients.add(rows, hidden_CD, raw_CV, grad_CV)
                del raw_CV, grad_CV
        return (*gradients.result(), None, None)


def _subtract_at_label(grad_CV: Tensor, local_C: Tensor, here_C: Tensor, value_C: Tensor) -> None:
    if grad_CV.shape[1] > 0:
        grad_CV.scatter_add_(1, local_C[:, None], -value_C.masked_fill(~here_C, 0)[:, None])
