"""What a label's loss is made of, beside the plain NLL: one small class a setting.

    p   probability of the label, l = -log p its NLL (nats), H entropy of the prediction (nats)
    u   mean over the vocabulary of log p(v)

    label_smoothing      (1 - eps) l - eps u           Szegedy et al., arXiv 1512.00567
    focal                (1 - p)^gamma l               Lin et al., arXiv 1708.02002
    confidence_penalty   l - beta H                    Pereyra et al., arXiv 1701.06548
    loss_clipping        l between floor and ceiling   teaches nothing outside of them
    flooding             |l - b| + b                   Ishida et al., arXiv 2002.08709, of the mean
                                                       over a step; here of each label

Each takes the losses [N] of the settings before it, in the order above whatever the order in the
configuration, and the terms [N] of the same labels. The formulas are those commonly known by these
names; the papers were not read for this, and no figure of theirs is claimed.
"""

from typing import TYPE_CHECKING, ClassVar

from memguard.config.mitigations import (
    ConfidencePenaltyConfig,
    FloodingConfig,
    FocalConfig,
    LabelSmoothingConfig,
    LossClippingConfig,
)

if TYPE_CHECKING:
    from torch import Tensor

    from memguard.mitigation import Need, Stage, TokenTerms


class LabelSmoothing:
    """Spread a part of each target over the vocabulary."""

    stage: "ClassVar[Stage]" = "loss"
    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll", "mean_logprob"})

    def __init__(self, config: LabelSmoothingConfig) -> None:
        self.config = config

    def change_losses(self, loss_N: "Tensor", terms: "TokenTerms") -> "Tensor":
        """Return the cross-entropy with the smoothed target; torch's ``label_smoothing``."""
        assert terms.mean_logprob_N is not None, "it was asked for"
        epsilon = self.config.epsilon
        return (1 - epsilon) * loss_N - epsilon * terms.mean_logprob_N


class Focal:
    """Let likely labels count less."""

    stage: "ClassVar[Stage]" = "loss"
    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll"})

    def __init__(self, config: FocalConfig) -> None:
        self.config = config

    def change_losses(self, loss_N: "Tensor", terms: "TokenTerms") -> "Tensor":
        """Return the losses times (1 - p)^gamma; gradients flow through both factors."""
        # -expm1(-l) is 1 - p without cancelling; at p = 1 a power below 1 has no finite slope.
        surprise_N = (-terms.nll_N).expm1().neg().clamp_min(1e-12)
        return surprise_N**self.config.gamma * loss_N


class ConfidencePenalty:
    """Reward entropy."""

    stage: "ClassVar[Stage]" = "loss"
    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll", "entropy"})

    def __init__(self, config: ConfidencePenaltyConfig) -> None:
        self.config = config

    def change_losses(self, loss_N: "Tensor", terms: "TokenTerms") -> "Tensor":
        """Return the losses minus beta entropies; may be negative."""
        assert terms.entropy_N is not None, "it was asked for"
        return loss_N - self.config.beta * terms.entropy_N


class LossClipping:
    """Learn only labels whose loss is between floor and ceiling."""

    stage: "ClassVar[Stage]" = "loss"
    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll"})

    def __init__(self, config: LossClippingConfig) -> None:
        self.config = config

    def change_losses(self, loss_N: "Tensor", terms: "TokenTerms") -> "Tensor":
        """Return the losses with those outside put at the border, where they have no gradient."""
        return loss_N.clamp(self.config.floor, self.config.ceiling)


class Flooding:
    """Climb where a label's loss has fallen below a level."""

    stage: "ClassVar[Stage]" = "loss"
    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll"})

    def __init__(self, config: FloodingConfig) -> None:
        self.config = config

    def change_losses(self, loss_N: "Tensor", terms: "TokenTerms") -> "Tensor":
        """Return |l - b| + b of each label."""
        level = self.config.level
        return (loss_N - level).abs() + level
