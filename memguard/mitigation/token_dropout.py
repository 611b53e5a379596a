"""Token dropout: labels are dropped by chance, others each time a text is seen.

The ablation of goldfish: over a few epochs every label has been learned, and the text with it.
"""

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from memguard.config.mitigations import TokenDropoutConfig

if TYPE_CHECKING:
    from memguard.mitigation import Need, Stage


class TokenDropout:
    """Drop a share of the labels, drawn anew."""

    stage: "ClassVar[Stage]" = "labels"
    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll"})

    def __init__(self, config: TokenDropoutConfig) -> None:
        self.config = config

    @property
    def target_drop_rate(self) -> float:
        """Share of the labels it means to drop."""
        return self.config.rate

    def drop_mask(
        self,
        input_ids: NDArray[np.integer],
        document_ids: NDArray[np.integer] | None,
        generator: np.random.Generator,
    ) -> NDArray[np.bool_]:
        """Return True where the token, as a label, is dropped.

        Args:
            input_ids: ``[..., T]`` tokens, of which only the shape matters.
            document_ids: not looked at.
            generator: whose numbers decide.
        """
        return generator.random(input_ids.shape) < self.config.rate
