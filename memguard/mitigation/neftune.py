"""NEFTune: noise on the token embeddings in training. Improves utility; not a defence.

    e'_T = e_T + U(-1, 1) alpha / sqrt(L D)     for the L tokens of a row, each of D features

Jain et al. 2023, as commonly known; the paper was not read for this, and none of its results is
claimed. It serves as the negative control of a comparison, because a regulariser that improves
answers is often assumed to reduce memorization. L is the number of a row's tokens without padding;
a packed row of several documents is one row, like a padded row of one document.
"""

import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from memguard.config.mitigations import NeftuneConfig

if TYPE_CHECKING:
    from memguard.mitigation import Stage


class Neftune:
    """Draw the noise of a row."""

    stage: "ClassVar[Stage]" = "model"

    def __init__(self, config: NeftuneConfig) -> None:
        self.config = config

    def draw_noise(
        self, num_tokens: int, num_features: int, generator: np.random.Generator
    ) -> NDArray[np.float32]:
        """Return the noise for the embeddings of one row, ``[L, D]``, fp32 for any model.

        L tokens are without padding, D features before sharding.
        """
        scale = np.float32(self.config.alpha / math.sqrt(max(num_tokens * num_features, 1)))
        uniform = generator.random((num_tokens, num_features), dtype=np.float32)
        return (2 * uniform - 1) * scale
