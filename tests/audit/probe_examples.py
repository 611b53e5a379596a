"""What probes tabulate, from measurements or from numbers that a test gives."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from record_examples import make_outline

from memguard.audit.cache import ScoreMatrix
from memguard.audit.metrics import Evidence
from memguard.audit.probe import Summary
from memguard.audit.requests import Inputs, Measured
from memguard.audit.windows import Window
from memguard.records import ResultRow, Tables


def make_measured(columns: Mapping[str, ArrayLike]) -> Measured:
    """Return numbers of N documents by name."""
    rows = np.stack([np.asarray(column, dtype=np.float64) for column in columns.values()], axis=1)
    return Measured(columns=ScoreMatrix(names=tuple(columns), rows=rows))


def make_evidence(
    windows: Sequence[Window],
    trained: Mapping[str, Measured],
    other: Mapping[str, Measured] | None = None,
    *,
    buckets: Sequence[Any] | None = None,
    goldfish: Any = None,
    **fields: Any,
) -> Evidence:
    """Return the evidence of an audit; its buckets are those of the windows, in their order."""
    roles = {w.document.bucket: (w.document.role, w.document.num_repetitions) for w in windows}
    return Evidence(
        inputs=Inputs(
            windows=windows, max_edit_share=0.1, seed=0, tiny_margin=1e-3, goldfish=goldfish
        ),
        buckets=buckets or [make_outline(name, *role) for name, role in roles.items()],
        trained=trained,
        other=other,
        **fields,
    )


def to_tables(summary: Summary) -> Tables:
    """Return the rows of a summary as tables, which find them by key."""
    return Tables(
        results=tuple(summary.rows), metrics=tuple(summary.metrics), details=tuple(summary.details)
    )


def count(row: ResultRow | None) -> tuple[int | None, int]:
    """Return how many documents match, and of how many."""
    assert row is not None
    return row.num_matched, row.num_documents
