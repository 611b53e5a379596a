"""The settings of each mitigation, and which of them do not go together."""

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from memguard.config.settings import MAX_COUNT, NonNegative, Positive, PositiveInt, Settings

_Share = Annotated[float, Field(gt=0, lt=1)]
_K = Annotated[int, Field(ge=2, le=MAX_COUNT)]
_Words = Annotated[int, Field(ge=1, le=1000)]


class GoldfishConfig(Settings):
    """Goldfish loss: 1 in k labels never receives loss, the same ones each time a text is seen."""

    name: Literal["goldfish"] = Field(description="Which mitigation.")
    k: _K = Field(4, description="Drop one label in k.")
    context_width: _Words = Field(
        13, description="Tokens before the label that decide whether it is dropped (tokens)."
    )
    mode: Literal["hash", "hash_reference", "static", "random"] = Field(
        "hash",
        description="hash: of the tokens before the label; hash_reference: bit-equal to the "
        "published code; static: every k-th; random: fresh each time (the ablation).",
    )
    normalise: Literal["none", "text"] = Field(
        "none",
        description="text: mode hash looks at letters and digits alone, four for each token of "
        "'context_width', so that copies with other line breaks, spaces, punctuation or case lose "
        "the same labels.",
    )
    k_by_dose: dict[PositiveInt, _K] = Field(
        {},
        description="Lower k for documents trained often, near-duplicates counted: {16: 3, 64: 2} "
        "drops 1 in 3 labels from 16 times on and 1 in 2 from 64.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        ks = [self.k, *(k for _, k in sorted(self.k_by_dose.items()))]
        if any(later >= k for k, later in itertools.pairwise(ks)):
            raise ValueError(
                f"'k_by_dose' must lower k with every dose, from 'k' = {self.k} on; "
                f"got {dict(sorted(self.k_by_dose.items()))}"
            )
        if self.normalise == "text" and self.mode != "hash":
            raise ValueError(
                f"'normalise: text' is for mode 'hash', which looks at the text; got '{self.mode}'"
            )
        return self


class TokenDropoutConfig(Settings):
    """Labels are dropped by chance, others each time a text is seen: over epochs all are learnt."""

    name: Literal["token_dropout"] = Field(description="Which mitigation.")
    rate: _Share = Field(0.25, description="Share of the labels that are dropped.")


class LabelSmoothingConfig(Settings):
    """A part of each target is spread over the vocabulary, so that certainty does not pay."""

    name: Literal["label_smoothing"] = Field(description="Which mitigation.")
    epsilon: _Share = Field(0.1, description="Part of the target that is spread.")


class FocalConfig(Settings):
    """Labels that are likely already count less."""

    name: Literal["focal"] = Field(description="Which mitigation.")
    gamma: Positive = Field(2.0, description="Each loss is multiplied by (1 - p)^gamma.")


class ConfidencePenaltyConfig(Settings):
    """Certain predictions cost: the entropy of each is rewarded."""

    name: Literal["confidence_penalty"] = Field(description="Which mitigation.")
    beta: Positive = Field(0.1, description="What a nat of entropy is worth (nats).")


class LossClippingConfig(Settings):
    """Labels whose loss is below the floor or above the ceiling teach nothing."""

    name: Literal["loss_clipping"] = Field(description="Which mitigation.")
    floor: Positive | None = Field(
        0.5, description="A label learnt so far is learnt no further (nats); null is no floor."
    )
    ceiling: Positive | None = Field(
        None, description="A label that surprises more is left out (nats); null is no ceiling."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.floor is None and self.ceiling is None:
            raise ValueError("'loss_clipping' without 'floor' and 'ceiling' does nothing")
        if self.floor is not None and self.ceiling is not None and self.floor >= self.ceiling:
            raise ValueError(
                f"'floor' must be below 'ceiling'; got {self.floor:g} and {self.ceiling:g}"
            )
        return self


class FloodingConfig(Settings):
    """A label's loss is kept from falling below a level: where it has, its gradient turns round."""

    name: Literal["flooding"] = Field(description="Which mitigation.")
    level: Positive = Field(1.0, description="b of |loss - b| + b (nats a label).")


class NgramPenaltyConfig(Settings):
    """Runs of labels that the model knows far better than before this training cost more."""

    name: Literal["ngram_penalty"] = Field(description="Which mitigation.")
    n: _Words = Field(8, description="Labels of a run, one after the other (labels).")
    weight: Positive = Field(
        1.0,
        description="What is beyond the margin costs so many times: 1 stops learning there, more "
        "pulls back, less slows down.",
    )
    margin: NonNegative = Field(
        1.0,
        description="Gain over the starting model that is left alone (nats a label, the run's "
        "mean).",
    )


class NpoConfig(Settings):
    """Negative preference optimisation: documents of 'data.forget' become less likely.

    Each piece pulls the less, the further it has fallen below what the starting model gave it.
    """

    name: Literal["npo"] = Field(description="Which mitigation.")
    beta: Positive = Field(
        0.1,
        description="How soon a piece counts as forgotten: about when it has lost 1 / beta nats in "
        "all (1 / nats); towards 0 it is gradient ascent.",
    )


class GradientAscentConfig(Settings):
    """The loss of documents of 'data.forget' is climbed, label by label, up to a ceiling."""

    name: Literal["gradient_ascent"] = Field(description="Which mitigation.")
    ceiling: Positive = Field(
        5.0,
        description="A label that surprises so much is left alone (nats): without an end to the "
        "climb the model would be lost.",
    )


class NeftuneConfig(Settings):
    """Noise on the token embeddings in training: a utility method, no defence (the control)."""

    name: Literal["neftune"] = Field(description="Which mitigation.")
    alpha: Positive = Field(
        5.0, description="Noise is uniform up to alpha / sqrt(tokens of the row x features)."
    )


class DeduplicateConfig(Settings):
    """Near-copies are removed before training; the first of them in file order stays."""

    name: Literal["deduplicate"] = Field(description="Which mitigation.")
    similarity: Annotated[float, Field(ge=0.2, le=1)] | Literal["exact"] = Field(
        0.8,
        description="Documents as similar are copies: shared runs of words / runs of words in "
        "either; exact: the same text, character by character.",
    )
    num_words: _Words = Field(5, description="Words of a run (words); not for 'exact'.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.similarity == "exact" and self.num_words != 5:
            raise ValueError("'num_words' does nothing with 'similarity: exact'; leave it out")
        return self


class DpSgdConfig(Settings):
    """DP-SGD: each row's gradient is clipped, and noise is added to their sum (one process)."""

    name: Literal["dp_sgd"] = Field(description="Which mitigation.")
    # The accountant divides by its square.
    noise_multiplier: Annotated[float, Field(ge=1e-6, le=1e6)] = Field(
        1.0, description="Standard deviation of the noise, as a share of 'max_grad_norm'."
    )
    max_grad_norm: Positive = Field(1.0, description="Each row's gradient is clipped to this norm.")
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(
        1e-5, description="Epsilon is given at this delta, which should be below 1 / rows."
    )


MitigationConfig = Annotated[
    GoldfishConfig
    | TokenDropoutConfig
    | LabelSmoothingConfig
    | FocalConfig
    | ConfidencePenaltyConfig
    | LossClippingConfig
    | FloodingConfig
    | NgramPenaltyConfig
    | NpoConfig
    | GradientAscentConfig
    | NeftuneConfig
    | DeduplicateConfig
    | DpSgdConfig,
    Field(discriminator="name"),
]
"""One entry of `mitigations:`, told apart by its name."""

MitigationT = TypeVar("MitigationT", bound=Settings)


def find_mitigation(
    configs: Iterable[MitigationConfig], kind: type[MitigationT]
) -> MitigationT | None:
    """Return the settings of one mitigation, which is named once at most; None without it."""
    return next((each for each in configs if isinstance(each, kind)), None)


FORGETTING = ("npo", "gradient_ascent")
"""Settings for the documents of 'data.forget' alone."""

_APART: Sequence[tuple[frozenset[str], str]] = (
    (
        frozenset({"label_smoothing", "focal"}),
        "each says what a label's loss is, and nobody has said what both together are",
    ),
    (
        frozenset({"label_smoothing", "confidence_penalty"}),
        "both pull the prediction towards all tokens alike; tune one of them",
    ),
    (
        frozenset({"npo", "gradient_ascent"}),
        "each says how the documents of 'data.forget' are forgotten",
    ),
)
_FLOORED = "both keep a label's loss up, and the higher level makes the other one useless"


_NOT_BESIDE: Sequence[tuple[str, str, str]] = (
    (
        "deduplicate",
        "data.study",
        "which takes one document of each cluster of near-duplicates already: it would do nothing",
    ),
    ("dp_sgd", "train.micro_batch_size", "which would do nothing: each row has its own backward"),
    (
        "dp_sgd",
        "budget",
        "which acts on what was found in the documents, and no epsilon covers that",
    ),
)


_TIGHTENING = "budget.action: tighten"
_NESTED = ("hash", "hash_reference")
"""Modes of goldfish in which a lower k drops what a higher one does, and more, each epoch."""


def check_mitigations(configs: Sequence[MitigationConfig], *, beside: Collection[str] = ()) -> None:
    """Refuse settings that cannot be combined, or of which one would do nothing.

    Args:
        configs: entries of `mitigations:`.
        beside: other settings of the run that are in use.

    Raises:
        ValueError: with the names, the reason and the way out.
    """
    names = [config.name for config in configs]
    if len(set(names)) != len(names):
        raise ValueError(f"'mitigations' names one twice: {', '.join(names)}")
    for pair, reason in _APART:
        if pair <= set(names):
            _refuse(sorted(pair), reason)
    for name, setting, reason in _NOT_BESIDE:
        if name in names and setting in beside:
            raise ValueError(
                f"'mitigations' cannot have {name} beside '{setting}', {reason}. Leave one out"
            )
    by_name = {config.name: config for config in configs}
    match by_name.get("goldfish"), by_name.get("token_dropout"):
        case GoldfishConfig(mode="random"), TokenDropoutConfig():
            _refuse(["goldfish", "token_dropout"], "mode 'random' is token dropout already")
    match by_name.get("goldfish"):
        case GoldfishConfig(mode=mode) if mode not in _NESTED and _TIGHTENING in beside:
            raise ValueError(
                f"'mitigations' cannot have goldfish of mode '{mode}' beside '{_TIGHTENING}': with "
                "a lower k labels would be learnt that were dropped before. Take mode 'hash', or "
                "action 'stop'"
            )
    match by_name.get("flooding"), by_name.get("loss_clipping"):
        case FloodingConfig(), LossClippingConfig(floor=float()):
            _refuse(["flooding", "loss_clipping"], _FLOORED)


def check_forgetting(
    configs: Sequence[MitigationConfig], *, forget: Sequence[str], repetitions: int | None
) -> None:
    """Refuse documents to be forgotten without a way to, and a way without documents.

    Raises:
        ValueError: with the reason and the way out.
    """
    ways = [config.name for config in configs if config.name in FORGETTING]
    if forget and not ways:
        raise ValueError(
            "'data.forget' without 'npo' or 'gradient_ascent' in 'mitigations' would be trained; "
            "name one of them"
        )
    if ways and not forget:
        raise ValueError(
            f"'mitigations' has {ways[0]}, which is for the documents of 'data.forget'; name some "
            "there, or leave it out"
        )
    if repetitions is not None and not forget:
        raise ValueError("'data.forget_repetitions' does nothing without 'data.forget'")


def _refuse(names: Sequence[str], reason: str) -> None:
    raise ValueError(f"'mitigations' cannot have {' and '.join(names)}: {reason}. Leave one out")
