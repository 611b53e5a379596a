"""Mitigations in transformers' Trainer: labels masked by the collator, losses by the loss function.

    batch    = collator(features)                              dropped labels become -100
    num      = kept labels of all micro-batches and processes  counted by the Trainer, afterwards
    loss     = reduce(terms of the kept labels) / num          on each process, times their number

Gradient accumulation and several processes therefore give the loss of one large batch, like
memguard's own step. The Trainer evaluates with the same collator and loss, so its evaluation loss
covers only the kept labels; memguard's audit is not limited to them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memguard.config.mitigations import FORGETTING
from memguard.errors import ConfigError
from memguard.integrations.goldfish import (
    GoldfishCollator,
    goldfish_dataset,
    validate_mitigations,
    wrap_collator,
)
from memguard.integrations.memfree import MemFreeLogitsProcessor
from memguard.integrations.split import split_for_audit
from memguard.integrations.trainer_audit import MemorizationAuditCallback
from memguard.mitigation import build_mitigations
from memguard.model.lm_head import Head
from memguard.model.loss import token_terms
from memguard.records import IGNORE_LABEL

__all__ = [
    "GoldfishCollator",
    "MemFreeLogitsProcessor",
    "MemorizationAuditCallback",
    "MitigatedLoss",
    "goldfish_dataset",
    "goldfish_loss_func",
    "split_for_audit",
    "wrap_collator",
]

# Tokens whose logits are copied to fp32 at a time.
_CHUNK_TOKENS = 1024


_DROPS_LABELS = (
    "drops labels, which a loss function cannot do because it does not receive the tokens. Use "
    "GoldfishCollator"
)
_NO_LOSSES: dict[str, str] = {
    "goldfish": _DROPS_LABELS,
    "token_dropout": _DROPS_LABELS,
    "neftune": "adds noise to the embeddings, which a loss function cannot do: set the Trainer's "
    "own 'neftune_noise_alpha'",
    "deduplicate": "removes documents before training, which a loss function cannot do",
    "dp_sgd": "clips each row's gradient, which a loss function cannot do: use opacus with your "
    "own loop",
    **dict.fromkeys(
        ("ngram_penalty", *FORGETTING),
        "needs each label's document and its loss before training, which the Trainer does not "
        "provide; use memguard's own trainer",
    ),
}


class MitigatedLoss:
    """A `compute_loss_func` with the settings of ``mitigations:`` that change a label's loss.

    Without settings it is the plain NLL, like `goldfish_loss_func`.
    """

    def __init__(self, mitigations: Sequence[Mapping[str, Any]] = ()) -> None:
        """Validate the settings and build the loss.

        Args:
            mitigations: as in a run's YAML, e.g. ``[{"name": "focal", "gamma": 2}]``.

        Raises:
            ConfigError: invalid settings, settings that cannot be combined, or settings that a
                loss function cannot implement.
        """
        configs = validate_mitigations(mitigations)
        names = [config.name for config in configs if config.name in _NO_LOSSES]
        if names:
            raise ConfigError(*(f"'{name}' {_NO_LOSSES[name]}" for name in names))
        self._mitigations = build_mitigations(configs, special_ids=[])

    def __call__(
        self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Return the sum of the losses / number of labels, differentiable.

        Args:
            outputs: the model's outputs, with ``logits`` ``[B, T, V]``.
            labels: ``[B, T]``; the label at t is the token at t.
            num_items_in_batch: kept labels of the whole step; None counts those of this batch.
        """
        targets_BT = labels[:, 1:].to(outputs.logits.device)
        kept_BT = targets_BT != IGNORE_LABEL
        labels_N = targets_BT[kept_BT]
        logits_NV = outputs.logits[:, :-1][kept_BT]
        head = Head(weight_VD=None, vocab_size=logits_NV.shape[-1], chunk_tokens=_CHUNK_TOKENS)
        terms = token_terms(head, logits_NV, labels_N, self._mitigations.needs)
        total = self._mitigations.reduce(terms)
        if num_items_in_batch is None:
            num_items_in_batch = max(len(labels_N), 1)
        # Avoids 0 / 0 if all labels of a step were dropped.
        return total / torch.as_tensor(num_items_in_batch, device=total.device).clamp_min(1)


def goldfish_loss_func(
    outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Return the goldfish loss of a batch from `GoldfishCollator`, for `compute_loss_func`.

    The NLL of the kept labels, divided by their number over the whole step; for models whose own
    loss does not accept ``num_items_in_batch``. The arguments are those of `MitigatedLoss`.
    """
    return MitigatedLoss()(outputs, labels, num_items_in_batch)
