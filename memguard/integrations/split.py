"""Draws a control from a dataset before it is trained, by the rule of a run's `control_fraction`.

    rows  ->  near-duplicate clusters  ->  whole clusters are held out  ->  train, control

The control has the kind of text of the training data and none of it was trained, so that an audit
knows what the model generates anyway.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.audit.parts import Identity, choose_part
from memguard.audit.suite import load_audit_suite
from memguard.config import AuditConfig, DataConfig
from memguard.data.buckets import place_for_training, size_control
from memguard.data.documents import Document, document_text, load_documents, make_table
from memguard.data.duplicates import WordGrams
from memguard.data.tokenization import build_decoder, tokenize_documents
from memguard.errors import ConfigError, DataError
from memguard.runtime import default_cache_dir

_FRACTION: float = DataConfig.model_fields["control_fraction"].default
_MOST = 0.1
_KINDS = ({"messages"}, {"prompt", "completion"}, {"input_ids"})
"""Columns of documents other than plain text."""


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
    text_column: str = "text",
    tokenizer: Any = None,
) -> AuditSplit:
    """Split a dataset into documents to train and a control, as a run of memguard does.

    The control has ``fraction`` of the documents, raised towards 200 but not above a tenth; of
    small datasets a fifth, up to 30. Documents that share a run of 13 words stay together.

    Args:
        dataset: a `datasets.Dataset` with texts, ``messages``, ``prompt`` and ``completion``, or
            ``input_ids``.
        seed: of the draw; the same seed gives the same split.
        fraction: share of the documents that are never trained, above 0 and up to 0.1.
        text_column: column of plain texts.
        tokenizer: the model's; with it only documents long enough for the default audit count as
            control, as in a run. Without it all do.

    Raises:
        ConfigError: ``fraction`` out of range.
        DataError: not a `datasets.Dataset`, no column of documents, or too few documents.
    """
    if not 0 < fraction <= _MOST:
        raise ConfigError(f"'fraction' should be above 0 and at most {_MOST:g}; got {fraction}")
    documents = _read(dataset, text_column)
    rows = np.array([int(document.id.rpartition("-")[2]) for document in documents], dtype=np.int64)
    is_usable, is_auditable = _find_auditable(documents, tokenizer)
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
        cluster=grams.cluster().cluster,
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


def _read(dataset: Any, text_column: str) -> list[Document]:
    """Return the documents of a dataset; the ids end with the number of the row."""
    if isinstance(dataset, list | tuple):
        raise DataError(f"'dataset' must be a datasets.Dataset; got {type(dataset).__name__}")
    table = make_table(dataset, name="dataset", text_column=text_column)
    names = set(table.columns)
    if text_column not in names and not any(kind <= names for kind in _KINDS):
        raise DataError(
            f"'dataset' needs the column '{text_column}', 'messages', 'prompt' and 'completion', "
            f"or 'input_ids'; it has {', '.join(sorted(names))}. Name the one that holds the text "
            "in 'text_column'"
        )
    if "input_ids" in names - {text_column}:
        others = sorted(names & {text_column, "messages", "prompt"})
        if others:
            raise DataError(
                f"'dataset' has the columns '{others[0]}' and 'input_ids': either could be the "
                "document. Remove one, or set text_column='input_ids'"
            )
    # Ids and sources of the dataset are not needed; without them an id is made of the row.
    unused = [name for name in ("id", "source") if name in names and name != text_column]
    table = make_table(dataset.remove_columns(unused), name="dataset", text_column=text_column)
    return load_documents(
        (table,), setting="dataset", text_column=text_column, cache_dir=default_cache_dir()
    ).documents


def _find_auditable(
    documents: list[Document], tokenizer: Any
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the documents that a run would train on, and those long enough for its audit."""
    everything = np.ones(len(documents), dtype=bool)
    if tokenizer is None:
        return everything, everything
    probe = load_audit_suite(AuditConfig()).extraction
    identity = Identity(id="", bucket="", role="trained", source="")
    least = DataConfig.model_fields["min_document_tokens"].default
    usable, auditable = [], []
    for tokens in tokenize_documents(
        documents, tokenizer, append_eos=True, max_tokens=None, setting="dataset"
    ):
        spans = [(0, len(tokens.input_ids))]
        part = choose_part(tokens, spans, identity, kind="piece", probe=probe, window="last")
        usable.append(len(tokens.input_ids) >= least and bool(tokens.supervised[1:].any()))
        auditable.append(probe.window(part) is not None)
    return np.array(usable, dtype=bool), np.array(auditable, dtype=bool)


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
