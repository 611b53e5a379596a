"""Mitigations in transformers' Trainer: labels masked by the collator, losses by the loss function.

    batch    = collator(features)                              dropped labels become -100
    num      = kept labels of all micro-batches and processes  counted by the Trainer, afterwards
    loss     = reduce(terms of the kept labels) / num          on each process, times their number

Gradient accumulation and several processes therefore give the loss of one large batch, like
memguard's own step. The Trainer evaluates with the same collator and loss, so its evaluation loss
covers only the kept labels; memguard's audit is not limited to them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from transformers import DataCollatorForSeq2Seq

from memguard.config import GoldfishConfig, MitigationConfig
from memguard.config.mitigations import FORGETTING, check_mitigations
from memguard.data.chat import find_special_ids
from memguard.data.tokenization import list_token_texts
from memguard.errors import ConfigError
from memguard.integrations.memfree import MemFreeLogitsProcessor
from memguard.integrations.trainer_audit import MemorizationAuditCallback
from memguard.mitigation import build_mitigations
from memguard.model.lm_head import Head
from memguard.model.loss import token_terms
from memguard.records import IGNORE_LABEL
from memguard.seeds import derive_generator

__all__ = [
    "GoldfishCollator",
    "MemFreeLogitsProcessor",
    "MemorizationAuditCallback",
    "MitigatedLoss",
    "goldfish_loss_func",
]

Collator = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
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
}


class GoldfishCollator:
    """Pads features into a batch, then drops labels like memguard's own loader.

    Packed rows must have ``position_ids`` that restart at each document, as padding-free collators
    produce; without them a row is one document.
    """

    def __init__(
        self, tokenizer: Any, collator: Collator | None = None, *, seed: int = 0, **settings: Any
    ) -> None:
        """Prepare the mask.

        Args:
            tokenizer: the model's tokenizer; its special tokens are never dropped.
            collator: creates batches with ``input_ids`` and ``labels``; None pads with the
                tokenizer, and uses all tokens as labels if features have none.
            seed: seed of mode ``random``.
            settings: settings of the mitigation ``goldfish``: k, context_width, mode, normalise.

        Raises:
            ConfigError: an unknown setting, an invalid value, or no padding token.
        """
        config = _validate([{"name": "goldfish", **settings}])
        self._mitigations = build_mitigations(
            config,
            special_ids=sorted(find_special_ids(tokenizer)),
            token_texts=lambda: list_token_texts(tokenizer),
        )
        self._collator = collator or _Padding(tokenizer)
        self._seed, self._num_batches = seed, 0

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch; ``labels`` ``[B, T]`` are IGNORE_LABEL at positions without loss."""
        batch = dict(self._collator(features))
        if "labels" not in batch:
            raise ConfigError(
                "the collator returns no 'labels'; pass a collator that does, or no collator"
            )
        input_ids = np.asarray(batch["input_ids"])
        document_ids = _number_documents(batch, input_ids.shape)
        generator = derive_generator(self._seed, "goldfish collator", self._num_batches)
        self._num_batches += 1
        labels = self._mitigations.mask_labels(
            input_ids,
            np.asarray(batch["labels"], dtype=np.int64),
            document_ids=document_ids,
            generator=generator,
        )
        # A document's first token is not predicted, so it must not be counted either.
        labels[:, 0] = IGNORE_LABEL
        labels[:, 1:][document_ids[:, 1:] != document_ids[:, :-1]] = IGNORE_LABEL
        batch["labels"] = torch.from_numpy(labels)
        return batch


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
        configs = _validate(mitigations)
        for config in configs:
            if config.name in _NO_LOSSES:
                raise ConfigError(f"'{config.name}' {_NO_LOSSES[config.name]}")
            if config.name in ("ngram_penalty", *FORGETTING):
                raise ConfigError(
                    f"'{config.name}' needs each label's document and its loss before training, "
                    "which the Trainer does not provide; use memguard's own trainer"
                )
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


class _Padding:
    """Pads features; all tokens are labels if features have none."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.pad_token_id is None:
            raise ConfigError(
                "the tokenizer has no padding token; set 'tokenizer.pad_token = "
                "tokenizer.eos_token' (EOS keeps its loss)"
            )
        self._tokenizer = tokenizer
        self._with_labels = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORE_LABEL)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        if "labels" in features[0]:
            padded: Mapping[str, Any] = self._with_labels(list(features))
            return padded
        batch = self._tokenizer.pad(list(features), return_tensors="pt")
        # Uses the mask: if padding is EOS, comparing ids would remove the loss of EOS tokens.
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORE_LABEL)
        return dict(batch)


def _validate(settings: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    try:
        configs: tuple[Any, ...] = TypeAdapter(tuple[MitigationConfig, ...]).validate_python(
            list(settings)
        )
    except ValidationError as error:
        problems = []
        for item in error.errors():
            place = ".".join(str(key) for key in item["loc"][1:])
            problems.append(f"'{place}': {item['msg']}; got {item['input']!r}")
        raise ConfigError(*problems) from error
    try:
        check_mitigations(configs)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if any(isinstance(config, GoldfishConfig) and config.k_by_dose for config in configs):
        raise ConfigError(
            "'k_by_dose' needs the number of repetitions of each document, which a collator does "
            "not have; remove it, or train with memguard"
        )
    return configs


def _number_documents(batch: Mapping[str, Any], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return ``[B, T]`` numbers that change where a document or padding begins."""
    starts = np.zeros(shape, dtype=bool)
    if batch.get("position_ids") is not None:
        starts |= np.asarray(batch["position_ids"]) == 0
    if batch.get("attention_mask") is not None:
        # Left padding must not be part of the context in which a text's first tokens are hashed.
        mask = np.asarray(batch["attention_mask"])
        if mask.shape == shape:
            starts[:, 1:] |= mask[:, 1:] != mask[:, :-1]
    numbers: NDArray[np.int64] = starts.cumsum(1)
    return numbers
