"""Entries of a manifest, documents and buckets of an audit with only what a test cares about."""

from typing import Any

import numpy as np

from memguard.audit.windows import AuditDocument
from memguard.records import BucketRow, ManifestEntry


def make_entry(identifier: str = "a", **fields: Any) -> ManifestEntry:
    """Return a trained document; its bucket is named after its role."""
    role = fields.get("role", "trained")
    values: dict[str, Any] = {
        "text_hmac": "",
        "source": "a.jsonl",
        "bucket": role,
        "role": role,
        "planned_repetitions": 1,
        "num_repetitions": None,
        "num_tokens": 1,
        "cluster": 0,
    }
    return ManifestEntry(id=identifier, **{**values, **fields})


def make_document(ids: Any, *, name: str = "d", **fields: Any) -> AuditDocument:
    """Return a plain text that was trained once, of which every token receives loss."""
    array = np.asarray(ids, dtype=np.int32)
    values: dict[str, Any] = {
        "bucket": "trained",
        "role": "trained",
        "source": "a.jsonl",
        "num_repetitions": 1,
        "supervised": np.ones(len(array), dtype=bool),
        "format": "text",
        "num_tokens": len(array),
        "text_hmac": None,
    }
    return AuditDocument(id=name, input_ids=array, **{**values, **fields})


def make_outline(
    bucket: str, role: Any = "trained", num_repetitions: int | None = None, **counts: int
) -> BucketRow:
    """Return a bucket of which every document is audited, unless ``counts`` say otherwise."""
    values = {"num_too_short": 0, "num_not_sampled": 0, **counts}
    return BucketRow(bucket=bucket, role=role, num_repetitions=num_repetitions, **values)
