"""The report's table: which numbers are in it, and which are left out."""

from collections.abc import Callable

import pytest
from audit_examples import build_evidence, build_rows

from memguard.records import DocumentScore


@pytest.mark.parametrize(("num_with_base", "is_shown"), [(0, False), (2, False), (3, True)])
def test_a_base_that_scored_only_some_documents_is_not_shown(
    make_score: Callable[..., DocumentScore], num_with_base: int, is_shown: bool
) -> None:
    """Rates over other documents than the model's would be compared with them."""
    scores = [
        make_score(f"d{index}", 50, base=10 if index < num_with_base else None)
        for index in range(3)
    ]
    (row,) = build_rows(build_evidence(scores))
    assert row.model.verbatim.num_documents == 3
    assert (row.base is not None) is is_shown
    assert bool(row.base_risks) is is_shown
    if row.base is not None:
        assert row.base.verbatim.num_documents == 3
