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


@pytest.mark.parametrize("generated", ["model", "base", "both"])
def test_near_verbatim_is_missing_where_no_text_was_generated(
    make_score: Callable[..., DocumentScore], generated: str
) -> None:
    """Of the base only beside the model's: alone it would be compared with nothing."""
    missing = {"model": {"base_near_verbatim": None}, "base": {"near_verbatim": None}, "both": {}}
    scores = [
        make_score(f"d{index}", 50, base=50).model_copy(update=missing[generated])
        for index in range(3)
    ]
    (row,) = build_rows(build_evidence(scores))
    assert row.base is not None
    assert ("near_verbatim" in row.risks) is (generated != "base")
    assert (row.model.near_verbatim is not None) is (generated != "base")
    assert ("near_verbatim" in row.base_risks) is (generated == "both")
    assert (row.base.near_verbatim is not None) is (generated == "both")
