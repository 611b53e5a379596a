"""Goldfish in the data of transformers' Trainer and of TRL: dropped labels become -100.

    GoldfishCollator    masks each batch; as `data_collator=`, where the trainer accepts one
    wrap_collator       puts it around the collator of a trainer that exists, as TRL needs with
                        packing; a packed row is masked document by document
    goldfish_dataset    writes the column `labels` of a tokenised dataset before it is packed: the
                        labels of a document do not depend on how it is packed

The labels are those of memguard's own loader. Mode `random` draws other labels in each epoch, which
only the collators can.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from transformers import DataCollatorForSeq2Seq

from memguard.config import GoldfishConfig, MitigationConfig
from memguard.config.mitigations import check_mitigations
from memguard.data.encoding import find_special_ids
from memguard.data.tokenization import list_token_texts
from memguard.errors import ConfigError
from memguard.integrations.token_runs import find_starts
from memguard.mitigation import build_mitigations
from memguard.planner.drop_shares import refuse_without_drops
from memguard.records import IGNORE_LABEL
from memguard.seeds import derive_generator

Collator = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
_MASK_COLUMNS = ("completion_mask", "assistant_masks")
"""Columns of TRL with 0 where a token has no loss."""
_PREFERENCES = ("DPO", "KTO", "ORPO", "CPO", "Reward", "GRPO", "RLOO", "PPO", "OnlineDPO")
"""Beginnings of the names of TRL's trainers that do not minimise the NLL of labels."""
SUPERVISED = (
    "dropped labels would change what is compared, not what is memorized. Use goldfish in "
    "supervised fine-tuning"
)
_PREFERENCE_COLUMNS = {"DPO": {"rejected"}, "KTO": {"prompt", "completion", "label"}}


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
        self._masks = _Masks(tokenizer, settings)
        self._collator = collator or _Padding(tokenizer)
        self._seed, self._num_batches = seed, 0

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch; ``labels`` ``[B, T]`` are IGNORE_LABEL at positions without loss.

        Raises:
            ConfigError: none of many labels so far is dropped.
        """
        batch = dict(self._collator(features))
        text = "the collator returns no 'labels'; pass a collator that does, or no collator"
        _refuse(("labels" not in batch, text))
        input_ids = np.asarray(batch["input_ids"])
        given = (batch.get(name) for name in ("position_ids", "attention_mask"))
        arrays = (None if each is None else np.asarray(each) for each in given)
        # Left padding must not be part of the context in which a text's first tokens are hashed.
        document_ids = find_starts(input_ids.shape, *arrays).cumsum(1)
        generator = derive_generator(self._seed, "goldfish collator", self._num_batches)
        self._num_batches += 1
        labels = np.asarray(batch["labels"], dtype=np.int64).copy()
        # A document's first token is not predicted, so it must not be counted either.
        labels[:, 0] = IGNORE_LABEL
        labels[:, 1:][document_ids[:, 1:] != document_ids[:, :-1]] = IGNORE_LABEL
        masked = self._masks.mask_labels(input_ids, labels, document_ids, generator)
        batch["labels"] = torch.from_numpy(masked)
        return batch


def wrap_collator(trainer: Any, *, seed: int = 0, **settings: Any) -> None:
    """Put a `GoldfishCollator` around the collator of a trainer, before it trains.

    For TRL's packing and padding-free rows, with which it refuses `data_collator=`.

    Args:
        trainer: a `Trainer` or `SFTTrainer` with a tokenizer.
        seed: seed of mode ``random``.
        settings: settings of the mitigation ``goldfish``.

    Raises:
        ConfigError: an unknown setting, no tokenizer, a trainer of preferences or rewards, or
            packing ``wrapped``, whose rows do not show where a document begins.
    """
    name, arguments = type(trainer).__name__, trainer.args
    tokenizer = getattr(trainer, "processing_class", None)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    is_packed = getattr(arguments, "packing", False)
    _refuse(
        (
            any(kind.__name__.startswith(_PREFERENCES) for kind in type(trainer).__mro__),
            f"'{name}' compares sequences or rewards them: {SUPERVISED}",
        ),
        (
            is_packed and arguments.packing_strategy == "wrapped",
            "'packing_strategy' wrapped cuts rows without regard to documents. Use "
            "goldfish_dataset before packing, or packing_strategy='bfd'",
        ),
        (tokenizer is None, f"'{name}' has no tokenizer; pass it as 'processing_class'"),
    )
    trainer.data_collator = GoldfishCollator(
        tokenizer, trainer.data_collator, seed=seed, **settings
    )


def goldfish_dataset(dataset: Any, tokenizer: Any, **settings: Any) -> Any:
    """Return a tokenised dataset with the column ``labels``, in which dropped labels are -100.

    Labels that the dataset has are kept; without any, every token is one, but for those that TRL's
    columns ``completion_mask`` and ``assistant_masks`` leave out. The first token of a document is
    not predicted and has no label.

    Args:
        dataset: a `datasets.Dataset` or `IterableDataset` with ``input_ids``, one document a row.
        tokenizer: the model's tokenizer; its special tokens are never dropped.
        settings: settings of the mitigation ``goldfish``: k, context_width, mode, normalise.

    Raises:
        ConfigError: an unknown setting, mode ``random``, or a dataset that is not tokenised or is
            one of preferences; or, when its rows are read, none of many labels is dropped.
    """
    names = set(dataset.column_names or next(iter(dataset)))
    kind = next((kind for kind, needed in _PREFERENCE_COLUMNS.items() if needed <= names), None)
    _refuse(
        (kind is not None, f"the dataset is one of preferences ({kind}): {SUPERVISED}"),
        (
            kind is None and "input_ids" not in names,
            f"the dataset needs the column 'input_ids'; it has {', '.join(sorted(names))}. "
            "Tokenise it first, e.g. dataset.map(lambda row: tokenizer(row['text']))",
        ),
        (
            settings.get("mode") == "random",
            "'mode' random drops other labels in each epoch, which a column cannot; use "
            "GoldfishCollator or wrap_collator",
        ),
    )
    row_masks = _Masks(tokenizer, settings)
    masks = [name for name in _MASK_COLUMNS if name in names]

    def add_labels(rows: Mapping[str, Sequence[Any]]) -> dict[str, list[list[int]]]:
        given = rows["labels"] if "labels" in names else [None] * len(rows["input_ids"])
        columns = zip(rows["input_ids"], given, *(rows[name] for name in masks), strict=True)
        return {"labels": [_mask_row(row_masks, *row) for row in columns]}

    return dataset.map(add_labels, batched=True)


def _mask_row(
    row_masks: "_Masks",
    input_ids: Sequence[int],
    labels: Sequence[int] | None,
    *masks: Sequence[int],
) -> list[int]:
    ids = np.asarray(input_ids, dtype=np.int64)
    kept = ids.copy() if labels is None else np.asarray(labels, dtype=np.int64)
    for mask in masks if labels is None else ():
        kept[np.asarray(mask) == 0] = IGNORE_LABEL
    kept[:1] = IGNORE_LABEL
    # These modes draw no random numbers.
    masked = row_masks.mask_labels(ids, kept, None, derive_generator(0, "goldfish dataset"))
    result: list[int] = masked.tolist()
    return result


class _Padding:
    """Pads features; all tokens are labels if features have none."""

    def __init__(self, tokenizer: Any) -> None:
        way_out = "set 'tokenizer.pad_token = tokenizer.eos_token' (EOS keeps its loss)"
        _refuse((tokenizer.pad_token_id is None, f"the tokenizer has no padding token; {way_out}"))
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


class _Masks:
    """Masks labels, and refuses a goldfish that has dropped none of many."""

    def __init__(self, tokenizer: Any, settings: Mapping[str, Any]) -> None:
        self._mitigations = build_mitigations(
            validate_mitigations([{"name": "goldfish", **settings}]),
            special_ids=sorted(find_special_ids(tokenizer)),
            token_texts=lambda: list_token_texts(tokenizer),
        )
        self._num_labels, self._has_dropped = 0, False

    def mask_labels(
        self,
        input_ids: NDArray[np.integer],
        labels: NDArray[np.int64],
        document_ids: NDArray[np.int64] | None,
        generator: np.random.Generator,
    ) -> NDArray[np.int64]:
        masked = self._mitigations.mask_labels(
            input_ids, labels, document_ids=document_ids, generator=generator
        )
        self._num_labels += int((labels != IGNORE_LABEL).sum())
        self._has_dropped |= not np.array_equal(masked, labels)
        if not self._has_dropped:
            refuse_without_drops(self._mitigations.goldfish, self._num_labels, "the documents")
        return masked


def validate_mitigations(settings: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Return the settings of mitigations as in a run's YAML.

    Raises:
        ConfigError: an invalid setting, settings that cannot be combined, or `k_by_dose`.
    """
    configs: tuple[Any, ...] = ()
    problems: list[str] = []
    try:
        configs = TypeAdapter(tuple[MitigationConfig, ...]).validate_python(list(settings))
        check_mitigations(configs)
    except ValidationError as error:
        for item in error.errors():
            place = ".".join(str(key) for key in item["loc"][1:])
            problems.append(f"'{place}': {item['msg']}; got {item['input']!r}")
    except ValueError as error:
        problems.append(str(error))
    if any(isinstance(config, GoldfishConfig) and config.k_by_dose for config in configs):
        problems.append(
            "'k_by_dose' needs the number of repetitions of each document, which a collator does "
            "not have; remove it, or train with memguard"
        )
    _refuse(*((True, problem) for problem in problems))
    return configs


def _refuse(*checks: tuple[object, str]) -> None:
    """Raise one ConfigError with the text of each check that is true."""
    problems = [text for is_wrong, text in checks if is_wrong]
    if problems:
        raise ConfigError(*problems)
