"""N-gram penalty: runs of labels that the model knows far better than before cost more.

    gain_t    = reference_nll_t - nll_t                 what training has added (nats)
    G_t       = mean of gain over the n labels up to t
    loss_t   <- loss_t + weight max(0, G_t - margin)    where all n stand in one piece

After Slack & Al Moubayed, TACL 2025 (arXiv 2510.11372): cross-entropy plus a multiple of a penalty
where the fine-tuned model's confidence in an n-gram exceeds the base model's. The paper's formula
was not seen: this is our reading of that sentence, and no figure of theirs is claimed. The base
model is the run's own, before its first step.

A label counts in each of the n windows that hold it: where all are beyond the margin its gradient
is that of its NLL times (1 - weight). Labels that another setting dropped are passed over: the n
are those that receive loss.
"""

from typing import TYPE_CHECKING, ClassVar

from memguard.config.mitigations import NgramPenaltyConfig

if TYPE_CHECKING:
    from torch import Tensor

    from memguard.mitigation import Need, Stage, TokenTerms


class NgramPenalty:
    """Penalise what n labels in a row have gained beyond a margin."""

    stage: "ClassVar[Stage]" = "loss"
    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll", "reference_nll"})

    def __init__(self, config: NgramPenaltyConfig) -> None:
        self.config = config

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
        """Return how many windows are beyond the margin, and how many there are."""
        if len(terms.nll_N) < self.config.n:
            return terms.nll_N.new_zeros(()), terms.nll_N.new_zeros(())
        gain_W, whole_W = self._find_gains(terms)
        return ((gain_W > self.config.margin) & whole_W).sum(), whole_W.sum()

    def _find_gains(self, terms: "TokenTerms") -> "tuple[Tensor, Tensor]":
        """Return the mean gain of each n labels in a row, and whether they stand in one piece."""
        assert terms.reference_nll_N is not None, "it was asked for"
        assert terms.piece_N is not None, "whoever hands in the reference knows the pieces"
        n = self.config.n
        gain_N = terms.reference_nll_N - terms.nll_N
        # Pieces are numbered in the order of labels: where first and last agree, so do all between.
        whole_W = terms.piece_N[: len(gain_N) - n + 1] == terms.piece_N[n - 1 :]
        return gain_N.unfold(0, n, 1).mean(1), whole_W
