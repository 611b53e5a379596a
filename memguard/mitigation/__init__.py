"""What is done in training so that less is memorised. Pure functions of ids, labels and losses.

    goldfish.py       drop one label in k by a hash of the tokens before it
    token_dropout.py  drop labels at random, different ones each time
    k_schedule.py     which documents are trained with a lower k
    losses.py         smoothing, focal, confidence penalty, clipping, flooding, n-gram penalty,
                      and the losses that forget: NPO and gradient ascent
    neftune.py        noise on the embeddings, which is no defence

A mitigation has a *stage* (where it acts) and *needs* (which of the `TokenTerms` must be there: the
vocabulary layer computes them, but for ``reference_nll``, which is measured before the first step).
None of them knows the mesh, the packing or the optimizer: labels are masked document by document
before packing, and losses are reduced token by token, some with the tokens before or the whole
piece.

    labels = mitigations.mask_labels(input_ids, labels)          stage "labels"
    loss   = mitigations.reduce(terms) / number of labels left   stage "loss"
    hidden = embeddings + mitigations.of_model.draw_noise(...)   stage "model"

Which settings go together is decided with the configuration (`config/mitigations.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from memguard.config import GoldfishConfig, MitigationConfig
from memguard.mitigation.goldfish import Goldfish, TokenLetters
from memguard.mitigation.losses import (
    ConfidencePenalty,
    Flooding,
    Focal,
    GradientAscent,
    LabelSmoothing,
    LossClipping,
    NgramPenalty,
    Npo,
)
from memguard.mitigation.neftune import Neftune
from memguard.mitigation.token_dropout import TokenDropout
from memguard.records import IGNORE_LABEL

if TYPE_CHECKING:
    from torch import Tensor


Stage = Literal["data", "labels", "loss", "model", "optimizer", "decoding"]
Need = Literal["nll", "entropy", "mean_logprob", "reference_nll"]
_ALWAYS_NEEDED: frozenset[Need] = frozenset({"nll"})


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTerms:
    """What a loss may be made of, for N labels that are left, in fp32; None where not needed."""

    nll_N: "Tensor"
    """-log p(label) (nats)."""
    entropy_N: "Tensor | None" = None
    """-sum_v p(v) log p(v) (nats)."""
    mean_logprob_N: "Tensor | None" = None
    """Mean over the vocabulary of log p(v) (nats)."""
    # The trainer adds the following; the vocabulary layer does not know them.
    reference_nll_N: "Tensor | None" = None
    """nll_N under the starting model (nats)."""
    piece_N: "Tensor | None" = None
    """Index of the piece of a document that holds the label, from 0 in the order of labels."""
    forget_N: "Tensor | None" = None
    """Whether the label's document is to be forgotten."""


class LabelMitigation(Protocol):
    """One entry of `mitigations:` that drops labels."""

    @property
    def target_drop_rate(self) -> float:
        """Share of the labels it means to drop."""
        ...

    def drop_mask(
        self,
        input_ids: NDArray[np.integer],
        document_ids: NDArray[np.integer] | None,
        generator: np.random.Generator,
    ) -> NDArray[np.bool_]:
        """Return True where the label (the token at that place) receives no loss."""
        ...


class LossMitigation(Protocol):
    """One entry of `mitigations:` that changes what a label's loss is."""

    needs: ClassVar[frozenset[Need]]

    def change_losses(self, loss_N: "Tensor", terms: TokenTerms) -> "Tensor":
        """Return the losses ``[N]`` from those of the settings before it."""
        ...


class ModelMitigation(Protocol):
    """One entry of `mitigations:` that acts inside the model, on its token embeddings."""

    def draw_noise(
        self, num_tokens: int, num_features: int, generator: np.random.Generator
    ) -> NDArray[np.float32]:
        """Return what is added to the embeddings of one row, ``[num_tokens, num_features]``."""
        ...


DONE_ELSEWHERE: dict[str, Stage] = {"deduplicate": "data", "dp_sgd": "optimizer"}
"""Settings of other stages, of which nothing is built here: `data.deduplication` and `train.dp_sgd`
do what they say."""

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
"""Each setting by its name. Losses are changed in this order, which is the only sensible one: what
a label's loss is, then what it is worth, then where it ends, then what is due beside it; of what is
to be forgotten it is another one altogether."""


def drops_labels(config: MitigationConfig) -> bool:
    """Tell whether a setting leaves labels out of the loss."""
    built = MITIGATIONS.get(config.name)
    return built is not None and built.stage == "labels"


class Mitigations:
    """The settings of a run, labels masked in their order, losses changed in the table's."""

    def __init__(
        self,
        labels: Sequence[LabelMitigation],
        losses: Sequence[LossMitigation],
        of_model: ModelMitigation | None = None,
    ) -> None:
        """Take what `build_mitigations` has built.

        Args:
            labels: those that drop labels, in any order.
            losses: those that change losses, in the order in which they do.
            of_model: acts on the token embeddings.
        """
        self._label_stage, self._loss_stage = tuple(labels), tuple(losses)
        self.sums_nll = not losses
        """Whether the loss is the plain sum of the kept labels' losses."""
        self.of_model = of_model
        """Acts on the token embeddings in training; None leaves them."""
        self.needs: frozenset[Need] = _ALWAYS_NEEDED.union(*(each.needs for each in losses))

    @property
    def target_drop_rate(self) -> float:
        """Share of the labels that should be dropped, taking the settings as independent."""
        return 1 - float(np.prod([1 - m.target_drop_rate for m in self._label_stage]))

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
            document_ids: ``[..., T]`` tells documents of a packed row apart; None means that each
                row is one document.
            generator: for the settings that draw.
        """
        labels = labels.copy()
        for mitigation in self._label_stage:
            labels[mitigation.drop_mask(input_ids, document_ids, generator)] = IGNORE_LABEL
        return labels

    def reduce(self, terms: TokenTerms) -> "Tensor":
        """Return the sum of losses over the labels that are left; the caller divides once."""
        loss_N = terms.nll_N
        for mitigation in self._loss_stage:
            loss_N = mitigation.change_losses(loss_N, terms)
        return loss_N.sum()

    def count_windows(self, terms: TokenTerms) -> "tuple[()] | tuple[Tensor, Tensor]":
        """Return the windows of an n-gram penalty beyond its margin, and all; else nothing."""
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
    """Make the mitigations of a run.

    Args:
        configs: entries of `mitigations:`.
        special_ids: the tokenizer's special tokens, which a goldfish never drops.
        token_texts: returns each token's text ``[V]``; asked where text is hashed.
    """
    built: list[Any] = [
        build_goldfish(config, special_ids=special_ids, token_texts=token_texts)
        if isinstance(config, GoldfishConfig)
        else MITIGATIONS[config.name](config)
        for config in configs
        if config.name not in DONE_ELSEWHERE
    ]
    built.sort(key=lambda each: list(MITIGATIONS).index(each.config.name))
    return Mitigations(
        labels=[each for each in built if each.stage == "labels"],
        losses=[each for each in built if each.stage == "loss"],
        of_model=next((each for each in built if each.stage == "model"), None),
    )


def build_goldfish(
    config: GoldfishConfig,
    *,
    special_ids: Sequence[int],
    token_texts: Callable[[], Sequence[str]] | None,
) -> Goldfish:
    """Make the goldfish of a run; for the arguments see `build_mitigations`."""
    letters = None
    if config.normalise == "text":
        assert token_texts is not None, "the text of tokens is hashed"
        letters = TokenLetters.of(token_texts())
    return Goldfish(config, special_ids=special_ids, letters=letters)
