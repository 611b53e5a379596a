"""Draws a control from a dataset before it is trained, by the rule of a run's `control_fraction`.

    rows  ->  near-duplicate clusters  ->  whole clusters are held out  ->  train, control

The control has the kind of text of the training data and none of it was trained, so that an audit
knows what the model generates anyway.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.audit.selection import choose_part
from memguard.audit.suite import load_audit_suite
from memguard.audit.windows import AuditDocument
from memguard.config import AuditConfig, DataConfig, FormatConfig
from memguard.data.buckets import place_for_training, size_control
from memguard.data.documents import Document, document_text, load_documents, make_table
from memguard.data.duplicates import WordGrams
from memguard.data.encoding import build_decoder
from memguard.data.tokenization import hash_tokens, tokenize_documents
from memguard.errors import ConfigError, DataError
from memguard.runtime import default_cache_dir
from memguard.workflows.auditing.arguments import read_format

_FRACTION: float = DataConfig.model_fields["control_fraction"].default
_MOST = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditSplit:
    """Two parts of a dataset, each with its columns and in its order."""

    train: Any
    """`datasets.Dataset` to train on: the members of the audit."""
    control: Any
    """`datasets.Dataset` that is never trained: the nonmembers of the audit."""


def split_for_audit(
    dataset: Any,
    seed: int = 0,
    *,
    fraction: float = _FRACTION,
    format: str | Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> AuditSplit:
    """Split a dataset into documents to train and a control, as a run of memguard does.

    The control has ``fraction`` of the documents, raised towards 200 but not above a tenth; of
    small datasets a fifth, up to 30. Near-duplicates stay together.

    Args:
        dataset: a `datasets.Dataset` with texts, ``messages``, ``prompt`` and ``completion``,
            ``input_ids``, or rows of alpaca or sharegpt.
        seed: of the draw; the same seed gives the same split.
        fraction: share of the documents that are never trained, above 0 and up to 0.1.
        format: of the rows, as in `MemorizationAuditCallback`; None takes it from their columns.
        tokenizer: the model's; with it only documents long enough for the default audit count as
            control, as in a run. Without it all do.

    Raises:
        ConfigError: ``fraction`` out of range, or a wrong format.
        DataError: not a `datasets.Dataset`, no column of documents, or too few documents.
    """
    if not 0 < fraction <= _MOST:
        raise ConfigError(f"'fraction' should be above 0 and at most {_MOST:g}; got {fraction}")
    form = read_format(format)
    documents = _read(dataset, form, tokenizer)
    rows = np.array([int(document.id.rpartition("-")[2]) for document in documents], dtype=np.int64)
    is_usable, is_auditable, hashes = _find_auditable(documents, tokenizer, form.chat_date)
    documents = [document for document, usable in zip(documents, is_usable, strict=True) if usable]
    decode = None if tokenizer is None else build_decoder(tokenizer)
    grams = WordGrams(
        (document_text(document, decode) for document in documents),
        num_words=DataConfig.model_fields["near_duplicate_words"].default,
    )
    min_documents = AuditConfig().min_documents
    placements = place_for_training(
        data=DataConfig(train=("dataset",), control_fraction=fraction),
        origin=["train"] * len(documents),
        cluster=grams.cluster(hashes),
        auditable=is_auditable[is_usable],
        epochs=1,
        seed=seed,
        min_documents=min_documents,
    )
    is_control = np.array(
        [placed is not None and placed.role == "control" for placed in placements]
    )
    if not is_control.any():
        raise _explain(int(is_auditable[is_usable].sum()), len(documents), fraction, min_documents)
    held = np.zeros(len(dataset), dtype=bool)
    held[rows[is_usable][is_control]] = True
    return AuditSplit(
        train=dataset.select(np.flatnonzero(~held)), control=dataset.select(np.flatnonzero(held))
    )


def _read(dataset: Any, form: FormatConfig, tokenizer: Any) -> list[Document]:
    """Return the documents of a dataset; the ids end with the number of the row."""
    if isinstance(dataset, list | tuple):
        raise DataError(f"'dataset' must be a datasets.Dataset; got {type(dataset).__name__}")
    names = make_table(dataset, name="dataset").columns
    # Ids and sources of the dataset are not needed; without them an id is made of the row.
    named = form.columns.given.values()
    unused = [name for name in ("id", "source") if name in names and name not in named]
    return load_documents(
        (make_table(dataset.remove_columns(unused), name="dataset"),),
        setting="dataset",
        form=form,
        has_chat_template=lambda: getattr(tokenizer, "chat_template", None) is not None,
        cache_dir=default_cache_dir(),
    ).documents


def _find_auditable(
    documents: list[Document], tokenizer: Any, day: date | None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], list[str] | None]:
    """Return the documents that a run would train on, and those long enough for its audit.

    And a hash of the token ids of each of the former, None without a tokenizer.
    """
    everything = np.ones(len(documents), dtype=bool)
    if tokenizer is None:
        return everything, everything, None
    probe = load_audit_suite(AuditConfig()).extraction
    identify = partial(AuditDocument, id="", bucket="", role="trained", source="")
    least = DataConfig.model_fields["min_document_tokens"].default
    usable, auditable, hashes = [], [], []
    for tokens in tokenize_documents(
        documents, tokenizer, append_eos=True, max_tokens=None, setting="dataset", day=day
    ):
        spans = [(0, len(tokens.input_ids))]
        part = choose_part(tokens, spans, identify, kind="piece", probe=probe, window="last")
        usable.append(len(tokens.input_ids) >= least and bool(tokens.supervised[1:].any()))
        auditable.append(probe.window(part) is not None)
        if usable[-1]:
            hashes.append(hash_tokens(tokens.input_ids))
    return np.array(usable, dtype=bool), np.array(auditable, dtype=bool), hashes


def _explain(
    num_auditable: int, num_documents: int, fraction: float, min_documents: int
) -> DataError:
    """Return the error of a dataset of which no control can be drawn."""
    goal = size_control(num_auditable, fraction)
    if num_auditable - goal < min_documents or not goal:
        kind = "" if num_auditable == num_documents else " that are long enough to audit"
        return DataError(
            f"'dataset' has {num_auditable:,} documents{kind}, too few for a control and "
            f"{min_documents} to train on: give more documents, or other texts of the same kind "
            "as 'nonmembers'"
        )
    return DataError(
        f"'dataset' has {num_documents:,} documents in clusters of near-duplicates, each larger "
        f"than a control of {goal:,}: give other texts of the same kind as 'nonmembers'"
    )
