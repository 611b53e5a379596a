"""Token dropout: drops random labels, different ones each time a text is seen.

This is the ablation of goldfish: after a few epochs every label has been trained, and the whole
text can be memorized.
"""

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from memguard.config.mitigations import TokenDropoutConfig

if TYPE_CHECKING:
    from memguard.mitigation import Need, Stage


class TokenDropout:
    """Drop a random share of the labels at each call."""

    stage: "ClassVar[Stage]" = "labels"
    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll"})

    def __init__(self, config: TokenDropoutConfig) -> None:
        self.config = config

    @property
    def target_drop_rate(self) -> float:
        """Expected share of the labels that are dropped."""
        return self.config.rate

    def drop_mask(
        self,
        input_ids: NDArray[np.integer],
        document_ids: NDArray[np.integer] | None,
        generator: np.random.Generator,
    ) -> NDArray[np.bool_]:
        """Return True where the token, as a label, is dropped; only the shape of ids matters."""
        return generator.random(input_ids.shape) < self.config.rate
