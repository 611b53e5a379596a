"""Noise on the token embeddings of one forward pass, the same numbers on every mesh.

    noise_LD     of a row of L tokens, from (run seed, "neftune", global sample index)
    noise_BTD    [B, T, D/y]   this rank's rows, 0 on padding, cut to its features

A row's noise depends only on the seed and the row's index, not on its rank or on the other rows of
the batch. It is drawn for all features on the CPU and then sliced, since the residual stream is
sharded over y.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from memguard.data.loader import Batch
from memguard.mitigation.neftune import Neftune
from memguard.model.causal_lm import CausalLM
from memguard.parallel.layout import ShardSlice, cut
from memguard.seeds import derive_generator


def draw_noise(
    mitigation: Neftune, batch: Batch, rows: slice, *, lm: CausalLM, seed: int, first_sample: int
) -> NDArray[np.float32]:
    """Return the noise of some rows, ``[B, T, D/y]``; ``first_sample`` is that of all ranks."""
    num_features = lm.model.get_input_embeddings().embedding_dim
    here = ShardSlice.whole((num_features,))
    if lm.mesh is not None:
        y = lm.mesh.axis("y")
        here = cut(here, 0, y.rank, y.degree)
    first_row = first_sample + lm.batch_rank * len(batch.input_ids)
    lengths = batch.num_tokens_B
    indices = range(len(lengths))[rows]
    noise_BTD = np.zeros((len(indices), batch.input_ids.shape[1], *here.shape), dtype=np.float32)
    for noise_TD, row in zip(noise_BTD, indices, strict=True):
        generator = derive_generator(seed, "neftune", first_row + row)
        length = int(lengths[row])
        noise_TD[:length] = mitigation.draw_noise(length, num_features, generator)[
            :, here.slices[0]
        ]
    return noise_BTD


@contextmanager
def added_to_embeddings(lm: CausalLM, noise_BTD: Tensor) -> Iterator[None]:
    """Add noise to the output of the token embedding during the forward pass in this context."""

    def add(_module: object, _inputs: object, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD + noise_BTD.to(hidden_BTD)

    hook = lm.model.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()
