"""Small corpora made of token lists, in memory or ready to be written."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from record_examples import make_entry

from memguard.data.corpus import FORMATS, Corpus
from memguard.data.tokenization import TokenizedDocument
from memguard.records import ManifestEntry
from memguard.records.run_files import PreparedSummary


def summarise(num_documents: int, **fields: Any) -> PreparedSummary:
    return PreparedSummary(
        key="k",
        audit_key="a",
        documents_sha256="d",
        sources=["s"],
        num_documents=num_documents,
        num_empty=1,
        num_shorter=2,
        num_left_out=3,
        num_canaries=0,
        num_clusters=num_documents,
        num_control=0,
        num_control_overlapping=0,
        **fields,
    )


def tokenized(
    index: int, ids: Sequence[int], supervised: Any = None, *, content: int | None = None
) -> TokenizedDocument:
    return TokenizedDocument(
        id=f"d{index}",
        source="s",
        format=FORMATS[index % 3],
        input_ids=np.array(ids, dtype=np.int32),
        supervised=np.ones(len(ids), bool) if supervised is None else np.array(supervised, bool),
        num_content_tokens=len(ids) if content is None else content,
    )


def enter(document: TokenizedDocument, **fields: Any) -> ManifestEntry:
    values = {"source": document.source, "num_tokens": len(document.input_ids), **fields}
    return make_entry(document.id, **values)


def make_corpus(documents: Sequence[TokenizedDocument], fields: Any = None) -> Corpus:
    """A corpus in memory; `fields` are settings of the manifest entry of each document."""
    fields = fields or [{}] * len(documents)
    return Corpus(
        summary=summarise(len(documents), changes=Counter(c for d in documents for c in d.changes)),
        manifest=[enter(d, **more) for d, more in zip(documents, fields, strict=True)],
        input_ids=np.concatenate([d.input_ids for d in documents]),
        supervised=np.concatenate([d.supervised for d in documents]),
        offsets=np.cumsum([0, *(len(d.input_ids) for d in documents)], dtype=np.int64),
        content_tokens=np.array([d.num_content_tokens for d in documents], dtype=np.int64),
        format=np.array([FORMATS.index(d.format) for d in documents], dtype=np.uint8),
    )
