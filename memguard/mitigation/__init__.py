"""Training methods that reduce memorization: pure functions of token ids, labels and losses.

    goldfish.py    drops one label in k, chosen by a hash of the tokens before it; token dropout
    letters.py     the letters that tokens spell, for goldfish with `normalise: text`
    k_schedule.py  which documents are trained with a lower k
    losses.py      smoothing, focal, confidence penalty, clipping, flooding, n-gram penalty, and the
                   unlearning losses NPO and gradient ascent
    neftune.py     noise on the embeddings; not a defence

A mitigation has a *stage* (where it acts) and *needs* (the fields of `TokenTerms` that it reads).
The head computes these fields, except ``reference_nll``, which is measured before the
first step. No mitigation depends on the mesh, the packing or the optimizer: labels are masked
document by document before packing. Losses are computed per token; some also read the preceding
tokens or the whole piece.

    labels = mitigations.mask_labels(input_ids, labels)          stage "labels"
    loss   = mitigations.reduce(terms) / number of labels left   stage "loss"
    hidden = embeddings + mitigations.of_model.draw_noise(...)   stage "model"

`config/mitigations.py` checks which settings can be combined.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from memguard.config import GoldfishConfig, MitigationConfig
from memguard.mitigation.goldfish import Goldfish, TokenDropout
from memguard.mitigation.letters import TokenLetters
from memguard.mitigation.losses import (
    ConfidencePenalty,
    Flooding,
    Focal,
    GradientAscent,
    LabelSmoothing,
    Loss,
    LossClipping,
    NgramPenalty,
    Npo,
)
from memguard.mitigation.neftune import Neftune
from memguard.records import IGNORE_LABEL

if TYPE_CHECKING:
    from torch import Tensor


Stage = Literal["data", "labels", "loss", "model", "optimizer", "decoding"]
Need = Literal["nll", "entropy", "mean_logprob", "reference_nll"]
_ALWAYS_NEEDED: frozenset[Need] = frozenset({"nll"})


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTerms:
    """Inputs of a loss for the N labels that are kept, in fp32; None if not needed."""

    nll_N: "Tensor"
    """-log p(label) (nats)."""
    entropy_N: "Tensor | None" = None
    """-sum_v p(v) log p(v) (nats)."""
    mean_logprob_N: "Tensor | None" = None
    """Mean over the vocabulary of log p(v) (nats)."""
    # The trainer adds the following fields; the head does not compute them.
    reference_nll_N: "Tensor | None" = None
    """nll_N under the starting model (nats)."""
    piece_N: "Tensor | None" = None
    """Index of the piece of a document that contains the label, from 0 in the order of labels."""
    forget_N: "Tensor | None" = None
    """Whether the label's document is to be unlearned."""


DONE_ELSEWHERE: dict[str, Stage] = {"deduplicate": "data", "dp_sgd": "optimizer"}
"""Settings of other stages, which are implemented in `data.duplicates` and `train.dp_sgd`."""

MITIGATIONS: dict[str, type[Any]] = {
    "goldfish": Goldfish,
    "token_dropout": TokenDropout,
    "label_smoothing": LabelSmoothing,
    "focal": Focal,
    "confidence_penalty": ConfidencePenalty,
    "loss_clipping": LossClipping,
    "flooding": Flooding,
    "ngram_penalty": NgramPenalty,
    "npo": Npo,
    "gradient_ascent": GradientAscent,
    "neftune": Neftune,
}
"""Each setting by its name. Losses are changed in this order: first the loss of a label, then its
weight, then its bounds, then added penalties. Unlearning losses come last and replace the loss of
the labels to be unlearned."""


def drops_labels(config: MitigationConfig) -> bool:
    """Return whether a setting drops labels from the loss."""
    built = MITIGATIONS.get(config.name)
    return built is not None and built.stage == "labels"


class Mitigations:
    """The mitigations of a run: masks labels, and changes losses in the order of `MITIGATIONS`."""

    def __init__(self, built: Sequence[Goldfish | TokenDropout | Loss[Any] | Neftune]) -> None:
        """Combine mitigations, losses in the order given; `build_mitigations` creates them."""
        self._label_stage = [one for one in built if isinstance(one, Goldfish | TokenDropout)]
        self._loss_stage = [one for one in built if isinstance(one, Loss)]
        self.sums_nll = not self._loss_stage
        """Whether the loss is the plain sum of the kept labels' losses."""
        self.goldfish = next((one for one in built if isinstance(one, Goldfish)), None)
        self.of_model = next((one for one in built if isinstance(one, Neftune)), None)
        """Acts on the token embeddings in training; None leaves them unchanged."""
        self.needs: frozenset[Need] = _ALWAYS_NEEDED.union(*(one.needs for one in self._loss_stage))

    def mask_labels(
        self,
        input_ids: NDArray[np.integer],
        labels: NDArray[np.int64],
        *,
        document_ids: NDArray[np.integer] | None = None,
        generator: np.random.Generator,
    ) -> NDArray[np.int64]:
        """Return a copy of the labels with the dropped ones ignored.

        Args:
            input_ids: ``[..., T]`` tokens; the mask depends on these and never on the labels.
            labels: ``[..., T]`` in transformers' convention: the label at t is the token at t.
            document_ids: ``[..., T]`` identifies the documents of a packed row; None means that
                each row is one document.
            generator: random numbers for settings that need them.
        """
        labels = labels.copy()
        for mitigation in self._label_stage:
            labels[mitigation.drop_mask(input_ids, document_ids, generator)] = IGNORE_LABEL
        return labels

    def reduce(self, terms: TokenTerms) -> "Tensor":
        """Return the sum of losses over the labels that are kept; the caller divides once."""
        loss_N = terms.nll_N
        for mitigation in self._loss_stage:
            loss_N = mitigation.change_losses(loss_N, terms)
        return loss_N.sum()

    def count_windows(self, terms: TokenTerms) -> "tuple[()] | tuple[Tensor, Tensor]":
        """Return the numbers of an n-gram penalty's windows beyond its margin and in total.

        Empty without an n-gram penalty.
        """
        for mitigation in self._loss_stage:
            if isinstance(mitigation, NgramPenalty):
                return mitigation.count_windows(terms)
        return ()


def build_mitigations(
    configs: Sequence[MitigationConfig],
    *,
    special_ids: Sequence[int],
    token_texts: Callable[[], Sequence[str]] | None = None,
) -> Mitigations:
    """Build the mitigations of a run.

    Goldfish never drops ``special_ids``. ``token_texts`` returns each token's text ``[V]``, and is
    called if a setting hashes text.
    """
    built: list[Any] = [
        build_goldfish(config, special_ids=special_ids, token_texts=token_texts)
        if isinstance(config, GoldfishConfig)
        else MITIGATIONS[config.name](config)
        for config in configs
        if config.name not in DONE_ELSEWHERE
    ]
    order = list(MITIGATIONS)
    return Mitigations(sorted(built, key=lambda one: order.index(one.config.name)))


def build_goldfish(
    config: GoldfishConfig,
    *,
    special_ids: Sequence[int],
    token_texts: Callable[[], Sequence[str]] | None,
) -> Goldfish:
    """Build the goldfish mask of a run; for the arguments see `build_mitigations`."""
    letters = None
    if config.normalise == "text":
        assert token_texts is not None, "'normalise: text' needs the text of tokens"
        letters = TokenLetters(token_texts())
    return Goldfish(config, special_ids=special_ids, letters=letters)
