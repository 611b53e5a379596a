"""Losses of a label other than the plain NLL: one small class per setting.

    p   probability of the label, l = -log p its NLL (nats), H entropy of the prediction (nats)
    u   mean over the vocabulary of log p(v)

    label_smoothing      (1 - eps) l - eps u           Szegedy et al., arXiv 1512.00567
    focal                (1 - p)^gamma l               Lin et al., arXiv 1708.02002
    confidence_penalty   l - beta H                    Pereyra et al., arXiv 1701.06548
    loss_clipping        min(max(l, floor), ceiling)   zero gradient outside floor and ceiling
    flooding             |l - b| + b                   Ishida et al., arXiv 2002.08709, for the mean
                                                       over a step; here for each label
    ngram_penalty        l + weight max(0, G - margin) G: mean gain of the n labels up to this one
    npo                  (2/beta) log(1 + (p(y)/p_0(y))^beta)    for each piece y to be unlearned
    gradient_ascent      -min(l, ceiling)                        for each label to be unlearned

Each setting takes the losses [N] of the preceding settings, in the order above, independent of the
order in the configuration, and the terms [N] of the same labels. The formulas are those commonly
known by these names; the papers were not read for this, and none of their results is claimed.
"""

from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from memguard.config.mitigations import (
    ConfidencePenaltyConfig,
    FloodingConfig,
    FocalConfig,
    GradientAscentConfig,
    LabelSmoothingConfig,
    LossClippingConfig,
    NgramPenaltyConfig,
    NpoConfig,
)
from memguard.config.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from memguard.mitigation import Need, Stage, TokenTerms


SettingsT = TypeVar("SettingsT", bound=Settings)


class Loss(Generic[SettingsT]):
    """One entry of `mitigations:` that changes the loss of a label."""

    stage: "ClassVar[Stage]" = "loss"
    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll"})

    def __init__(self, config: SettingsT) -> None:
        self.config = config

    def change_losses(self, loss_N: "Tensor", terms: "TokenTerms") -> "Tensor":
        """Return the losses ``[N]``, computed from those of the preceding settings."""
        raise NotImplementedError


class LabelSmoothing(Loss[LabelSmoothingConfig]):
    """Distribute a part of each target over the vocabulary."""

    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll", "mean_logprob"})

    def change_losses(self, loss_N: "Tensor", terms: "TokenTerms") -> "Tensor":
        """Return the cross-entropy with the smoothed target; torch's ``label_smoothing``."""
        assert terms.mean_logprob_N is not None, "listed in needs"
        epsilon = self.config.epsilon
        return (1 - epsilon) * loss_N - epsilon * terms.mean_logprob_N


class Focal(Loss[FocalConfig]):
    """Reduce the weight of likely labels."""

    def change_losses(self, loss_N: "Tensor", terms: "TokenTerms") -> "Tensor":
        """Return the losses times (1 - p)^gamma; gradients flow through both factors."""
        # -expm1(-l) is 1 - p without cancellation; at p = 1 a power below 1 has an infinite slope.
        surprise_N = (-terms.nll_N).expm1().neg().clamp_min(1e-12)
        return surprise_N**self.config.gamma * loss_N


class ConfidencePenalty(Loss[ConfidencePenaltyConfig]):
    """Reward entropy."""

    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll", "entropy"})

    def change_losses(self, loss_N: "Tensor", terms: "TokenTerms") -> "Tensor":
        """Return the losses minus beta times the entropies; may be negative."""
        assert terms.entropy_N is not None, "listed in needs"
        return loss_N - self.config.beta * terms.entropy_N


class LossClipping(Loss[LossClippingConfig]):
    """Train only on labels whose loss is between floor and ceiling."""

    def change_losses(self, loss_N: "Tensor", terms: "TokenTerms") -> "Tensor":
        """Return the losses clamped to the range; clamped losses have no gradient."""
        return loss_N.clamp(self.config.floor, self.config.ceiling)


class Flooding(Loss[FloodingConfig]):
    """Use gradient ascent on labels whose loss has fallen below a level."""

    def change_losses(self, loss_N: "Tensor", terms: "TokenTerms") -> "Tensor":
        """Return |l - b| + b for each label."""
        level = self.config.level
        return (loss_N - level).abs() + level


class Npo(Loss[NpoConfig]):
    """Unlearn pieces with a gradient that vanishes as their probability falls.

    Zhang et al. 2024, "Negative Preference Optimization": -(2/beta) log sigmoid(-beta log(p/p_0)),
    where p(y) is the product over the labels of a piece and p_0 that of the starting model. The
    gradient is that of gradient ascent times 2 p^beta / (p^beta + p_0^beta): 1 at the start, and
    nearly 0 once the piece has lost a few times 1/beta nats, independent of its length. Plain
    gradient ascent would not stop. Replaces the losses of the preceding settings for these labels.
    """

    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll", "reference_nll"})

    def change_losses(self, loss_N: "Tensor", terms: "TokenTerms") -> "Tensor":
        """Return the losses; a label to be unlearned gets an equal share of its piece's loss."""
        assert terms.reference_nll_N is not None, "listed in needs"
        assert terms.piece_N is not None, "the trainer adds pieces with the reference"
        assert terms.forget_N is not None, "a run without documents to unlearn is rejected"
        beta, piece_N = self.config.beta, terms.piece_N
        ratio_N = terms.reference_nll_N - terms.nll_N
        # There are at most as many pieces as labels; counting them would wait for the GPU.
        zeros_P = ratio_N.new_zeros(len(ratio_N))
        ratio_P = zeros_P.index_add(0, piece_N, ratio_N)
        num_labels_P = zeros_P.index_add(0, piece_N, zeros_P + 1)
        loss_P = 2 / beta * (beta * ratio_P).logaddexp(zeros_P)
        share_N = (loss_P / num_labels_P.clamp_min(1)).index_select(0, piece_N)
        return share_N.where(terms.forget_N, loss_N)


class GradientAscent(Loss[GradientAscentConfig]):
    """Replace the loss of each label to be unlearned by gradient ascent up to a ceiling."""

    def change_losses(self, loss_N: "Tensor", terms: "TokenTerms") -> "Tensor":
        """Return the losses, negated for labels to be unlearned; no gradient at the ceiling."""
        assert terms.forget_N is not None, "a run without documents to unlearn is rejected"
        return (-terms.nll_N.clamp_max(self.config.ceiling)).where(terms.forget_N, loss_N)


class NgramPenalty(Loss[NgramPenaltyConfig]):
    """Penalise n-grams of labels that the model predicts far better than before training.

        gain_t    = reference_nll_t - nll_t                 gain from training (nats)
        G_t       = mean of gain over the n labels up to t
        loss_t   <- loss_t + weight max(0, G_t - margin)    if all n are in one piece

    After Slack & Al Moubayed, TACL 2025 (arXiv 2510.11372): cross-entropy plus a multiple of a
    penalty where the fine-tuned model's confidence in an n-gram exceeds the base model's. The
    paper's formula was not available: this implements that sentence. The base model is the run's
    model before its first step.

    A label counts in each of the n windows that contain it: if all are beyond the margin, its
    gradient is that of its NLL times (1 - weight). Labels that another setting dropped are skipped:
    the n labels are those that receive loss.
    """

    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll", "reference_nll"})

    def change_losses(self, loss_N: "Tensor", terms: "TokenTerms") -> "Tensor":
        """Return the losses with each window's penalty added at its last label."""
        n = self.config.n
        if len(loss_N) < n:
            return loss_N
        gain_W, whole_W = self._find_gains(terms)
        loss_N = loss_N.clone()
        loss_N[n - 1 :] += self.config.weight * (gain_W - self.config.margin).relu() * whole_W
        return loss_N

    def count_windows(self, terms: "TokenTerms") -> "tuple[Tensor, Tensor]":
        """Return the number of windows beyond the margin and the number of all windows."""
        if len(terms.nll_N) < self.config.n:
            return terms.nll_N.new_zeros(()), terms.nll_N.new_zeros(())
        gain_W, whole_W = self._find_gains(terms)
        return ((gain_W > self.config.margin) & whole_W).sum(), whole_W.sum()

    def _find_gains(self, terms: "TokenTerms") -> "tuple[Tensor, Tensor]":
        """Return the mean gain of each n consecutive labels and whether they are in one piece."""
        assert terms.reference_nll_N is not None, "listed in needs"
        assert terms.piece_N is not None, "the trainer adds pieces with the reference"
        n = self.config.n
        gain_N = terms.reference_nll_N - terms.nll_N
        # Pieces are numbered in the order of labels: if first and last agree, so do all between.
        whole_W = terms.piece_N[: len(gain_N) - n + 1] == terms.piece_N[n - 1 :]
        return gain_N.unfold(0, n, 1).mean(1), whole_W
