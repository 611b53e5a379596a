"""Token embedding whose vocabulary is sharded over x and whose features are sharded over y.

ids_BT     [B, T]        replicated over y and x
weight_VD  [V/x, D/y]    the layout of the LM head, so that the two can be one parameter

forward    h_BTD = all-reduce over x (rows of this rank's ids, 0 for other ids)   [B, T, D/y]
backward   each rank adds dh to its own rows; no collective
"""

from torch import Tensor, nn
from torch.nn import functional

from memguard.parallel.collectives import sum_over_axis
from memguard.parallel.linear import to_local
from memguard.parallel.mesh import Axis


class Embedding4D(nn.Embedding):
    """The token embedding of a sharded model; `convert` turns an `nn.Embedding` into one."""

    vocab_axis: Axis
    first_token: int

    @staticmethod
    def convert(embedding: nn.Module, *, vocab_axis: Axis, first_token: int) -> None:
        """Change the class of an embedding in place; its parameter is sharded elsewhere.

        Args:
            embedding: an ``nn.Embedding``.
            vocab_axis: shards the vocabulary.
            first_token: id of this rank's first row.
        """
        embedding.__class__ = Embedding4D
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
