"""Post-hoc forgetting: documents of the forget list become less likely, all others are trained.

    npo               (2 / beta) log(1 + (p(y) / p_0(y))^beta)    of each piece y of a document
    gradient_ascent   -min(nll_t, ceiling)                        of each of its labels

p(y) is the probability of a piece, the product over its labels; p_0 that of the starting model.
NPO is Zhang et al. 2024, "Negative Preference Optimization", as it is commonly written,
-(2 / beta) log sigmoid(-beta log(p / p_0)); the paper was not read for this, and no figure of it is
claimed. Its gradient is that of gradient ascent times 2 p^beta / (p^beta + p_0^beta): 1 at the
start, and nearly 0 once the piece has lost a few times 1 / beta nats, whatever its length. So it
comes to rest; plain ascent would not, and has a ceiling here.

Both take the place of whatever loss the settings before them have made of these labels.
"""

from typing import TYPE_CHECKING, ClassVar

from memguard.config.mitigations import GradientAscentConfig, NpoConfig

if TYPE_CHECKING:
    from torch import Tensor

    from memguard.mitigation import Need, Stage, TokenTerms


class Npo:
    """Make pieces less likely than they were, the less so the further they have fallen."""

    stage: "ClassVar[Stage]" = "loss"
    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll", "reference_nll"})

    def __init__(self, config: NpoConfig) -> None:
        self.config = config

    def change_losses(self, loss_N: "Tensor", terms: "TokenTerms") -> "Tensor":
        """Return the losses, those to be forgotten an equal share of their piece's."""
        assert terms.reference_nll_N is not None, "it was asked for"
        assert terms.piece_N is not None, "whoever hands in the reference knows the pieces"
        assert terms.forget_N is not None, "a run without documents to forget is refused"
        beta, piece_N = self.config.beta, terms.piece_N
        ratio_N = terms.reference_nll_N - terms.nll_N
        # At most as many pieces as labels: to count them would wait for the GPU.
        zeros_P = ratio_N.new_zeros(len(ratio_N))
        ratio_P = zeros_P.index_add(0, piece_N, ratio_N)
        num_labels_P = zeros_P.index_add(0, piece_N, zeros_P + 1)
        loss_P = 2 / beta * (beta * ratio_P).logaddexp(zeros_P)
        share_N = (loss_P / num_labels_P.clamp_min(1)).index_select(0, piece_N)
        return share_N.where(terms.forget_N, loss_N)


class GradientAscent:
    """Climb each label's loss up to a ceiling."""

    stage: "ClassVar[Stage]" = "loss"
    needs: "ClassVar[frozenset[Need]]" = frozenset({"nll"})

    def __init__(self, config: GradientAscentConfig) -> None:
        self.config = config

    def change_losses(self, loss_N: "Tensor", terms: "TokenTerms") -> "Tensor":
        """Return the losses, those to be forgotten negative; at the ceiling without a gradient."""
        assert terms.forget_N is not None, "a run without documents to forget is refused"
        return (-terms.nll_N.clamp_max(self.config.ceiling)).where(terms.forget_N, loss_N)
