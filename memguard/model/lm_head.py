"""One rank's shard of the LM head, and its logits for a few tokens at a time.

    hidden_CD  [C, D/y]    hidden states of a chunk of C tokens, replicated over x
    weight_VD  [V/x, D/y]  bias_V [V/x]

    logits_CV = all-reduce over y (hidden_CD @ weight_VD.T) + bias_V        [C, V/x]

The last ranks along x may hold fewer rows of the vocabulary than the others.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

from memguard.parallel.collectives import all_reduce
from memguard.parallel.mesh import Axis
from memguard.runtime import fast_matmuls

Step = tuple[Callable[[Tensor, float], Tensor], float]

# Share of the free memory that a widened weight may keep from keys, values and activations.
_KEPT_SHARE = 0.1


class WideWeight:
    """A head's weight in a wider dtype, computed once for many calls, such as a text's tokens.

    Of one head whose weight does not change meanwhile.
    """

    def __init__(self) -> None:
        """Start without a weight."""
        self._wide_VD: Tensor | None = None
        self._is_kept: bool | None = None

    def widen(self, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight ``[V/x, D/y]`` in ``dtype``; a GPU keeps it only if it has the room."""
        if self._wide_VD is not None and self._wide_VD.dtype == dtype:
            return self._wide_VD
        if self._is_kept is None:
            num_bytes = weight_VD.numel() * dtype.itemsize
            self._is_kept = num_bytes <= _KEPT_SHARE * count_free_bytes(weight_VD.device)
        wide_VD = weight_VD.to(dtype)
        if self._is_kept:
            self._wide_VD = wide_VD
        return wide_VD


def count_free_bytes(device: torch.device) -> float:
    """Return the free memory of a GPU (bytes); without limit on the CPU."""
    if device.type != "cuda":
        return math.inf
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """This rank's shard of the LM head."""

    weight_VD: Tensor | None
    """None if the values passed as hidden states are already logits."""
    bias_V: Tensor | None = None
    steps: tuple[Step, ...] = ()
    """The family's elementwise operations on the logits before the loss."""
    first_token: int = 0
    """Token id of the first row of the shard."""
    vocab_size: int = 0
    """V, before sharding."""
    vocab_axis: Axis = field(default_factory=lambda: Axis(name="x"))
    feature_axis: Axis = field(default_factory=lambda: Axis(name="y"))
    chunk_tokens: int = 1024
    """C: tokens whose logits exist at a time."""
    is_widened: bool = False
    """Whether weight and hidden states are bf16 or fp16 numbers in fp32, which TF32 has exactly."""
    wide: WideWeight | None = None
    """Keeps the weight that `widen` returns for later calls; None: each call widens it."""

    @property
    def num_tokens(self) -> int:
        """Number of rows of the shard."""
        return self.vocab_size if self.weight_VD is None else self.weight_VD.shape[0]

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Return the local logits ``[C, V/x]`` of a chunk, before the steps, in hidden's dtype."""
        if self.weight_VD is None:
            return hidden_CD
        weight_VD = self.weight_VD.to(hidden_CD.dtype)
        logits_CV = all_reduce(
            functional.linear(hidden_CD, weight_VD), self.feature_axis, owned=True
        )
        return logits_CV if self.bias_V is None else logits_CV + self.bias_V.to(logits_CV.dtype)

    def local_labels(self, labels_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return row indices of labels (0 if not in this shard) and whether they are in it."""
        local_C = labels_C - self.first_token
        here_C = (local_C >= 0) & (local_C < self.num_tokens)
        return local_C.masked_fill(~here_C, 0), here_C


def apply_logit_transforms(steps: tuple[Step, ...], logits: Tensor) -> Tensor:
    """Return the logits after the family's operations between head and loss."""
    for step, value in steps:
        logits = step(logits, value)
    return logits


def widen(head: Head, hidden_ND: Tensor) -> tuple[Head, Tensor]:
    """Return head and hidden states in fp32, or float64 if one of them is."""
    narrow = hidden_ND if head.weight_VD is None else head.weight_VD
    wide = torch.promote_types(torch.promote_types(hidden_ND.dtype, narrow.dtype), torch.float32)
    weight_VD = None if head.weight_VD is None else head.weight_VD.detach()
    if weight_VD is not None and weight_VD.dtype != wide:
        weight_VD = (head.wide or WideWeight()).widen(weight_VD, wide)
    is_widened = hidden_ND.dtype == narrow.dtype and narrow.dtype.itemsize < wide.itemsize
    return replace(head, weight_VD=weight_VD, is_widened=is_widened), hidden_ND.detach().to(wide)


@contextmanager
def scoring(head: Head, device: torch.device) -> Iterator[None]:
    """Compute exact products inside this block, whatever training has set, with sums in fp32.

    A GPU multiplies numbers of bf16 in TF32, several times as fast as in fp32 and without error.
    """
    fast = fast_matmuls(device) if head.is_widened else nullcontext()
    with torch.autocast(device.type, enabled=False), fast:
        yield


def compute_logits(head: Head, hidden_CD: Tensor) -> Tensor:
    """Return a chunk's local logits ``[C, V/x]`` after the steps, in hidden's own dtype."""
    with scoring(head, hidden_CD.device):
        return apply_logit_transforms(head.steps, head.logits(hidden_CD))


def iterate_chunks(head: Head, num_tokens: int) -> Iterator[slice]:
    """Yield the rows of each chunk."""
    for first in range(0, num_tokens, head.chunk_tokens):
        yield slice(first, min(first + head.chunk_tokens, num_tokens))


def max_of_piece(logits_CV: Tensor) -> Tensor:
    """Return the largest logit of each row; -inf if this shard of the vocabulary is empty."""
    if logits_CV.shape[1] == 0:
        return logits_CV.new_full((len(logits_CV),), -torch.inf)
    return logits_CV.amax(1)


def pick_label(
    logits_CV: Tensor, local_C: Tensor, here_C: Tensor, elsewhere: float = 0.0
) -> Tensor:
    """Return each row's logit at its label; ``elsewhere`` if the label is not in this shard."""
    if logits_CV.shape[1] == 0:
        return logits_CV.new_full((len(logits_CV),), elsewhere)
    return logits_CV.gather(1, local_C[:, None]).squeeze(1).masked_fill(~here_C, elsewhere)
