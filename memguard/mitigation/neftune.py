"""NEFTune: noise on the token embeddings in training. Helps utility; no defence.

    e'_T = e_T + U(-1, 1) alpha / sqrt(L D)     for the L tokens of a row, each of D features

Jain et al. 2023, as commonly known; the paper was not read for this, and no figure of it is
claimed. It is here as the negative control of a comparison: what helps a model to answer is often
taken for what keeps it from reciting. L counts a row's tokens without padding; a packed row of
several documents is one row, as it is for whoever pads instead.
"""

import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from memguard.config.mitigations import NeftuneConfig

if TYPE_CHECKING:
    from memguard.mitigation import Need, Stage


class Neftune:
    """Draw the noise of a row."""

    stage: "ClassVar[Stage]" = "model"
    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll"})

    def __init__(self, config: NeftuneConfig) -> None:
        self.config = config

    def draw_noise(
        self, num_tokens: int, num_features: int, generator: np.random.Generator
    ) -> NDArray[np.float32]:
        """Return what is added to the embeddings of one row, ``[L, D]``.

        Args:
            num_tokens: L, without padding.
            num_features: D, of the whole model.
            generator: whose numbers these are; in fp32 whatever the model computes in.
        """
        scale = np.float32(self.config.alpha / math.sqrt(max(num_tokens * num_features, 1)))
        uniform = generator.random((num_tokens, num_features), dtype=np.float32)
        return (2 * uniform - 1) * scale
