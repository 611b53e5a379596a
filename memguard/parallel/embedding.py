"""Token embedding whose vocabulary is sharded over x and whose features are sharded over y.

ids_BT     [B, T]        replicated over y and x
weight_VD  [V/x, D/y]    the layout of the LM head, so that the two can be one parameter

forward    h_BTD = all-reduce over x (rows of this rank's ids, 0 for other ids)   [B, T, D/y]
backward   each rank adds dh to its own rows; no collective

Families that multiply h by a number (Gemma) keep their own forward, which calls this one.

Learned positions [P, D/y] are replicated over x and need no collective.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memguard.parallel.collectives import sum_over_axis
from memguard.parallel.linear import to_local
from memguard.parallel.mesh import Axis

# fp32 rounding of ratios below a hundred.
_TOLERANCE = 1e-4


class Embedding4D(nn.Embedding):
    """The token embedding of a sharded model; `convert` turns an `nn.Embedding` into one."""

    vocab_axis: Axis
    first_token: int

    @staticmethod
    def convert(embedding: nn.Module, *, vocab_axis: Axis, first_token: int) -> None:
        """Change the class of an embedding in place; its parameter is sharded elsewhere.

        It is an ``nn.Embedding``, or one for which `is_scaled_lookup` holds. The axis shards the
        vocabulary, of which this rank has the rows from ``first_token`` on.
        """
        _change_class(embedding, Embedding4D)
        assert isinstance(embedding, Embedding4D), "its class was just set"
        embedding.vocab_axis, embedding.first_token = vocab_axis, first_token

    def forward(self, input: Tensor) -> Tensor:
        """Return the local features ``[B, T, D/y]`` of token ids ``[B, T]``."""
        weight_VD = to_local(self.weight)
        num_rows = weight_VD.shape[0]
        # transformers sets padding_idx; the embedding then sends no gradient to that row.
        padding = None if self.padding_idx is None else self.padding_idx - self.first_token
        if padding is not None and not 0 <= padding < num_rows:
            padding = None
        if self.vocab_axis.degree == 1:
            return functional.embedding(input, weight_VD, padding)
        local = input - self.first_token
        elsewhere = (local < 0) | (local >= num_rows)
        hidden = functional.embedding(local.masked_fill(elsewhere, 0), weight_VD, padding)
        return sum_over_axis(hidden.masked_fill(elsewhere[..., None], 0), self.vocab_axis)


class Positions4D(nn.Embedding):
    """Learned positions of a sharded model; `convert` turns an `nn.Embedding` into them."""

    @staticmethod
    def convert(embedding: nn.Module) -> None:
        """Change the class of an embedding in place; its parameter is sharded elsewhere.

        Args:
            embedding: an ``nn.Embedding``, or a subclass whose forward calls that of its base
                class (OPT's adds 2 to positions).
        """
        _change_class(embedding, Positions4D)

    def forward(self, input: Tensor) -> Tensor:
        """Return the local features ``[B, T, D/y]`` of positions ``[B, T]``."""
        return functional.embedding(input, to_local(self.weight), self.padding_idx)


def _change_class(embedding: nn.Module, base: type[nn.Module]) -> None:
    """Change the base class of an embedding, whose own forward stays if it has one."""
    family = type(embedding)
    has_own = family.forward is not nn.Embedding.forward
    embedding.__class__ = type(family.__name__, (family, base), {}) if has_own else base


@torch.no_grad()
def is_scaled_lookup(embedding: nn.Module) -> bool:
    """Whether an embedding's forward is the row of a token times one number.

    Runs it, unsharded, on a small table of random values, on the CPU; it may be on the meta device.
    """
    if not isinstance(embedding, nn.Embedding):
        return False
    probe: Any = copy.copy(embedding)
    generator = torch.Generator().manual_seed(0)
    rows_VD = torch.rand(4, 8, generator=generator) + 1
    probe._parameters = {"weight": nn.Parameter(rows_VD)}
    # It may be beyond the rows of the probe, and does not change the result.
    probe.padding_idx = None
    ratio_TD = probe(torch.arange(4)) / rows_VD
    return bool(ratio_TD.isfinite().all()) and float(ratio_TD.max() - ratio_TD.min()) < _TOLERANCE
