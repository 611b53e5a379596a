"""What is done in training so that less is memorised. Pure functions of ids, labels and losses.

    goldfish.py  drop one label in k, the same ones each time a text is seen

A mitigation has a *stage* (where it acts) and *needs* (which per-token terms the vocabulary layer
must compute for it). None of them knows the mesh, the packing or the optimizer: labels are masked
document by document before packing, and losses are reduced token by token.

    labels = mitigations.mask_labels(input_ids, labels)          stage "labels"
    loss   = mitigations.reduce(terms) / number of labels left   stage "loss"
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from memguard.config import MitigationConfig
from memguard.mitigation.goldfish import Goldfish
from memguard.records import IGNORE_LABEL

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "MITIGATIONS",
    "Goldfish",
    "Mitigation",
    "Mitigations",
    "TokenTerms",
    "build_mitigations",
]

Stage = Literal["data", "labels", "loss", "model", "optimizer", "decoding"]
Need = Literal["nll", "entropy", "mean_logprob", "reference_nll"]
_ALWAYS_NEEDED: frozenset[Need] = frozenset({"nll"})


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTerms:
    """Per-token terms of N labels that are left."""

    nll_N: "Tensor"
    """Negative log-likelihood (nats)."""


class Mitigation(Protocol):
    """One entry of `mitigations:`."""

    stage: ClassVar[Stage]
    needs: ClassVar[frozenset[Need]]

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


MITIGATIONS: dict[str, type[Goldfish]] = {"goldfish": Goldfish}


class Mitigations:
    """The settings of a run, applied in their order."""

    def __init__(self, mitigations: Sequence[Mitigation]) -> None:
        self.sums_nll = all(m.stage == "labels" for m in mitigations)
        """Whether the loss is the plain sum of the kept labels' losses."""
        self._label_stage = tuple(m for m in mitigations if m.stage == "labels")
        self.needs: frozenset[Need] = _ALWAYS_NEEDED.union(*(m.needs for m in mitigations))

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
        return terms.nll_N.sum()


def build_mitigations(
    configs: Sequence[MitigationConfig], *, special_ids: Sequence[int]
) -> Mitigations:
    """Make the mitigations of a run.

    Args:
        configs: entries of `mitigations:`.
        special_ids: the tokenizer's special tokens, which are never dropped.
    """
    return Mitigations(
        [MITIGATIONS[config.name](config, special_ids=special_ids) for config in configs]
    )
