"""The settings of each mitigation, and checks for conflicts between them."""

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from memguard.config.settings import MAX_COUNT, NonNegative, Positive, PositiveInt, Settings
from memguard.errors import require_library

_Share = Annotated[float, Field(gt=0, lt=1)]
_K = Annotated[int, Field(ge=2, le=MAX_COUNT)]
_Words = Annotated[int, Field(ge=1, le=1000)]


class GoldfishConfig(Settings):
    """Goldfish loss: 1 in k labels never receives loss, the same ones at each repetition."""

    name: Literal["goldfish"] = Field(description="Which mitigation.")
    k: _K = Field(4, description="Drop one label in k.")
    context_width: _Words = Field(
        13, description="Tokens before the label that decide whether it is dropped (tokens)."
    )
    mode: Literal["hash", "hash_reference", "static", "random"] = Field(
        "hash",
        description="hash: by the tokens before the label; hash_reference: bit-equal to the "
        "published code; static: every k-th; random: drawn at each repetition (the ablation).",
    )
    normalise: Literal["none", "text"] = Field(
        "none",
        description="text: mode hash reads only letters and digits, four for each token of "
        "'context_width', so that copies with other line breaks, spaces, punctuation or case drop "
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
                f"'normalise: text' is for mode 'hash', which reads the text; got '{self.mode}'"
            )
        return self


class TokenDropoutConfig(Settings):
    """Labels are dropped at random, different ones each epoch, so that all are trained in time."""

    name: Literal["token_dropout"] = Field(description="Which mitigation.")
    rate: _Share = Field(0.25, description="Share of the labels that are dropped.")


class LabelSmoothingConfig(Settings):
    """A part of each target is spread over the vocabulary, against overconfident predictions."""

    name: Literal["label_smoothing"] = Field(description="Which mitigation.")
    epsilon: _Share = Field(0.1, description="Part of the target that is spread.")


class FocalConfig(Settings):
    """Labels that the model already predicts with high probability have less weight."""

    name: Literal["focal"] = Field(description="Which mitigation.")
    gamma: Positive = Field(2.0, description="Each loss is multiplied by (1 - p)^gamma.")


class ConfidencePenaltyConfig(Settings):
    """The entropy of predictions is rewarded, so that confident ones cost more."""

    name: Literal["confidence_penalty"] = Field(description="Which mitigation.")
    beta: Positive = Field(0.1, description="Weight of the entropy in the loss.")


class LossClippingConfig(Settings):
    """Labels whose loss is below the floor or above the ceiling have no gradient."""

    name: Literal["loss_clipping"] = Field(description="Which mitigation.")
    floor: Positive | None = Field(
        0.5, description="Labels with a lower loss are left out (nats); null: no floor."
    )
    ceiling: Positive | None = Field(
        None, description="Labels with a higher loss are left out (nats); null: no ceiling."
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
    """The loss of a label is kept above a level: below it, the gradient is reversed."""

    name: Literal["flooding"] = Field(description="Which mitigation.")
    level: Positive = Field(1.0, description="Level b in |loss - b| + b (nats a label).")


class NgramPenaltyConfig(Settings):
    """A penalty on n-grams that the model predicts far better than the starting model."""

    name: Literal["ngram_penalty"] = Field(description="Which mitigation.")
    n: _Words = Field(8, description="Consecutive labels of an n-gram (labels).")
    weight: Positive = Field(
        1.0,
        description="Weight of the gain beyond the margin: 1 stops learning there, more reverses "
        "it, less slows it down.",
    )
    margin: NonNegative = Field(
        1.0,
        description="Gain over the starting model without a penalty (nats a label, mean over the "
        "n-gram).",
    )


class NpoConfig(Settings):
    """Negative preference optimisation: documents of 'data.forget' become less likely.

    The gradient of a piece shrinks as its likelihood falls below that under the starting model.
    """

    name: Literal["npo"] = Field(description="Which mitigation.")
    beta: Positive = Field(
        0.1,
        description="The gradient vanishes after a loss increase of about 1 / beta nats per piece "
        "(1 / nats); near 0 it is gradient ascent.",
    )


class GradientAscentConfig(Settings):
    """The loss of each label of 'data.forget' is increased up to a ceiling."""

    name: Literal["gradient_ascent"] = Field(description="Which mitigation.")
    ceiling: Positive = Field(
        5.0,
        description="Labels with a higher loss have no gradient (nats); without it the model "
        "would be destroyed.",
    )


class NeftuneConfig(Settings):
    """Noise on the token embeddings in training: for utility, not a defence (a control)."""

    name: Literal["neftune"] = Field(description="Which mitigation.")
    alpha: Positive = Field(
        5.0, description="Noise is uniform up to alpha / sqrt(tokens of the row x features)."
    )


class DeduplicateConfig(Settings):
    """Near-duplicates are removed before training; the first in file order is kept."""

    name: Literal["deduplicate"] = Field(description="Which mitigation.")
    similarity: Annotated[float, Field(ge=0.2, le=1)] | Literal["exact"] = Field(
        0.8,
        description="Jaccard similarity of word n-grams from which documents are copies; exact: "
        "the same text, whatever its case, white space and Unicode form.",
    )
    num_words: _Words = Field(5, description="Words of an n-gram (words); not for 'exact'.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.similarity == "exact" and self.num_words != 5:
            raise ValueError("'num_words' does nothing with 'similarity: exact'; leave it out")
        return self

    def check_library(self, *, by_import: bool = False) -> None:
        """Raise ConfigError if rensa, which finds near-copies, is needed and not installed."""
        if self.similarity != "exact":
            require_library(
                "rensa",
                "'mitigations': deduplicate",
                or_else=", or set 'similarity: exact'",
                by_import=by_import,
            )


class DpSgdConfig(Settings):
    """DP-SGD: each row's gradient is clipped, and noise is added to their sum (one process)."""

    name: Literal["dp_sgd"] = Field(description="Which mitigation.")
    # The privacy accountant divides by its square.
    noise_multiplier: Annotated[float, Field(ge=1e-6, le=1e6)] = Field(
        1.0, description="Standard deviation of the noise, as a share of 'max_grad_norm'."
    )
    max_grad_norm: Positive = Field(1.0, description="Each row's gradient is clipped to this norm.")
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(
        1e-5, description="Epsilon is computed at this delta, which should be below 1 / rows."
    )

    def check_library(self, *, by_import: bool = False) -> None:
        """Raise ConfigError if opacus, which computes epsilon, is not installed."""
        require_library("opacus", "'mitigations': dp_sgd", by_import=by_import)


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
"""One entry of `mitigations:`, identified by its name."""

MitigationT = TypeVar("MitigationT", bound=Settings)


def find_mitigation(
    configs: Iterable[MitigationConfig], kind: type[MitigationT]
) -> MitigationT | None:
    """Return the settings of one mitigation, which occurs at most once; None without it."""
    return next((config for config in configs if isinstance(config, kind)), None)


FORGETTING = ("npo", "gradient_ascent")
"""Mitigations that apply only to the documents of 'data.forget'."""

_APART: Sequence[tuple[frozenset[str], str]] = (
    (
        frozenset({"label_smoothing", "focal"}),
        "each defines the loss of a label, and their combination is not defined",
    ),
    (
        frozenset({"label_smoothing", "confidence_penalty"}),
        "both pull the prediction towards the uniform distribution; tune one of them",
    ),
    (
        frozenset({"npo", "gradient_ascent"}),
        "each defines how the documents of 'data.forget' are forgotten",
    ),
)
_FLOORED = "both keep a label's loss up, and the higher level makes the other one useless"


_EXCLUDED: Sequence[tuple[str, str, str]] = (
    (
        "deduplicate",
        "data.study",
        "which already takes one document per cluster of near-duplicates: it would do nothing",
    ),
    ("dp_sgd", "train.micro_batch_size", "which would do nothing: each row has its own backward"),
    (
        "dp_sgd",
        "budget",
        "which depends on audits of the documents, and epsilon does not cover that",
    ),
)


_TIGHTENING = "budget.action: tighten"
_NESTED = ("hash", "hash_reference")
"""Goldfish modes in which a lower k drops all labels that a higher k drops, and more."""


def check_mitigations(configs: Sequence[MitigationConfig], *, beside: Collection[str] = ()) -> None:
    """Check that mitigations can be combined, and that each has an effect.

    ``beside`` are other settings of the run that are in use.

    Raises:
        ValueError: names the settings, the reason and what to change.
    """
    names = [config.name for config in configs]
    if len(set(names)) != len(names):
        raise ValueError(f"'mitigations' contains an entry twice: {', '.join(names)}")
    for pair, reason in _APART:
        if pair <= set(names):
            _refuse(sorted(pair), reason)
    for name, setting, reason in _EXCLUDED:
        if name in names and setting in beside:
            raise ValueError(
                f"'mitigations': {name} cannot be combined with '{setting}', {reason}. Remove one"
            )
    goldfish = find_mitigation(configs, GoldfishConfig)
    mode = None if goldfish is None else goldfish.mode
    if mode == "random" and "token_dropout" in names:
        _refuse(["goldfish", "token_dropout"], "mode 'random' is token dropout already")
    if mode not in (None, *_NESTED) and _TIGHTENING in beside:
        raise ValueError(
            f"'mitigations': goldfish of mode '{mode}' cannot be combined with '{_TIGHTENING}': a "
            "lower k would train labels that were dropped. Use mode 'hash', or action 'stop'"
        )
    clipping = find_mitigation(configs, LossClippingConfig)
    if clipping is not None and clipping.floor is not None and "flooding" in names:
        _refuse(["flooding", "loss_clipping"], _FLOORED)


def check_forgetting(
    configs: Sequence[MitigationConfig], *, forget: Sequence[str], repetitions: int | None
) -> None:
    """Check that documents to forget and a mitigation that forgets are given together.

    Raises:
        ValueError: names the reason and what to change.
    """
    methods = [config.name for config in configs if config.name in FORGETTING]
    if forget and not methods:
        raise ValueError(
            "'data.forget' without 'npo' or 'gradient_ascent' in 'mitigations' would be trained; "
            "name one of them"
        )
    if methods and not forget:
        raise ValueError(
            f"'mitigations' has {methods[0]}, which is for the documents of 'data.forget'; name "
            "some there, or leave it out"
        )
    if repetitions is not None and not forget:
        raise ValueError("'data.forget_repetitions' does nothing without 'data.forget'")


def _refuse(names: Sequence[str], reason: str) -> None:
    raise ValueError(
        f"'mitigations': {' and '.join(names)} cannot be combined: {reason}. Remove one"
    )
