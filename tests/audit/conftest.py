"""Makers of documents and results with only what a test cares about."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import record_examples

from memguard.audit.passages import TokenResult
from memguard.audit.windows import AuditDocument


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
