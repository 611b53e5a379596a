"""Makers of documents, windows, results and scores with only what a test cares about."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import record_examples

from memguard.audit.extraction import AuditDocument, count_needed_90
from memguard.audit.passages import TokenResult
from memguard.records import DocumentScore


@pytest.fixture(scope="session")
def make_document() -> Callable[..., AuditDocument]:
    return record_examples.make_document


@pytest.fixture(scope="session")
def make_result() -> Callable[..., TokenResult]:
    """A result from the flags of right tokens; margins 1 where right, -1 where wrong."""

    def make(correct: Any, ids: Any = None, margin: Any = None, each: float = -0.5) -> TokenResult:
        flags = np.asarray(correct, dtype=bool)
        truth = np.arange(len(flags)) if ids is None else np.asarray(ids)
        return TokenResult(
            argmax=np.where(flags, truth, truth + 1).astype(np.int32),
            correct=flags,
            logprob=np.full(len(flags), each, dtype=np.float32),
            margin=np.where(flags, 1, -1).astype(np.float32)
            if margin is None
            else np.asarray(margin, dtype=np.float32),
        )

    return make


@pytest.fixture(scope="session")
def make_score() -> Callable[..., DocumentScore]:
    """A document with ``num_correct`` of 50 tokens right, whose greedy text has as many."""

    def make(name: str, num_correct: int = 0, **fields: Any) -> DocumentScore:
        size = fields.get("continuation_tokens", 50)
        base = fields.pop("base", None)
        if base is not None:
            fields |= {
                "base_num_correct": base,
                "base_verbatim": base == size,
                "base_near_verbatim": base >= size - size // 10,
                "base_teacher_forced_90": base >= count_needed_90(size),
                "base_first_divergence": base,
                "base_logprob": -3.0 * size,
            }
        values: dict[str, Any] = {
            "bucket": "trained",
            "role": "trained",
            "source": "a.jsonl",
            "num_repetitions": 4,
            "num_tokens": 128,
            "prefix_tokens": 78,
            "continuation_tokens": size,
            "num_correct": num_correct,
            "verbatim": num_correct == size,
            "near_verbatim": num_correct >= size - size // 10,
            "num_edits": size - num_correct if num_correct >= size - size // 10 else None,
            "greedy_margin": 1.0,
            "teacher_forced_90": num_correct >= count_needed_90(size),
            "first_divergence": num_correct,
            "extraction_strength": float(num_correct == size),
            "logprob": -1.0 * size,
            "min_margin": 1.0,
            "type_token_ratio": 0.8,
            "argmax_type_token_ratio": 0.8,
        }
        return DocumentScore(id=name, **{**values, **fields})

    return make
