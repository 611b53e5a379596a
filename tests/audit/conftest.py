"""Makers of documents and results with only what a test cares about."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from audit_examples import cut
from record_examples import make_document

from memguard.audit.passages import TokenResult
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.windows import Window


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


@pytest.fixture
def windows() -> list[Window]:
    """Six random texts of 20 tokens, of which the last 6 are continued."""
    draw = np.random.default_rng(0)
    documents = [make_document(draw.integers(0, 90, 20), name=f"d{n}") for n in range(6)]
    return cut(ExtractionProbe(continuation_tokens=6), documents)
